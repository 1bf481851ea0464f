"""Batched products, convolutions and attentions with one symbol among their sizes: a batch, a length of a prompt. They
are looked up where that symbol is a power of two, and `kernelwright::open_call` chooses among what wins at every call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernelwright.compiler import open_call
from kernelwright.compiler.passes import attention_variants as variants
from kernelwright.compiler.passes.candidate import emit, hold, is_known, item_of, value_of
from kernelwright.errors import UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten

VALUES = tuple(2**power for power in range(14))
"""What the symbol is replaced by to look things up: 1 to 8192."""

TRIED = (999, 1024)
"""Values of the symbol at which orders and sizes of results are compared; sizes such as "7 less" are positive there."""

ORDERS = {3: ((0, 1, 2),), 4: ((0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3))}
"""In which order the dimensions of a result may lie, by their number."""


@dataclasses.dataclass(frozen=True)
class Place:
    """An operator with one symbol among its sizes. value: the node whose value our operator gives."""

    node: Node
    value: Node
    symbol: Any
    operands: Mapping[str, Node]
    told: Mapping[str, Any]

    def workloads(self) -> list[Workload]:
        """What it is for each of VALUES that gives a workload."""
        found = []
        for number in VALUES:
            try:
                operands = {name: _sized(value_of(node), self.symbol, number) for name, node in self.operands.items()}
                workload = open_call.workload_of(operands, self.told, open_call.empty_result(operands, self.told))
            except UsageError:
                continue
            found.append(workload)
        return found

    def replace(self, graph: Graph, answers: Sequence[Answer]) -> None:
        """Let our operator choose among the answers' schedules at every call."""
        known = [[dict(a.workload.dims), a.schedule.to_json()] for a in answers if a.schedule is not None]
        table = json.dumps({"device": answers[0].device.slug, "known": known}, sort_keys=True)
        operands, told = list(self.operands.values()), json.dumps(self.told, sort_keys=True)
        args: Any = (operands, ",".join(self.operands), told, table)
        with graph.inserting_before(self.node):
            result = hold(emit(graph, open_call.OPEN_CALL, args, self.value))
        self.value.replace_all_uses_with(result)
        for node in (*self.node.users, self.node):
            graph.erase_node(node)


def place_of(node: Node) -> Place | None:
    """The place of a node; None where it is none of these operators, or has another number of symbols."""
    found = _read(node)
    if found is None:
        return None
    value, operands, told = found
    if not all(is_known(one) for one in (value, *operands.values())):
        return None
    tensors = [value_of(one) for one in (value, *operands.values())]
    if len({tensor.device for tensor in tensors}) > 1:
        return None
    numbers = [number for tensor in tensors for number in (*tensor.shape, *tensor.stride())]
    symbols = {
        symbol for number in numbers if isinstance(number, torch.SymInt) for symbol in number.node.expr.free_symbols
    }
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    try:
        order = _order(value_of(value), symbol)
        if order is None or not _has_sizes(value_of(value), operands, {**told, "order": order}, symbol):
            return None
    except UsageError:
        return None
    return Place(node, value, symbol, operands, {**told, "order": order})


def _read(node: Node) -> tuple[Node, dict[str, Node], dict[str, Any]] | None:
    """A node's value, its operands by name, and what is told besides."""
    if node.target is aten.bmm.default:
        return node, dict(zip("ab", node.args, strict=True)), {"kind": "bmm"}  # type: ignore[arg-type]
    if node.target is aten.convolution.default:
        return _convolution(node)
    if node.target in variants.FORWARD:
        return _attention(node)
    return None


def _convolution(node: Node) -> tuple[Node, dict[str, Node], dict[str, Any]] | None:
    x, w, bias, *geometry = node.args
    sizes = value_of(node).shape[1:]
    if geometry[3] or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
        return None
    if not all(isinstance(number, int) for part in geometry for number in (part if isinstance(part, list) else [part])):
        return None
    operands = {"x": x, "w": w} | ({} if bias is None else {"bias": bias})
    return node, operands, {"kind": "conv2d", "geometry": geometry, "result": list(sizes)}  # type: ignore[return-value]


def _attention(node: Node) -> tuple[Node, dict[str, Node], dict[str, Any]] | None:
    found, value = variants.read(node), item_of(node, 0)
    others = any(user is not value and user.users for user in node.users)
    if not isinstance(found, variants.Forward) or found.mask is not None or value is None or others:
        return None
    if found.lower_right and not statically_known_true(value_of(found.q).shape[2] == value_of(found.k).shape[2]):
        return None
    operands = {"q": found.q, "k": found.k, "v": found.v}
    return value, operands, {"kind": "attention", "causal": found.causal, "scale": found.scale}


def _order(value: torch.Tensor, symbol: Any) -> list[int] | None:
    """The order in memory of a value's dimensions, whatever the symbol is."""
    for order in ORDERS.get(value.dim(), ()):
        tried = [_sized(value, symbol, number).permute(order) for number in TRIED]
        if all(tensor.is_contiguous() for tensor in tried):
            return list(order)
    return None


def _has_sizes(value: torch.Tensor, operands: Mapping[str, Node], told: Mapping[str, Any], symbol: Any) -> bool:
    """Whether our operator's result is as large as the value."""
    sized = {name: _sized(value_of(node), symbol, TRIED[0]) for name, node in operands.items()}
    return open_call.sizes_of(sized, told) == tuple(_sized(value, symbol, TRIED[0]).shape)


def _sized(value: torch.Tensor, symbol: Any, number: int) -> torch.Tensor:
    """A tensor without data like `value` where the symbol is this number; no guard comes of it.

    UsageError where there is no such tensor."""
    sizes, strides = (
        [int(one.node.expr.subs({symbol: number})) if isinstance(one, torch.SymInt) else one for one in numbers]
        for numbers in (value.shape, value.stride())
    )
    if min((*sizes, *strides), default=0) < 0:
        raise UsageError(f"there is no tensor of sizes {sizes} and strides {strides}")
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
