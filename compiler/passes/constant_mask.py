"""Masks of attention that a graph computes from constants alone, as models of transformers do: one that hides nothing
is taken away, and one that hides exactly what comes behind each query becomes the operator's own causal flag.

So both torch's kernel and ours skip what is hidden, and nobody writes or reads a mask. What is computed stays the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from kernelwright.compiler.passes import attention_variants as variants
from kernelwright.compiler.passes.candidate import is_known, value_of

_log = logging.getLogger(__name__)

NAMESPACES = ("aten", "prims")
"""Operators of torch's own; others may read more than their arguments, or wait for other processes."""

MOST_STEPS = 200
"""Steps that a mask is computed in at most, to be looked at."""

HIDDEN = -65504.0
"""What torch writes into a mask for cuDNN where a bool one hides a key, and the least number of fp16; others write less
than that."""

MOST_ELEMENTS = 2**26
"""Elements that any of these steps has in memory at most."""


def simplify_masks(graph: Graph, devices: Collection[str]) -> None:
    """Do this to every attention on a device of these types."""
    known: dict[Node, bool | None] = {}
    for node in [node for node in graph.nodes if node.target in (*variants.FORWARD, *variants.BACKWARD)]:
        mask = _mask(node)
        if mask is None or not is_known(mask) or value_of(mask).device.type not in devices:
            continue
        if mask not in known:
            known[mask] = _causal(mask)
        causal = known[mask]
        if causal is not None and not _reads_own_flag(node):
            variants.without_mask(node, causal)


def _mask(node: Node) -> Node | None:
    """An attention's mask, or the bool one that it is made of, which all layers may share."""
    found = variants.read(node)
    if found is None:
        return variants.mask_of(node)
    return found.forward.mask if isinstance(found, variants.Backward) else found.mask


def _reads_own_flag(node: Node) -> bool:
    """Whether a node with a mask hides something besides; or a gradient of the mask is wanted."""
    found = variants.arguments_of(node)
    return bool(found["is_causal"]) or found.get("grad_input_mask", [False])[-1]


def _causal(mask: Node) -> bool | None:
    return what_it_hides(steps_of(mask, _is_plain), _evaluated)


def what_it_hides(steps: list[Node] | None, evaluate: Callable[[list[Node]], torch.Tensor]) -> bool | None:
    """`judged` of the mask that the steps compute, worked out on the CPU; None where that is not possible."""
    if steps is None:
        return None
    try:
        with _disable_current_modes(), torch.no_grad():
            return judged(evaluate(steps))
    except Exception as error:
        # a step that runs on a GPU alone, for one
        _log.info("a mask is left as it is: %s", error)
        return None


def judged(mask: torch.Tensor) -> bool | None:
    """True for a mask that hides exactly what comes behind each query, False for one that hides nothing, None else."""
    for place in range(mask.dim() - 2):
        # the same all along
        mask = mask.narrow(place, 0, 1) if mask.stride(place) == 0 else mask
    if mask.dtype is torch.bool:
        seen = mask
    else:
        seen, hidden = mask == 0, mask <= HIDDEN
        if not bool((seen | hidden).all()):
            return None
    if bool(seen.all()):
        return False
    rows, columns = seen.shape[-2:]
    if rows != columns:
        return None
    return True if bool((seen == torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril()).all()) else None


def steps_of(mask: Node, is_plain: Callable[[Node], bool]) -> list[Node] | None:
    """The steps that a mask is computed in, in the graph's order; None where one of them is not plain, or they are more
    than MOST_STEPS."""
    found, waiting = {mask}, [mask]
    while waiting:
        node = waiting.pop()
        if len(found) > MOST_STEPS or not is_plain(node):
            return None
        for before in node.all_input_nodes:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return sorted(found)


def _is_plain(node: Node) -> bool:
    """Whether a step gives the same each time, and is small enough to be tried."""
    if node.op == "get_attr":
        return _constant(node) is not None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not is_known(node):
        return False
    if node.target.namespace not in NAMESPACES or not is_small(value_of(node)):
        return False
    tags, schema = node.target.tags, node.target._schema
    return torch.Tag.nondeterministic_seeded not in tags and not schema.is_mutable and not _is_empty(node)


def _constant(node: Node) -> torch.Tensor | None:
    """The number that a graph holds, as torch.tensor(0.0) becomes one; None for parameters, buffers and all larger
    tensors, which may change."""
    held = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor | torch.nn.Parameter):
        return None
    return held if held.dim() == 0 and str(node.target).startswith("_tensor_constant") else None


def is_small(value: torch.Tensor) -> bool:
    """Whether a tensor's elements, those that lie in memory, are few enough to be worked out."""
    pairs = list(zip(value.shape, value.stride(), strict=True))
    if not all(isinstance(number, int) for pair in pairs for number in pair):
        return False
    return math.prod(size for size, stride in pairs if stride) <= MOST_ELEMENTS


def _is_empty(node: Node) -> bool:
    """Whether a step leaves its numbers open."""
    return "empty" in str(node.target)


def on_cpu(argument: Any) -> Any:
    """An argument of a step, so that it makes its tensor where it can be looked at."""
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _evaluated(steps: list[Node]) -> torch.Tensor:
    values: dict[Node, Any] = {}
    for node in steps:
        held = _constant(node) if node.op == "get_attr" else None
        if held is not None:
            values[node] = held.detach().cpu()
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), on_cpu)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result: torch.Tensor = values[steps[-1]]
    return result
