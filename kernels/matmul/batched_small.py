"""Template "batched_small": batches of products whose K fits in one tile; any strides, any GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.own_limits import OwnLimits
from kernelwright.kernels.matmul.template import Knobs, element_bytes, number, over
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_ROWS, MOST_COLUMNS, LONGEST_K = 128, 1024, 256
"""What counts as small: the short side of a result, its long side, and K."""


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (16, 32, 64, 128, 256), "log2"),
        Knob("block_k", (min(LONGEST_K, max(16, _power(problem.k))),), "log2"),
        Knob("num_warps", (1, 2, 4, 8), "log2"),
        Knob("num_stages", (1, 2, 3, 4)),
        Knob("split_k", (1,), "log2"),
        Knob("batches", (1, 2, 4, 8, 16, 32), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _operands(problem: Problem, knobs: Knobs) -> int:
    """Elements of both operands' tiles."""
    return (number(knobs, "block_m") + number(knobs, "block_n")) * number(knobs, "block_k")


def _shared(problem: Problem, knobs: Knobs) -> int:
    result = number(knobs, "block_m") * number(knobs, "block_n") * 4
    return max(_operands(problem, knobs) * number(knobs, "num_stages") * element_bytes(problem), result)


def _tiles(problem: Problem, knobs: Knobs) -> int:
    """Output tiles of one matrix."""
    rows, columns = problem.m / number(knobs, "block_m"), problem.out_n / number(knobs, "block_n")
    return math.ceil(rows) * math.ceil(columns)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def small(knobs: Knobs) -> str | None:
        if not problem.batched or problem.scaling or problem.paired:
            return "computes batches, without scales and gated units"
        short, long = sorted((problem.m, problem.n))
        if short > MOST_ROWS or long > MOST_COLUMNS or problem.k > LONGEST_K:
            return f"is for results of at most {MOST_ROWS} by {MOST_COLUMNS} and a K of {LONGEST_K}"
        return None

    def tile(knobs: Knobs) -> str | None:
        for side, size in (("block_m", problem.m), ("block_n", problem.n)):
            if number(knobs, side) > max(16, _power(size)):
                return f"{side} {knobs[side]} is more than the problem's {size} needs"
        count = _tiles(problem, knobs)
        return f"{count} tiles a matrix: larger ones exist" if count > 8 else None

    def registers(knobs: Knobs) -> str | None:
        threads = 32 * number(knobs, "num_warps")
        sums = number(knobs, "block_m") * number(knobs, "block_n") / threads
        if sums < 4:
            return f"a thread holds {sums:g} accumulators, fewer than 4: too many warps for the tile"
        if sums > 64:
            return over(sums, 64, "accumulators a thread")
        if number(knobs, "num_stages") > 1 and problem.aligned("a") and problem.aligned("b"):
            # copied to shared memory past the registers
            return None
        words = _operands(problem, knobs) * element_bytes(problem) / 4 / threads
        return over(words, 64, "registers a thread for the operands")

    def batches(knobs: Knobs) -> str | None:
        each, stages = number(knobs, "batches"), number(knobs, "num_stages")
        if stages > each:
            return f"{stages} stages for {each} matrices a program"
        programs = math.ceil(problem.batch / each) * _tiles(problem, knobs)
        waiting = each > 1 and programs < 2 * device.multiprocessors
        return f"{programs} programs leave multiprocessors idle: fewer matrices each" if waiting else None

    return [
        Constraint("small", small),
        Constraint("tile", tile),
        Constraint("registers", registers),
        Constraint("batches", batches),
    ]


BATCHED_SMALL = OwnLimits(
    "batched_small", "kernelwright.kernels.matmul.batched_small_kernel", _knobs, _constraints, _shared
)
"""Matmul of batches of small matrices: several of them by each program, one after the other."""
