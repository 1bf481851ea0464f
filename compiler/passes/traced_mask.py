"""Constant masks of attention in the graph that dynamo traced, before torch chooses what computes it.

For a mask of some strides (one that spreads along the keys) torch's own choice is to compute attention step by step,
in fp32, whatever the mask says. Models of transformers make such masks to hide nothing. See `constant_mask` for what
becomes of them.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kernelwright.compiler.passes.constant_mask import is_small, on_cpu, steps_of, what_it_hides

_log = logging.getLogger(__name__)

ATTENTION = torch._C._nn.scaled_dot_product_attention

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_NAMES = """
add and and_ arange bitwise_and bitwise_or bool broadcast_to clone contiguous cumsum diff eq expand expand_as flip
float full full_like ge getitem gt invert le logical_and logical_not logical_or lt masked_fill mul ne neg new_full
new_ones new_zeros ones ones_like or or_ repeat reshape scalar_tensor squeeze sub tensor to transpose tril triu type
unsqueeze view where xor zeros zeros_like
"""

_STEPS = frozenset(_NAMES.split())
"""Functions and methods that give the same each time and change nothing."""

_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_SPECIAL = re.compile(r"__(\w+)__")

_MODULES = (None, "torch", "torch.functional", "_operator", "torch._C", "torch._tensor")
"""Where such functions come from; others of the same names may do anything."""

_IN_PLACE = {"setitem", "delitem", "iand", "ior", *(f"i{name}" for name in dir(operator))} & {*dir(operator)}
_WRITERS = frozenset({*_IN_PLACE, "idiv"})
"""Python's own functions that write into what they are given (setitem, iadd, imul and so on), and torch's idiv."""


def simplify_traced_masks(module: GraphModule) -> int:
    """Do this to every attention of a graph of torch's functions; how many were changed."""
    changed = 0
    known: dict[Node, bool | None] = {}
    for node in [node for node in module.graph.nodes if node.target is ATTENTION]:
        try:
            changed += _simplified(node, known)
        except Exception as error:
            _log.info("a mask is left as it is: %s", error)
    if changed:
        module.recompile()
    return changed


def _simplified(node: Node, known: dict[Node, bool | None]) -> bool:
    """known: what was found out about masks of the graph, which all layers may share."""
    given = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    mask = given.get("attn_mask")
    if not isinstance(mask, Node) or given.get("is_causal", False):
        return False
    if mask not in known:
        known[mask] = _causal(mask)
    causal = known[mask]
    if causal is None:
        return False
    node.args = node.args[:3]
    by_place = _ARGUMENTS[: len(node.args)]
    # all others by name, whichever way they were given
    kept = {name: value for name, value in given.items() if name not in (*by_place, "attn_mask")}
    node.kwargs = {**kept, "is_causal": causal}
    return True


def _causal(mask: Node) -> bool | None:
    """See `constant_mask.judged`; None, too, where something may have been written into the mask since."""
    steps = steps_of(mask, _is_plain)
    if steps is None:
        return None
    memory = {_memory(node) for node in steps}
    written = any(
        _memory(read) in memory for node in mask.graph.nodes if _writes(node) for read in node.all_input_nodes
    )
    return None if written else what_it_hides(steps, _evaluated)


def _memory(node: Node) -> int:
    """Which memory a tensor lies in; views of it lie in the same."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def _writes(node: Node) -> bool:
    """Whether a node may write into what it reads."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = _name(node)
    if name not in _STEPS and _may_be_in_place(node):
        return True
    in_place = name.endswith("_") and not name.endswith("__") and name not in _STEPS
    return in_place or name in _WRITERS or "out" in node.kwargs or not name


def _may_be_in_place(node: Node) -> bool:
    """Whether a function has a flag `inplace`, as activations and dropouts have, that may be set."""
    try:
        place = list(inspect.signature(node.target).parameters).index("inplace")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        # none, or written in C: those have no such flag
        return bool(node.kwargs.get("inplace", False))
    return bool(node.kwargs.get("inplace", node.args[place] if place < len(node.args) else False))


def _is_plain(node: Node) -> bool:
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor) or not is_small(value):
        return False
    own = node.op == "call_method" or getattr(node.target, "__module__", None) in _MODULES
    return own and _name(node) in _STEPS and "out" not in node.kwargs


def _name(node: Node) -> str:
    """Of a function or a method, that of an operator such as `__eq__` without its underscores; "" for what is more than
    that."""
    if isinstance(node.target, torch._ops.HigherOrderOperator | torch._ops.OpOverloadPacket):
        return ""
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    special = _SPECIAL.fullmatch(name)
    return special[1] if special else name


def _evaluated(steps: list[Node]) -> torch.Tensor:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].args = torch.fx.node.map_aggregate(copies[node].args, _on_cpu)
        copies[node].kwargs = torch.fx.node.map_aggregate(copies[node].kwargs, _on_cpu)
    graph.output(copies[steps[-1]])
    result: torch.Tensor = torch.fx.Interpreter(GraphModule({}, graph)).run()
    return result


def _on_cpu(argument: Any) -> Any:
    """See `on_cpu`; the only single words that these steps take are names of devices."""
    named = isinstance(argument, str) and _DEVICE.fullmatch(argument)
    return "cpu" if named else on_cpu(argument)
