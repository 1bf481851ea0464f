"""Batched products, convolutions and attentions with one open size: a batch, a length of a prompt, of a cache of keys.
They are looked up where it is a power of two, and `kernelwright::open_call` chooses among what wins at every call.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
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
"""What an open size is taken to be to look things up: 1 to 8192."""

TRIED = (999, 1024)
"""Values of the symbol at which orders and sizes of results are compared; sizes such as "7 less" are positive there."""

_ANY = sympy.Symbol("any")

ORDERS = {3: ((0, 1, 2),), 4: ((0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3))}
"""In which order the dimensions of a result may lie, by their number."""


@dataclasses.dataclass(frozen=True)
class Place:
    """An operator with one open size. value: the node whose value our operator gives. symbols: what stands for the
    open size: one, or those of two sizes that are equal in any call."""

    node: Node
    value: Node
    symbols: frozenset[Any]
    operands: Mapping[str, Node]
    told: Mapping[str, Any]

    def workloads(self) -> list[Workload]:
        """What it is for each of VALUES that gives a workload, the smallest first."""
        found = []
        for number in self._numbers():
            try:
                operands = {name: _sized(value_of(node), self.symbols, number) for name, node in self.operands.items()}
                workload = open_call.workload_of(operands, self.told, open_call.empty_result(operands, self.told))
            except UsageError:
                continue
            found.append(workload)
        return found

    def _numbers(self) -> list[int]:
        """The numbers of the symbols at which a size of an operand is one of VALUES (a cache and its new key are one
        more than the symbol); VALUES themselves where a size does not grow with them in even steps."""
        sizes: list[Any] = [size for node in self.operands.values() for size in value_of(node).shape]
        numbers: set[int] = set()
        for expr in {s.node.expr.subs(dict.fromkeys(self.symbols, _ANY)) for s in sizes if isinstance(s, torch.SymInt)}:
            first = expr.subs(_ANY, 0)
            step = expr.subs(_ANY, 1) - first
            if step > 0 and sympy.expand(expr - step * _ANY - first) == 0:
                numbers.update(int((value - first) // step) for value in VALUES if (value - first) % step == 0)
            else:
                numbers.update(VALUES)
        return sorted(number for number in numbers if number > 0)

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
    """The place of a node; None where it is none of these operators, or has another number of open sizes."""
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
    symbols = _symbols(*numbers)
    if len(symbols) != 1 and symbols != _lengths(operands):
        return None
    try:
        order = _order(value_of(value), symbols)
        if order is None or not _has_sizes(value_of(value), operands, {**told, "order": order}, symbols):
            return None
    except UsageError:
        return None
    return Place(node, value, symbols, operands, {**told, "order": order})


def _symbols(*numbers: Any) -> frozenset[Any]:
    """What the numbers depend on."""
    return frozenset().union(*(one.node.expr.free_symbols for one in numbers if isinstance(one, torch.SymInt)))


def _lengths(operands: Mapping[str, Node]) -> frozenset[Any] | None:
    """The symbols of an attention's keys and values, which are as many, where both lengths are written alike: a cache
    comes as two tensors, and torch takes their lengths for two sizes. Else None."""
    lengths: list[Any] = [value_of(operands[name]).shape[2] for name in ("k", "v") if name in operands]
    if not all(isinstance(length, torch.SymInt) and len(_symbols(length)) == 1 for length in lengths):
        return None
    written = {length.node.expr.subs(dict.fromkeys(_symbols(length), _ANY)) for length in lengths}
    return _symbols(*lengths) if len(written) == 1 else None


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


def _order(value: torch.Tensor, symbols: frozenset[Any]) -> list[int] | None:
    """The order in memory of a value's dimensions, whatever the symbols are."""
    for order in ORDERS.get(value.dim(), ()):
        tried = [_sized(value, symbols, number).permute(order) for number in TRIED]
        if all(tensor.is_contiguous() for tensor in tried):
            return list(order)
    return None


def _has_sizes(
    value: torch.Tensor, operands: Mapping[str, Node], told: Mapping[str, Any], symbols: frozenset[Any]
) -> bool:
    """Whether our operator's result is as large as the value."""
    sized = {name: _sized(value_of(node), symbols, TRIED[0]) for name, node in operands.items()}
    return open_call.sizes_of(sized, told) == tuple(_sized(value, symbols, TRIED[0]).shape)


def _sized(value: torch.Tensor, symbols: frozenset[Any], number: int) -> torch.Tensor:
    """A tensor without data like `value` where the symbols are this number; no guard comes of it.

    UsageError where there is no such tensor."""
    known = dict.fromkeys(symbols, number)
    sizes, strides = (
        [int(one.node.expr.subs(known)) if isinstance(one, torch.SymInt) else one for one in numbers]
        for numbers in (value.shape, value.stride())
    )
    if min((*sizes, *strides), default=0) < 0:
        raise UsageError(f"there is no tensor of sizes {sizes} and strides {strides}")
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
