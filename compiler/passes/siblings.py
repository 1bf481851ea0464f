"""Finds products of one matrix with several weights (q, k and v; gate and up), and makes one wider product of them.

Only in inference, and only where the products' values stay inside the graph: they become columns of the wider result.
Whether that is faster is never estimated: see `kernelwright.compiler.pieces`.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kernelwright.compiler import side_by_side
from kernelwright.compiler.merged_call import MERGED
from kernelwright.compiler.operands import workload_of
from kernelwright.compiler.passes.candidate import emit, has_gradients, hold, is_known, value_of
from kernelwright.compiler.passes.pointwise import CASTS, VIEWS, find_activation, is_step
from kernelwright.compiler.piece import SHAPES, source_of
from kernelwright.errors import UsageError
from kernelwright.kernels.matmul.reference import activations
from kernelwright.types import Schedule, Workload

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default)

BY_ADDRESS = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
"""Steps that read memory by strides of their own, whatever those of their operands are."""

COPIED_ROWS = 4096
"""From so many rows on, copying weights together in every call may be worth it; below, merging must not copy."""


@dataclasses.dataclass(frozen=True)
class Siblings:
    """Products a @ b, with a bias each or none, in the order of their columns in the wider product."""

    products: tuple[Node, ...]

    @property
    def first(self) -> Node:
        """The product that comes first in the graph."""
        return min(self.products)

    @property
    def left(self) -> Node:
        """The matrix that all are products of, as the first one reads it."""
        return self.first.args[-2]  # type: ignore[return-value]

    @property
    def weights(self) -> list[Node]:
        """The right operands."""
        return [product.args[-1] for product in self.products]  # type: ignore[misc]

    @property
    def biases(self) -> list[Node]:
        """The vectors that are added, if any are."""
        return [product.args[0] for product in self.products if len(product.args) == 3]  # type: ignore[misc]

    def workload(self, gated: bool = False) -> Workload:
        """The wider product; raises UsageError for what no kernel computes."""
        values = [value_of(weight) for weight in self.weights]
        rows, columns = values[0].shape[0], sum(value.shape[1] for value in values)
        wide = values[0].new_empty_strided((rows, columns), (1, rows))
        left = value_of(self.left)
        bias = left.new_empty((columns,)) if self.biases else None
        epilogue = (("bias",) if self.biases else ()) + (("swiglu",) if gated else ())
        return workload_of(left, wide, bias, epilogue, left.dtype)

    def gate(self) -> Node | None:
        """The step silu(first) * second that two products of the same size come to, if they do."""
        if len(self.products) != 2 or value_of(self.products[0]).shape != value_of(self.products[1]).shape:
            return None
        gate, up = self.products
        found = find_activation(gate, {"silu": activations()["silu"]})
        if found is None:
            return None
        last = _only_form(found[0].end)
        step = next(iter(last.users)) if len(last.users) == 1 else None
        if step is None or step.target is not aten.mul.Tensor or step.kwargs:
            return None
        others = [one for one in step.args if one is not last]
        right = others[0] if len(others) == 1 else None
        ours = isinstance(right, Node) and len(right.users) == 1 and right is _only_form(up, until=step)
        dense = value_of(step).is_contiguous() and value_of(step).dtype == value_of(gate).dtype
        return step if ours and dense and value_of(step).numel() == value_of(gate).numel() else None

    def replace(self, graph: Graph, schedule: Schedule | None, gated: bool, *, whole: bool = True) -> None:
        """Compute all of it by one product, with our kernel or (None) the library's; UsageError where what follows
        would see another order of memory. whole: the graph is no piece of another one, whose results may lie anyhow."""
        first, step = self.first, self.gate() if gated else None
        if gated and (step is None or schedule is None):
            raise UsageError("these products are no SwiGLU")
        workload = json.dumps(self.workload(gated).to_json(), sort_keys=True)
        parts = self._parts(whole) if not gated else {}
        for node in (*self.weights, *self.biases):
            _move_before(node, first)
        text = "" if schedule is None else json.dumps(schedule.to_json(), sort_keys=True)
        beside = side_by_side.beside([value_of(weight) for weight in self.weights])
        args: Any = (self.left, self.weights, self.biases, workload, text, beside)
        with graph.inserting_before(first):
            wide = hold(emit(graph, MERGED, args, first))
            if step is not None:
                shape = list(value_of(step).shape)
                result = (
                    wide if list(value_of(wide).shape) == shape else emit(graph, aten.view.default, (wide, shape), step)
                )
                step.replace_all_uses_with(result)
                graph.erase_node(step)
                _erase_unused(graph, self.products)
                return
            place = 0
            for product in self.products:
                columns = value_of(product).shape[1]
                part = emit(graph, aten.slice.Tensor, (wide, 1, place, place + columns), product)
                product.replace_all_uses_with(part)
                place += columns
        for node, value in parts.items():
            node.meta["val"] = value
        for product in self.products:
            graph.erase_node(product)

    def _parts(self, whole: bool) -> dict[Node, Any]:
        """The values of what follows where these change their order in memory; UsageError where that goes further than
        other forms of the same memory."""
        for node in self.first.graph.nodes:
            if node.target in BY_ADDRESS and _origin(node.args[0]) in self.products:
                raise UsageError(f"{node.name} reads memory as it lies")
        columns = sum(value_of(product).shape[1] for product in self.products)
        changed: dict[Node, Any] = {}
        for product in self.products:
            value = value_of(product)
            changed[product] = value.new_empty_strided(value.shape, (columns, 1))
        follow = sorted({user for product in self.products for user in product.users})
        while follow:
            node = follow.pop(0)
            if node.op == "output" and not whole:
                continue
            if node.op == "output" or not callable(node.target):
                raise UsageError("a product's value leaves the graph")
            value = _again(node, changed)
            if _strides(value) == _strides(node.meta["val"]):
                continue
            if node.target not in SHAPES and node.target is not operator.getitem:
                raise UsageError(f"{node.name} would lie otherwise in memory")
            changed[node] = value
            follow = sorted({*follow, *node.users})
        return {node: value for node, value in changed.items() if node not in self.products}


def siblings(graph: Graph, nodes: Iterable[Node]) -> list[Siblings]:
    """The groups of products, out of these nodes, that could be one each; none in a graph that has gradients."""
    if has_gradients(graph):
        return []
    found: dict[tuple[Any, ...], list[Node]] = {}
    for node in nodes:
        if node.target in PRODUCTS and not node.kwargs and _is_plain(node):
            left = value_of(node.args[-2])
            kind = (source_of(node.args[-2]), left.shape, left.stride(), left.dtype, len(node.args))
            found.setdefault(kind, []).append(node)
    return [group for products in found.values() if len(products) > 1 for group in _useful(sorted(products))]


def _useful(products: Sequence[Node]) -> list[Siblings]:
    """The groups of these products whose weights lie side by side, in that order; where none do and there are many
    rows, all of them together."""

    def place(product: Node) -> tuple[int, int]:
        weight = value_of(product.args[-1])
        return weight.untyped_storage()._cdata, int(weight.storage_offset())

    runs: list[list[Node]] = []
    for product in sorted(products, key=place):
        if runs and side_by_side.beside([value_of(one.args[-1]) for one in (*runs[-1], product)]):
            runs[-1].append(product)
        else:
            runs.append([product])
    found = [Siblings(tuple(run)) for run in runs if len(run) > 1]
    whole = Siblings(tuple(products))
    return found or ([whole] if value_of(whole.left).shape[0] >= COPIED_ROWS else [])


def _is_plain(product: Node) -> bool:
    """Whether a product is one of a weight [K, N] with unit stride along K that is there before the graph runs."""
    *bias, _, weight = product.args
    if not all(is_known(one) and _is_given(one) for one in (weight, *bias)):
        return False
    value = value_of(weight)
    vector = all(value_of(one).shape == value.shape[1:] for one in bias)
    return value.stride() == (1, value.shape[0]) and vector and value_of(product).is_contiguous()


def _is_given(node: Any) -> bool:
    source = source_of(node)
    return isinstance(source, Node) and source.op in ("placeholder", "get_attr")


def _move_before(node: Node, first: Node) -> None:
    """Let a form of something that is there before the graph runs stand before a node."""
    if node.op in ("placeholder", "get_attr") or node < first:
        return
    before: Any = node.args[0]
    _move_before(before, first)
    first.prepend(node)


def _only_form(node: Node, until: Node | None = None) -> Node:
    """The last of the forms of a node that each have one user."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user is until or not (user.target in VIEWS or (user.target in CASTS and is_step(user, node))):
            return node
        node = user
    return node


def _origin(node: Any) -> Any:
    """The node whose memory a form of it may lie in."""
    while isinstance(node, Node) and (node.target in SHAPES or node.target is operator.getitem):
        node = node.args[0]
    return node


def _again(node: Node, changed: dict[Node, Any]) -> Any:
    look_up: Callable[[Node], Any] = lambda one: changed.get(one, one.meta["val"])  # noqa: E731
    try:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), look_up)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise UsageError(f"{node.name} does not take columns of a wider product: {error}") from error


def _strides(value: Any) -> list[Any]:
    values: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
    return [(tuple(one.shape), one.stride()) for one in values if isinstance(one, torch.Tensor)]


def _erase_unused(graph: Graph, products: Sequence[Node]) -> None:
    """Take the products out, with the steps behind them that nobody uses any more."""
    behind = [node for node in graph.nodes if node in products]
    for node in behind:
        behind += [user for user in node.users if user not in behind]
    for node in sorted(behind, reverse=True):
        graph.erase_node(node)
