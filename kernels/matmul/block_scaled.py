"""Template "block_scaled": fp8 operands with fp32 scales for blocks of 128, as one product or with operands swapped and
split-K for few rows; from sm_90 on."""

from __future__ import annotations

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    number,
    over,
    split_choices,
    split_constraint,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

MOST_SWAPPED_ROWS = 64


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("swap", (0, 1), "category"),
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (32, 64, 128), "log2"),
        Knob("block_k", (128,), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", split_choices(problem, device, 16), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + (2 * n if problem.paired else n)) * k * number(knobs, "num_stages")
    return ring if knobs["swap"] else ring + m * n * DTYPES[problem.out_dtype] // 8


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def blocks(knobs: Knobs) -> str | None:
        if problem.scaling != "block128" or problem.groups or problem.batched:
            return "computes single products of fp8 operands under scaling block128"
        uneven = problem.paired and problem.out_n % number(knobs, "block_n")
        return f"a tile of the right half of {problem.n} columns meets two blocks of scales" if uneven else None

    def registers(knobs: Knobs) -> str | None:
        # the sums of one step stand beside the accumulators
        sums = 3 if problem.paired else 2
        each = sums * number(knobs, "block_m") * number(knobs, "block_n") / (32 * number(knobs, "num_warps"))
        return over(each, 160, "registers a thread for sums")

    return [
        Constraint("blocks", blocks),
        Constraint("registers", registers),
        Constraint("form", lambda knobs: _form(problem, knobs)),
        tma_constraint(problem, device, ("a", "b")),
        split_constraint(problem, device),
    ]


def _form(problem: Problem, knobs: Knobs) -> str | None:
    """Why the two forms' own knobs do not go together."""
    wide = "block_n" if knobs["swap"] else "block_m"
    if number(knobs, wide) < 16 * number(knobs, "num_warps"):
        return f"{knobs['num_warps']} warps need a {wide} of {16 * number(knobs, 'num_warps')}"
    if knobs["swap"]:
        if problem.m > MOST_SWAPPED_ROWS:
            return f"swapped operands are for at most {MOST_SWAPPED_ROWS} rows, the problem has {problem.m}"
        return "an order of tiles is for operands that are not swapped" if number(knobs, "group_m") > 1 else None
    if number(knobs, "split_k") > 1:
        return "parts along K need swapped operands"
    one_row = problem.m <= number(knobs, "block_m")
    return "group_m above 1 needs more than one row of tiles" if one_row and number(knobs, "group_m") > 1 else None


BLOCK_SCALED = MatmulTemplate(
    "block_scaled", "kernelwright.kernels.matmul.block_scaled_kernel", _knobs, _constraints, _shared
)
