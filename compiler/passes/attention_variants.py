"""Reads the operators that scaled_dot_product_attention becomes, which differ in order and names of their arguments.

The one place that knows these: they are torch's inner operators, and may change from release to release.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

NAMES = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def _present(ending: str) -> tuple[Any, ...]:
    packets = (getattr(aten, f"_scaled_dot_product_{name}{ending}", None) for name in NAMES)
    return tuple(packet.default for packet in packets if packet is not None)


FORWARD = _present("")
"""Operators of the forward pass that this torch has; results begin with the output and its logarithms."""

BACKWARD = _present("_backward")
"""Operators of the backward pass; results begin with the gradients of query, key and value."""

LOWER_RIGHT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)
"""Operators whose causal flag lets the last query see every key, as torch.nn.attention.bias.causal_lower_right has it;
that of the others lets the first query see the first key."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """An attention's operands [B, H, S, D]. mask: whatever spreads to [B, H, Sq, Skv], bool or additive. scale: None
    for 1/sqrt(D). causal: whether keys behind a query are hidden. lower_right: places of these count from the last ones
    on, which makes a difference where there are more queries than keys, or fewer."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    causal: bool
    scale: float | None
    lower_right: bool = False


@dataclasses.dataclass(frozen=True)
class Backward:
    """What the backward pass of an attention reads."""

    forward: Forward
    out: Node
    lse: Node
    d_out: Node


def read(node: Node) -> Forward | Backward | None:
    """A node with one of the targets, taken apart; None where it drops out or holds what is not a tensor."""
    found = arguments_of(node)
    if found["dropout_p"] != 0.0:
        return None
    mask = found.get("attn_bias", found.get("attn_mask"))
    tensors = [found[name] for name in ("query", "key", "value")]
    if not all(isinstance(tensor, Node) for tensor in tensors):
        return None
    scale = found.get("scale")
    if scale is not None and not isinstance(scale, float | int):
        return None
    q, k, v = tensors
    causal = bool(found["is_causal"])
    lower_right = causal and node.target in LOWER_RIGHT
    forward = Forward(q, k, v, _plain(mask) if _is_there(mask) else None, causal, scale, lower_right)
    if node.target not in BACKWARD:
        return forward
    d_out = found.get("grad_out", found.get("grad_out_"))
    if not isinstance(d_out, Node):
        return None
    return Backward(forward, found["out"], found["logsumexp"], d_out)


def mask_of(node: Node) -> Node | None:
    """The mask of a node with one of the targets."""
    named = arguments_of(node)
    mask = named.get("attn_bias", named.get("attn_mask"))
    return mask if _is_there(mask) else None


def without_mask(node: Node, causal: bool) -> None:
    """Take the mask of a node away, and hide what comes behind a query if `causal`."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name in ("attn_bias", "attn_mask", "is_causal"):
            value = causal if argument.name == "is_causal" else None
            if place < len(node.args):
                node.update_arg(place, value)
            else:
                node.update_kwarg(argument.name, value)


def arguments_of(node: Node) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    for argument in schema.arguments:
        if argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def _is_there(mask: Any) -> bool:
    """Whether there is a mask; a backward pass without one gets nothing, or an empty tensor."""
    return isinstance(mask, Node) and getattr(mask.meta.get("val"), "shape", ()) != (0,)


def _plain(mask: Any) -> Node:
    """The bool mask that an additive one was made of, which is half the memory; else the mask as it is."""
    found: Node = mask
    source: Any = mask
    columns = mask.meta["val"].shape[-1]
    while _is_spread(source):
        source = source.args[0]
        if not statically_known_true(source.meta["val"].shape[-1] >= columns):
            # what was cut off was padded again
            return found
    if source.target is aten.where.self and statically_known_true(source.meta["val"].shape[-1] == columns):
        seen, kept, hidden = source.args
        if _number(kept) == 0.0 and _number(hidden) == float("-inf") and isinstance(seen, Node):
            return seen
    return found


def _is_spread(node: Node) -> bool:
    """Whether a node is what torch puts between a mask and the attention: it spreads masks, pads their rows at the end
    to an aligned length, and takes the beginnings of these. Whatever else is cut or padded is another mask."""
    args: Any = node.args
    if node.target is aten.expand.default:
        return True
    if node.target is aten.constant_pad_nd.default:
        # a number that only a call tells is a node
        return len(args[1]) == 2 and args[1][0] == 0 and isinstance(args[1][1], int) and args[1][1] >= 0
    if node.target is aten.slice.Tensor:
        cut = arguments_of(node)
        last = cut["dim"] in (-1, node.meta["val"].dim() - 1)
        return last and cut["start"] in (0, None) and cut["step"] == 1
    return False


def _number(node: Any) -> float | None:
    """The value of a node that makes a constant tensor."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.scalar_tensor.default:
        return float(node.args[0])  # type: ignore[arg-type]
    if node.target is aten.full.default:
        return float(node.args[1])  # type: ignore[arg-type]
    return None
