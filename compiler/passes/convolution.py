"""Finds convolutions, with the batch norm, activation and residual behind them, and both gradients of convolutions.

A convolution of lines [N, C, L] is one of images [N, C, 1, L]; its gradients are left to torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from kernelwright.compiler.conv2d_operands import Geometry, workload_of
from kernelwright.compiler.kernel_call import Form
from kernelwright.compiler.passes.candidate import (
    Candidate,
    check_nodes,
    emit,
    emit_call,
    is_known,
    item_of,
    value_of,
    worked_out_once,
)
from kernelwright.compiler.passes.rival import is_fused
from kernelwright.compiler.passes.tail import Tail, emit_vectors, numbered, tails
from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.conv2d.reference import activations
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten

LAST = torch.channels_last

GRADIENTS = ("input_gradient", "weight_gradient")
"""Directions of a convolution's gradients, by their place among the results of aten.convolution_backward."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """A convolution and the steps behind it. last: its image is laid out channels last on the way in."""

    tail: Tail
    last: bool = False

    @property
    def end(self) -> Node:
        """See `Candidate`."""
        return self.tail.end

    @worked_out_once
    def workload(self) -> Workload:
        """See `Candidate`."""
        x, w, bias, *rest = self.tail.start.args
        out, end = value_of(self.tail.start), value_of(self.tail.end)
        dims = out.dim() - 2
        if end.dtype != out.dtype or end.shape != out.shape or end.stride() != out.stride():
            raise InvalidWorkload("what follows the convolution lies otherwise in memory, or has another type")
        biased = bias is not None
        image = value_of(x).clone(memory_format=LAST) if self.last else _image(value_of(x))
        tensors = {"x": image, "w": _image(value_of(w)), "out": _image(out)}
        workload = workload_of(tensors, Geometry.of(rest, dims), "forward", self.tail.epilogue(biased))
        forms = {name: Form.vector(out.shape[1]) for name in workload.epilogue if name in ("bias", "scale_vec")}
        forms |= {name: Form.of(_image(value_of(node))) for name, node in self._tensors().items()}
        return check_nodes(workload, {}, forms | {name: Form.of(tensors[name]) for name in ("x", "w")})

    def obstacle(self) -> str:
        """See `Candidate`."""
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        start, end = self.tail.start, self.tail.end
        x, w, bias = start.args[:3]
        workload = self.workload()
        with graph.inserting_before(end):
            vectors = emit_vectors(graph, self.tail, bias)  # type: ignore[arg-type]
            if self.last:
                x = emit(graph, aten.clone.default, (x,), x, {"memory_format": LAST})  # type: ignore[arg-type]
            read = {"x": x, "w": w, **self._tensors()}
            images = {name: _as_image(graph, node, start) for name, node in read.items()}  # type: ignore[arg-type]
            (result,) = emit_call(graph, workload, answer, images | vectors, [_image(value_of(start))], start)
            if value_of(start).dim() == 3:
                result = emit(graph, aten.squeeze.dim, (result, 2), start)
        end.replace_all_uses_with(result)
        for node in (*reversed(self.tail.nodes), start):
            graph.erase_node(node)

    def _tensors(self) -> dict[str, Node]:
        names = numbered(self.tail.epilogue(self.tail.start.args[2] is not None), ("residual", "multiply"))
        return dict(zip(names, self.tail.tensors, strict=True))


def _image(value: torch.Tensor) -> torch.Tensor:
    """A line [N, C, L] as an image [N, C, 1, L]."""
    return value.unsqueeze(2) if value.dim() == 3 else value


def _as_image(graph: Graph, node: Node, like: Node) -> Node:
    return emit(graph, aten.unsqueeze.default, (node, 2), like) if value_of(node).dim() == 3 else node


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One of the first two results of aten.convolution_backward."""

    node: Node
    place: int
    item: Node

    @property
    def end(self) -> Node:
        """See `Candidate`."""
        return self.item

    @worked_out_once
    def workload(self) -> Workload:
        """See `Candidate`."""
        d_out, x, w, _, *rest = self.node.args[:10]
        geometry = Geometry.of(rest)
        if geometry.transposed:
            raise InvalidWorkload("gradients of a transposed convolution are left to torch")
        tensors = {"x": value_of(x), "w": value_of(w), "out": value_of(d_out)}
        tensors["xw"[self.place]] = value_of(self.item)
        return check_nodes(workload_of(tensors, geometry, GRADIENTS[self.place]), self._operands())

    def obstacle(self) -> str:
        """See `Candidate`."""
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        with graph.inserting_before(self.node):
            (result,) = emit_call(graph, self.workload(), answer, self._operands(), [value_of(self.item)], self.node)
        self.item.replace_all_uses_with(result)
        graph.erase_node(self.item)
        if not self.node.users:
            graph.erase_node(self.node)
            return
        wanted = [kept and place != self.place for place, kept in enumerate(self.node.args[10])]  # type: ignore
        self.node.update_arg(10, wanted)
        values = self.node.meta["val"]
        self.node.meta["val"] = tuple(None if place == self.place else value for place, value in enumerate(values))

    def _operands(self) -> dict[str, Node]:
        d_out, x, w = self.node.args[:3]
        return {"w": w, "d_out": d_out} if self.place == 0 else {"x": x, "d_out": d_out}  # type: ignore[dict-item]


class Convolutions:
    """See `kernelwright.compiler.passes.candidate.Finder`."""

    targets = ((aten.convolution.default, aten.convolution_backward.default),)

    def unfit(self, node: Node) -> str:
        """See `Finder`."""
        return ""

    def places(self, node: Node) -> Iterator[tuple[str, Iterable[Candidate]]]:
        """See `Finder`."""
        if node.target is aten.convolution.default:
            yield node.name, _forwards(node)
            return
        for place, direction in enumerate(GRADIENTS):
            item = item_of(node, place)
            if item is not None and is_known(item):
                yield f"{node.name} {direction}", [Gradient(node, place, item)]


def _forwards(node: Node) -> list[Candidate]:
    last = _may_lie_channels_last(node)
    found: list[Candidate] = [Forward(tail, last) for tail in tails(node, activations(), _is_channels)]
    return found[::-1]


def _may_lie_channels_last(node: Node) -> bool:
    """Whether a convolution that gives its result channels last gets an image that lies otherwise only because of the
    pointwise step that computes it (behind a group norm, for one): Inductor writes it either way at the same cost, and
    does so for cuDNN."""
    x, out = node.args[0], value_of(node)
    if not isinstance(x, Node) or out.dim() != 4 or not out.is_contiguous(memory_format=LAST):
        return False
    return not value_of(x).is_contiguous(memory_format=LAST) and len(x.users) == 1 and is_fused(x)


def _is_channels(vector: Node, image: Node, result: Node) -> bool:
    """Whether a tensor [K, 1, 1] or [1, K, 1, 1] has a number for each channel of an image [N, K, P, Q], or [K, 1] or
    [1, K, 1] of a line, which is the result of a convolution and no view of it in other sizes."""
    value, over = value_of(vector), value_of(image)
    if over.shape != value_of(result).shape or value.device != over.device:
        return False
    if not value.dtype.is_floating_point or over.dim() not in (3, 4) or value.dim() not in (over.dim() - 1, over.dim()):
        return False
    channels = (over.shape[1], *[1] * (over.dim() - 2))
    return tuple(value.shape)[1 - over.dim() :] == channels and value.numel() == over.shape[1]
