"""Template "warp_specialized_loop": a loop that triton itself divides among groups of warps; Hopper only."""

from __future__ import annotations

from kernelwright.kernels.matmul.persistent_tma import needs_room
from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    plain_constraint,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.precision import PARTS
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    # a row of a tile is one or two swizzled lines of 128 bytes
    line = 1024 // DTYPES[problem.a_dtype]
    return [
        # the compiler divides a tile's rows between two groups of warps, each of which needs 64
        Knob("block_m", (128, 256), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (line, 2 * line), "log2"),
        # those that multiply; four more copy
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("group_m", (4, 8, 16), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * element_bytes(problem)
    parts = m * k * element_bytes(problem) if knobs["precision"] in PARTS else 0
    return ring + parts + m * n * DTYPES[problem.out_dtype] // 8 + 1024


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"triton divides such loops on sm_90, the device is {device.architecture}"
        if problem.paired:
            return "makes one product a tile, a gated unit needs two"
        if knobs["precision"] == "ieee":
            return "needs products of the matrix units"
        return "needs operands along K" if needs_turning(problem, "a") or needs_turning(problem, "b") else None

    def order(knobs: Knobs) -> str | None:
        rows = -(-problem.m // number(knobs, "block_m"))
        wide = number(knobs, "group_m") > max(4, rows)
        return f"group_m {knobs['group_m']} for {rows} rows of tiles" if wide else None

    return [
        plain_constraint(problem, device, batched=False),
        tma_constraint(problem, device, ("a", "b")),
        Constraint("hopper", hopper),
        Constraint("order", order),
        *(c for c in needs_room(problem) if c.name != "copies"),
    ]


WARP_SPECIALIZED_LOOP = MatmulTemplate(
    "warp_specialized_loop", "kernelwright.kernels.matmul.warp_specialized_loop_kernel", _knobs, _constraints, _shared
)
