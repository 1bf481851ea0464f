"""Template "stream_k": tiles by the bulk copy engine, the last waves shared out evenly along K; sm_90 and later."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.persistent_tma import needs_room
from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    order_constraint,
    over,
    plain_constraint,
    tiles,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

FULL = 0.97
"""A last wave that fills the device this far leaves nothing to gain."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    unaligned = not (problem.aligned("a") and problem.aligned("b"))
    turning = needs_turning(problem, "a") or needs_turning(problem, "b")
    return [
        Knob("block_m", (64, 128, 256), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("group_m", (4, 8, 16), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("stream_waves", (1, 2)),
        Knob("subtile", (1,) if problem.paired else (1, 2, 4), "log2"),
        Knob("blocks_per_sm", (1,)),
        Knob("repack", (1,) if unaligned or turning else (0,), "category"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + (2 * n if problem.paired else n)) * k * number(knobs, "num_stages") * element_bytes(problem)
    return ring + m * n // number(knobs, "subtile") * DTYPES[problem.out_dtype] // 8


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def tail(knobs: Knobs) -> str | None:
        count = tiles(problem, knobs)
        waves = count / device.multiprocessors
        if waves / math.ceil(waves) > FULL:
            return f"{count} tiles fill {math.ceil(waves)} waves: there is nothing to share out"
        if waves > 8:
            return f"{waves:.1f} waves: the last one is a small part of the time"
        if number(knobs, "stream_waves") > 1 and waves < 1:
            return "there is no full wave to share out"
        steps = math.ceil(problem.k / number(knobs, "block_k"))
        return f"{steps} steps along K are too few to share out" if steps < 8 else None

    def room(knobs: Knobs) -> str | None:
        limit = problem.workspace_bytes
        area = number(knobs, "block_m") * number(knobs, "block_n") * (2 if problem.paired else 1)
        needed = 4 * device.multiprocessors * area
        return None if limit is None else over(needed, limit, "bytes of workspace for parts (workspace_bytes)")

    def columns(knobs: Knobs) -> str | None:
        part = number(knobs, "block_n") // number(knobs, "subtile")
        return f"a part of {part} columns is too narrow to be worth a store of its own" if part < 32 else None

    def multiply_adds(knobs: Knobs) -> str | None:
        each = number(knobs, "block_m") * number(knobs, "block_n") / (32 * number(knobs, "num_warps"))
        # without matrix units both operands stand in registers beside the sums
        return over(each, 32, "accumulators a thread beside the operands") if knobs["precision"] == "ieee" else None

    return [
        plain_constraint(problem, device),
        tma_constraint(problem, device, ("a", "b")),
        Constraint("tail", tail),
        Constraint("room", room),
        order_constraint(problem),
        Constraint("columns", columns),
        Constraint("multiply_adds", multiply_adds),
        *needs_room(problem),
    ]


STREAM_K = MatmulTemplate("stream_k", "kernelwright.kernels.matmul.stream_k_kernel", _knobs, _constraints, _shared)
