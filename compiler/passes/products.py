"""Finds matrix products with the longer chains behind them, and batched products.

A chain with a residual or a gate (so the second half of a SwiGLU: the product of `up` times silu(gate)) is one call;
what is only bias and activation is `kernelwright.compiler.passes.matmul`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from kernelwright.compiler.kernel_call import Form
from kernelwright.compiler.operands import batched_workload_of, workload_of
from kernelwright.compiler.passes.candidate import (
    Candidate,
    check_nodes,
    emit,
    emit_call,
    is_known,
    value_of,
    worked_out_once,
)
from kernelwright.compiler.passes.matmul import candidates
from kernelwright.compiler.passes.tail import Tail, emit_vectors, numbered, tails
from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.matmul.reference import activations
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten

BATCHED = (aten.bmm.default, aten.baddbmm.default)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A product a @ b, batched or not, with a tail of any kind. bias: the vector of an addmm."""

    tail: Tail
    a: Node
    b: Node
    bias: Node | None = None

    @property
    def end(self) -> Node:
        """See `Candidate`."""
        return self.tail.end

    @worked_out_once
    def workload(self) -> Workload:
        """See `Candidate`."""
        out, end = value_of(self.tail.start), value_of(self.end)
        tensors = [value_of(node) for node in self.tail.tensors]
        if end.dtype != out.dtype or any(t.numel() != out.numel() or not t.is_contiguous() for t in (end, *tensors)):
            raise InvalidWorkload("what follows the product lies otherwise in memory, or has another type")
        epilogue = self.tail.epilogue(self.bias is not None)
        make = batched_workload_of if out.dim() == 3 else workload_of
        workload = make(value_of(self.a), value_of(self.b), None, epilogue, out.dtype)
        later = {name: Form.vector(out.shape[-1]) for name in epilogue if name in ("bias", "scale_vec")}
        later |= {name: Form.of(out) for name in self._names()}
        return check_nodes(workload, {"a": self.a, "b": self.b}, later)

    def obstacle(self) -> str:
        """See `Candidate`."""
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        start, end = self.tail.start, self.end
        workload, shape = self.workload(), list(value_of(start).shape)
        with graph.inserting_before(end):
            tensors = [_viewed(graph, node, shape, start) for node in self.tail.tensors]
            operands = {"a": self.a, "b": self.b, **emit_vectors(graph, self.tail, self.bias)}
            operands |= dict(zip(self._names(), tensors, strict=True))
            (result,) = emit_call(graph, workload, answer, operands, [value_of(start)], start)
            result = _viewed(graph, result, list(value_of(end).shape), start)
        end.replace_all_uses_with(result)
        for node in (*reversed(self.tail.nodes), start):
            graph.erase_node(node)

    def _names(self) -> list[str]:
        return numbered(self.tail.epilogue(self.bias is not None), ("residual", "multiply"))


class Products:
    """See `kernelwright.compiler.passes.candidate.Finder`."""

    targets = ((aten.mm.default, aten.addmm.default, *BATCHED),)

    def unfit(self, node: Node) -> str:
        """See `Finder`."""
        if not node.meta["val"].is_contiguous():
            return "its result is not row-major"
        if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return f"{str(node.target).split('.')[1]} scales its operands"
        return ""

    def places(self, node: Node) -> Iterator[tuple[str, Iterable[Candidate]]]:
        """See `Finder`."""
        yield node.name, _batched(node) if node.target in BATCHED else _forms(node)


def _forms(node: Node) -> Iterator[Candidate]:
    """The forms of a product of two matrices: those with the longest chain first."""
    *bias, a, b = node.args
    vector = bias[0] if bias else None
    if vector is None or (is_known(vector) and value_of(vector).dim() == 1):
        found = [Chain(tail, a, b, vector) for tail in tails(node, activations(), _is_row)]  # type: ignore[arg-type]
        yield from (chain for chain in reversed(found) if chain.tail.tensors or chain.tail.scales)
    yield from candidates(node)


def _batched(node: Node) -> list[Candidate]:
    """The forms of a batched product: those with the longest chain first. A vector would be another one in each of the
    batch's products."""
    *added, a, b = node.args
    if added:
        return [Chain(Tail(node, steps=("residual",), tensors=(added[0],)), a, b)]  # type: ignore[arg-type]
    found = list(tails(node, activations(), lambda vector, matrix, product: False))
    return [Chain(tail, a, b) for tail in reversed(found)]  # type: ignore[arg-type]


def _viewed(graph: Graph, node: Node, shape: list[int], like: Node) -> Node:
    return node if list(value_of(node).shape) == shape else emit(graph, aten.view.default, (node, shape), like)


def _is_row(vector: Node, matrix: Node, product: Node) -> bool:
    """Whether a tensor has one number for each column of a product, and of a view of it: not for those of a head."""
    value, over = value_of(vector), value_of(matrix)
    same = value.device == over.device and value.dtype.is_floating_point
    return same and value.shape == over.shape[-1:] == value_of(product).shape[-1:]
