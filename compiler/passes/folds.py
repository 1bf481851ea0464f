"""Computes the scales and biases that kernels of ours take along in few launches, instead of one for each of them.

A batch norm behind a convolution is folded into two vectors, made of its four. Inductor would start a kernel for each
convolution to make them, which takes as long as a tenth of a small convolution. As list operators they are few.

Only in inference: torch can neither save nor compute again a list, where it takes forward and backward apart.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.operands import is_static
from kernelwright.compiler.passes.candidate import OWN, has_gradients, is_known, value_of
from kernelwright.compiler.passes.pointwise import CASTS, VIEWS

aten = torch.ops.aten

LEAST = 4
"""With fewer vectors there is nothing to save."""

MOST = 16
"""Vectors of one list: Triton compiles its kernel in 1.5 s with 16 vectors, in 8 s with 40."""

LARGEST = 2**16
"""Elements of a vector at most."""

SHAPES = (*VIEWS, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim)


def gather_folds(graph: Graph) -> None:
    """Make list operators of the vectors that are computed from a graph's inputs alone for kernels of ours."""
    if has_gradients(graph):
        return
    calls = graph.find_nodes(op="call_function", target=CALL)
    steps: dict[Node, bool] = {}
    operands = dict.fromkeys(one for call in calls for one in call.all_input_nodes)
    vectors = [one for one in operands if _is_step(one, steps) and _is_vector(value_of(one))]
    if len({value_of(one).device for one in vectors}) > 1:
        return
    for start in range(0, len(vectors), MOST) if len(vectors) >= LEAST else ():
        _join(graph, calls, vectors[start : start + MOST])


def _join(graph: Graph, calls: Sequence[Node], vectors: Sequence[Node]) -> None:
    """Give the calls the parts of one list operator for these vectors."""
    first = next(call for call in calls if any(one in vectors for one in call.all_input_nodes))
    _move_before(graph, first, set(vectors))
    with graph.inserting_before(first):
        # times one changes no number, and Inductor computes what leads to it along with it
        together = graph.call_function(aten._foreach_mul.Scalar, (list(vectors), 1.0))
        together.meta = {name: value for name, value in first.meta.items() if name not in OWN}
        together.meta["val"] = [value_of(one) for one in vectors]
        parts = {}
        for place, one in enumerate(vectors):
            parts[one] = graph.call_function(operator.getitem, (together, place))
            parts[one].meta = dict(one.meta)
    for call in calls:
        for one in [one for one in call.all_input_nodes if one in parts]:
            call.replace_input_with(one, parts[one])


def _is_vector(value: torch.Tensor) -> bool:
    """Whether a tensor is a scale or a bias: a dense vector of numbers that times one leaves as they are."""
    return value.dim() == 1 and value.is_contiguous() and value.dtype.is_floating_point


def _is_step(node: Node, known: dict[Node, bool]) -> bool:
    """Whether a node computes something small, step by step, from nothing but inputs of the graph."""
    if node not in known:
        known[node] = _is_small_step(node) and all(
            _is_lasting(before) or _is_step(before, known) for before in node.all_input_nodes
        )
    return known[node]


def _is_lasting(node: Node) -> bool:
    """Whether a node is an input that nothing in the graph writes into."""
    written = (isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable for user in node.users)
    return node.op == "placeholder" and not any(written)


def _is_small_step(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not is_known(node):
        return False
    value = value_of(node)
    if not is_static(value) or value.numel() > LARGEST or not node.all_input_nodes:
        return False
    pure = torch.Tag.pointwise in node.target.tags and not node.target._schema.is_mutable
    return (pure and torch.Tag.nondeterministic_seeded not in node.target.tags) or node.target in (*SHAPES, *CASTS)


def _move_before(graph: Graph, first: Node, ends: set[Node]) -> None:
    """Move the steps that lead to some nodes in front of `first`, those that come behind it."""
    wanted, waiting = set(ends), list(ends)
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if before.op != "placeholder" and before not in wanted:
                wanted.add(before)
                waiting.append(before)
    behind = False
    for node in list(graph.nodes):
        behind = behind or node is first
        if behind and node in wanted:
            first.prepend(node)
