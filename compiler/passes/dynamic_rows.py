"""Products whose number of rows is not known before they run: tuned schedules for some numbers of rows, chosen among at
every call, so that no size needs a compile of its own.

A schedule serves the numbers of rows around the one that it was measured at (see `kernelwright.compiler.ops.REACH`);
for all others, and between records, torch computes the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from kernelwright.compiler import ops
from kernelwright.compiler.operands import workload_of, written_dtype
from kernelwright.compiler.passes.candidate import emit, hold, is_known, value_of
from kernelwright.errors import UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten

ROWS = tuple(2**power for power in range(4, 14))
"""Numbers of rows that are looked up: 16 to 8192, twice as many each time."""


def has_open_rows(node: Node) -> bool:
    """Whether a node is mm or addmm of a row-major a [?, K], a b [K, N] with known sizes, and a vector or nothing."""
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    *bias, a, b = node.args
    if not all(is_known(one) for one in (*bias, a, b, node)):
        return False
    left, right, out = (value_of(one) for one in (a, b, node))
    known = (left.shape[1], *left.stride(), *right.shape, *right.stride(), *out.stride())
    known += tuple(size for one in bias for size in value_of(one).shape)
    if isinstance(left.shape[0], int) or not all(isinstance(number, int) for number in known):
        return False
    lines = left.stride() == (left.shape[1], 1) and out.stride() == (right.shape[1], 1)
    return lines and all(value_of(one).dim() == 1 for one in bias)


def workloads(node: Node) -> list[Workload]:
    """The node's workloads at ROWS; none where it is no product of ours."""
    *bias, a, b = node.args
    left, right = value_of(a), value_of(b)
    found = []
    for rows in ROWS:
        sized = torch.empty((rows, int(left.shape[1])), dtype=left.dtype, device="meta")
        vector = value_of(bias[0]) if bias else None
        try:
            found.append(workload_of(sized, right, vector, ("bias",) if bias else (), left.dtype))
        except UsageError:
            return []
    return found


def replace(graph: Graph, node: Node, answers: Sequence[Answer]) -> None:
    """Let our operator choose among the answers' schedules at every call."""
    *bias, a, b = node.args
    by_rows = {str(one.workload.dims["M"]): one.schedule.to_json() for one in answers if one.schedule is not None}
    table = json.dumps({"device": answers[0].device.slug, "rows": by_rows}, sort_keys=True)
    dtype = written_dtype(value_of(node).dtype)
    args = (a, b, bias[0] if bias else None, "bias" if bias else "", table, dtype)
    with graph.inserting_before(node):
        result = hold(emit(graph, ops.MATMUL, args, node))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
