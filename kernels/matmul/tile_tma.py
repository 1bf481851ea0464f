"""Template "tile_tma": operands by the bulk copy engine, a program for each tile, for products of a few tiles a
multiprocessor; sm_90 and later.

1000x1000x1000: 128 tiles of 64x128, 16 steps each, fill one wave. A persistent program spends 660 clocks on a step of
which the products take 256 and the way of both operands through shared memory 384.
"""

from __future__ import annotations

from kernelwright.kernels.matmul.persistent_tma import needs_room
from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    order_constraint,
    plain_constraint,
    tiles,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

MOST_TILES = 4
"""Tiles a multiprocessor from which on a persistent program's overlapping pays."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    turning = needs_turning(problem, "a") or needs_turning(problem, "b")
    repack = (1,) if turning or not (problem.aligned("a") and problem.aligned("b")) else (0,)
    return [
        Knob("block_m", (64, 128), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (64, 128), "log2"),
        # with eight warps triton 3.6 makes code whose products do not overlap
        Knob("num_warps", (4,), "log2"),
        Knob("num_stages", (3, 4, 5, 6, 8)),
        Knob("group_m", (4, 8), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("repack", repack, "category"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * element_bytes(problem)
    # the result passes through shared memory when the operands no longer need it
    return max(ring, m * n * DTYPES[problem.out_dtype] // 8) + 256


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def kind(knobs: Knobs) -> str | None:
        if problem.paired:
            return "has no gated steps"
        return "sums in fp32" if problem.a_dtype == "int8" else None

    def few(knobs: Knobs) -> str | None:
        count = tiles(problem, knobs) / device.multiprocessors
        return f"{count:.1f} tiles a multiprocessor: persistent programs are for many" if count > MOST_TILES else None

    def registers(knobs: Knobs) -> str | None:
        each = number(knobs, "block_m") * number(knobs, "block_n") // (32 * number(knobs, "num_warps"))
        return f"{each} accumulators a thread leave no registers for the epilogue" if each > 128 else None

    return [
        plain_constraint(problem, device, batched=False),
        Constraint("kind", kind),
        Constraint("few", few),
        Constraint("registers", registers),
        order_constraint(problem),
        tma_constraint(problem, device, ("a", "b")),
        *needs_room(problem),
    ]


TILE_TMA = MatmulTemplate("tile_tma", "kernelwright.kernels.matmul.tile_tma_kernel", _knobs, _constraints, _shared)
