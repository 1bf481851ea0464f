"""Template "implicit_gemm": a matrix product with a gathered operand, by plain loads; any strides, sizes and GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import (
    ConvTemplate,
    directions,
    gemm_constraints,
    gemm_of,
    power_over,
    split_choices,
)
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_SPLITS = 32


def gather_knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    """The choices of the kernel that gathers pixels."""
    return [
        Knob("block_m", (32, 64, 128, 256), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (16, 32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", split_choices(gemm_of(problem), device, MOST_SPLITS), "log2"),
        Knob("combine", ("parts", "add"), "category"),
        Knob("reduction", ("taps", "channels", "flat", "flat_taps"), "category"),
        Knob("precision", precisions, "category"),
    ]


def gather_shared(problem: Problem, knobs: Knobs) -> int:
    """Bytes of the ring of operand tiles."""
    tile = (number(knobs, "block_m") + number(knobs, "block_n")) * number(knobs, "block_k")
    return tile * number(knobs, "num_stages") * problem.element_bytes


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    return [directions(problem, "forward"), *gather_constraints(problem, device)]


def gather_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """Limits of the kernel that gathers pixels, whatever it computes with it."""
    gemm = gemm_of(problem)
    image = problem.operands[0]
    channels = problem.shapes[image][1] // problem.groups
    taps = problem.r * problem.s

    def order(knobs: Knobs) -> str | None:
        rows, group_m = math.ceil(gemm.m / number(knobs, "block_m")), number(knobs, "group_m")
        return f"group_m {group_m} for {rows} rows of tiles" if group_m > max(1, rows // 2) else None

    def reduction(knobs: Knobs) -> str | None:
        kind, block_k = str(knobs["reduction"]), number(knobs, "block_k")
        if block_k == 16 and channels >= 64 and problem.element_bytes <= 2:
            return f"steps of 16 of {channels} channels are too short to hide a load behind"
        if kind == "channels" and (taps == 1 or channels <= block_k):
            return "one block of channels, or one tap, is walked over in one order only"
        if kind in ("taps", "channels"):
            fitting = max(16 if problem.element_bytes > 1 else 32, power_over(channels))
            return f"{channels} channels need blocks of {fitting}, not {block_k}" if block_k > fitting else None
        if channels % block_k == 0 or taps == 1:
            return f"{channels} channels are walked over block by block as well, with less arithmetic"
        if kind == "flat_taps":
            return "neighbouring channels are neighbours in memory" if problem.layouts[image].strides[1] == 1 else None
        return None if channels <= 256 else f"{channels} channels fill blocks of {block_k} well enough"

    splits = split_choices(gemm, device, MOST_SPLITS)
    return [*gemm_constraints(problem, device, splits), Constraint("order", order), Constraint("reduction", reduction)]


IMPLICIT_GEMM = ConvTemplate(
    "implicit_gemm", "kernelwright.kernels.conv2d.implicit_gemm_kernel", gather_knobs, _constraints, gather_shared
)
