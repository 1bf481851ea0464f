"""Template "skinny": few rows of a, the weight on the tensor cores' wide side, split-K in one launch; from sm_90 on."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    number,
    plain_constraint,
    split_choices,
    split_constraint,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_ROWS = 256


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128, 256), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6, 8)),
        Knob("split_k", split_choices(problem, device, 16), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    columns = number(knobs, "block_n") * (2 if problem.paired else 1)
    tile = (number(knobs, "block_m") + columns) * number(knobs, "block_k")
    return tile * number(knobs, "num_stages") * element_bytes(problem)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def rows(knobs: Knobs) -> str | None:
        if problem.m > MOST_ROWS:
            return f"is for at most {MOST_ROWS} rows, the problem has {problem.m}"
        block = number(knobs, "block_m")
        if problem.a.order != "row":
            return "needs a in row layout"
        # one tile should hold all rows, or every weight is read more than once
        most = min(128, 2 ** math.ceil(math.log2(max(problem.m, 16))))
        return f"block_m {block} reads the weight {math.ceil(problem.m / block)} times" if block < most / 2 else None

    def warps(knobs: Knobs) -> str | None:
        needed = 16 * number(knobs, "num_warps")
        return f"{knobs['num_warps']} warps need a block_n of {needed}" if number(knobs, "block_n") < needed else None

    return [
        plain_constraint(problem, device, batched=False),
        Constraint("rows", rows),
        Constraint("warps", warps),
        tma_constraint(problem, device, ("a", "b")),
        split_constraint(problem, device),
    ]


SKINNY = MatmulTemplate("skinny", "kernelwright.kernels.matmul.skinny_kernel", _knobs, _constraints, _shared)
