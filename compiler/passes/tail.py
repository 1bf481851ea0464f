"""The pointwise steps behind a product or a convolution that its kernel could compute along with it.

Vectors that are added to channels or multiplied with them come first and are folded into one scale and one bias (so a
batch norm in evaluation is just these two), then, in the graph's order: activations, and tensors like the result that
are added (a residual) or multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from kernelwright.compiler.passes.candidate import emit, is_known, value_of
from kernelwright.compiler.passes.pointwise import CASTS, VIEWS, Activations, find_activation, is_step

aten = torch.ops.aten
prims = torch.ops.prims

BINARY: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
}

LONGEST = 12
"""Steps that a tail has at most, an activation counted as one; a folded batch norm in training order takes five."""


@dataclasses.dataclass(frozen=True)
class Tail:
    """Steps behind `start`.

    nodes: all of them in graph order, casts and views included. vectors: (add, sub, mul or div; its operand) in order.
    steps: names of the epilogue's other steps. tensors: the operands of those that read one, in order.
    """

    start: Node
    nodes: tuple[Node, ...] = ()
    vectors: tuple[tuple[str, Node], ...] = ()
    steps: tuple[str, ...] = ()
    tensors: tuple[Node, ...] = ()

    @property
    def end(self) -> Node:
        """The node whose value the kernel gives."""
        return self.nodes[-1] if self.nodes else self.start

    @property
    def scales(self) -> bool:
        """Whether channels are multiplied."""
        return any(how in ("mul", "div") for how, _ in self.vectors)

    @property
    def shifts(self) -> bool:
        """Whether something is added to channels."""
        return any(how in ("add", "sub") for how, _ in self.vectors)

    def epilogue(self, biased: bool) -> tuple[str, ...]:
        """The workload's epilogue, where the product has a bias of its own or not."""
        vectors = (("scale_vec",) if self.scales else ()) + (("bias",) if self.shifts or biased else ())
        return (*vectors, *self.steps)


def tails(start: Node, activations: Activations, is_vector: Callable[[Node, Node, Node], bool]) -> Iterator[Tail]:
    """Every tail behind `start`, the shortest first. is_vector: whether a node, used beside another one, which may be a
    view of a third, has one number for each channel of both."""
    tail = Tail(start)
    yield tail
    for _ in range(LONGEST):
        longer = _with_activation(tail, activations) or _with_next(tail, is_vector)
        if longer is None:
            return
        tail = longer
        yield tail


def _with_activation(tail: Tail, activations: Activations) -> Tail | None:
    found = find_activation(tail.end, activations)
    if found is None:
        return None
    chain, name = found
    steps = chain.steps
    while steps[-1].target in VIEWS:
        # the longest chain ends with views of the result, which need not be its own
        steps = steps[:-1]
    return dataclasses.replace(tail, nodes=tail.nodes + steps, steps=(*tail.steps, name))


def _with_next(tail: Tail, is_vector: Callable[[Node, Node, Node], bool]) -> Tail | None:
    end = tail.end
    user = next(iter(end.users)) if len(end.users) == 1 else None
    if user is None or not is_step(user, tail.start):
        return None
    longer = dataclasses.replace(tail, nodes=(*tail.nodes, user))
    if user.target in VIEWS or user.target in CASTS:
        return longer
    how = BINARY.get(user.target)
    if how is None or user.kwargs.get("alpha", 1) != 1:
        return None
    left, right = user.args
    other = right if left is end else left
    if not is_known(other) or other is end or (how in ("sub", "div") and left is not end):
        return None
    assert isinstance(other, Node)
    if is_vector(other, end, tail.start) and not tail.steps:
        return dataclasses.replace(longer, vectors=(*tail.vectors, (how, other)))
    name = {"add": "residual", "mul": "multiply"}.get(how)
    tensor = _without_cast(other)
    if name is None or not _alike(tensor, tail.start, end) or not _is_stored(tensor):
        return None
    return dataclasses.replace(longer, steps=(*tail.steps, name), tensors=(*tail.tensors, tensor))


def _without_cast(node: Node) -> Node:
    """What was widened to fp32 only to be added or multiplied."""
    widened = node.target is prims.convert_element_type.default and value_of(node).dtype is torch.float32
    before = node.args[0] if widened else None
    return before if isinstance(before, Node) and is_known(before) else node


def _alike(node: Node, start: Node, end: Node) -> bool:
    """Whether a tensor has the result's type and the sizes that it has here."""
    value = value_of(node)
    same = value.dtype == value_of(start).dtype and value.device == value_of(start).device
    return same and value.shape == value_of(end).shape


def _is_stored(node: Node) -> bool:
    """Whether a tensor lies in memory anyway: one that a pointwise step makes for this use alone would not, because
    Inductor computes it in the pass that uses it."""
    if len(node.users) > 1 or not isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target in VIEWS or node.target in CASTS:
        return all(_is_stored(before) for before in node.all_input_nodes)
    return torch.Tag.pointwise not in node.target.tags


def numbered(steps: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """Names of the operands of those steps that are in `names`: the step's, numbered where it comes again."""
    return [step if steps.index(step) == i else f"{step}_{i}" for i, step in enumerate(steps) if step in names]


def emit_vectors(graph: Graph, tail: Tail, bias: Node | None) -> dict[str, Node]:
    """The scale and the bias [channels] that the tail's vectors come to, as new nodes; `bias` is the product's own.

    A bias that stands alone keeps its type; whatever is computed is fp32.
    """
    alone = [node for how, node in tail.vectors if how == "add"]
    if bias is None and len(tail.vectors) == len(alone) == 1:
        return {"bias": _flat(graph, alone[0])}
    if not tail.vectors:
        return {} if bias is None else {"bias": bias}
    scale: Node | None = None
    shift = None if bias is None else _wide(graph, bias)
    for how, node in tail.vectors:
        vector = _wide(graph, _flat(graph, node))
        target = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor}[how]
        if how in ("mul", "div"):
            scale = _combined(graph, target, scale, vector, how)
            shift = None if shift is None else emit(graph, target, (shift, vector), vector)
        else:
            shift = _combined(graph, target, shift, vector, how)
    return {name: node for name, node in (("scale_vec", scale), ("bias", shift)) if node is not None}


def _combined(graph: Graph, target: object, before: Node | None, vector: Node, how: str) -> Node:
    if before is not None:
        return emit(graph, target, (before, vector), vector)
    if how in ("add", "mul"):
        return vector
    return emit(graph, aten.neg.default if how == "sub" else aten.reciprocal.default, (vector,), vector)


def _flat(graph: Graph, node: Node) -> Node:
    """A vector that comes as [channels, 1, 1], as [channels]: mostly it was that before it met an image."""
    while node.target is aten.unsqueeze.default and is_known(node.args[0]) and value_of(node).dim() > 1:
        node = node.args[0]  # type: ignore[assignment]
    value = value_of(node)
    return node if value.dim() == 1 else emit(graph, aten.view.default, (node, [value.numel()]), node)


def _wide(graph: Graph, node: Node) -> Node:
    if value_of(node).dtype == torch.float32:
        return node
    return emit(graph, prims.convert_element_type.default, (node, torch.float32), node)
