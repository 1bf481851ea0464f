"""Template "microscaling": both operands of 8 or 4 bits with scales for 32 or 16 neighbours along K; plain pointers, on
any GPU."""

from __future__ import annotations

from kernelwright.kernels.matmul.template import Knobs, MatmulTemplate, multiplies, number, over
from kernelwright.kernels.matmul.workload import FLOATS, Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (32, 64, 128), "log2"),
        Knob("block_k", (32,) if problem.k <= 32 else (64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    n *= 2 if problem.paired else 1
    stored = (m * DTYPES[problem.a_dtype] + n * DTYPES[problem.b_dtype]) * k // 8
    # the widened tiles, and the stored ones of the steps ahead
    return stored * (number(knobs, "num_stages") - 1) + (m + n) * k * 2


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def operands(knobs: Knobs) -> str | None:
        if problem.groups or problem.batched:
            return "computes single products"
        if problem.scaling not in ("mx", "nvfp4") or problem.a_dtype in FLOATS:
            return "multiplies two operands of 8 or 4 bits under scaling mx or nvfp4"
        fp8 = [dtype for dtype in (problem.a_dtype, problem.b_dtype) if dtype != "fp4"]
        # nvfp4's scales are fp8 too
        return multiplies("fp8e4m3", device) if fp8 or problem.scaling == "nvfp4" else None

    def order(knobs: Knobs) -> str | None:
        one_row = problem.m <= number(knobs, "block_m")
        return "group_m above 1 needs more than one row of tiles" if one_row and number(knobs, "group_m") > 1 else None

    def registers(knobs: Knobs) -> str | None:
        # widened operands pass through registers, two numbers in each
        m, n = number(knobs, "block_m"), number(knobs, "block_n") * (2 if problem.paired else 1)
        each = (m * n + (m + n) * number(knobs, "block_k") / 2) / (32 * number(knobs, "num_warps"))
        return over(each, 192, "registers a thread for sums and operands")

    return [Constraint("operands", operands), Constraint("order", order), Constraint("registers", registers)]


MICROSCALING = MatmulTemplate(
    "microscaling", "kernelwright.kernels.matmul.microscaling_kernel", _knobs, _constraints, _shared
)
