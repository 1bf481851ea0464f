"""Template "implicit_gemm_weight_gradient": the gradient of the weight, a matrix product with long sums over pixels."""

from __future__ import annotations

from kernelwright.kernels.conv2d.implicit_gemm import gather_shared
from kernelwright.kernels.conv2d.template import (
    ConvTemplate,
    directions,
    gemm_constraints,
    gemm_of,
    power_over,
    tiles,
)
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SHORTEST_PART = 128
"""Pixels that a part of a sum should have at least."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    pixels = gemm_of(problem).k
    return [
        Knob("block_m", (32, 64, 128, 256), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4)),
        Knob("split_k", tuple(s for s in SPLITS if s == 1 or pixels // s >= SHORTEST_PART), "log2"),
        Knob("combine", ("parts", "add"), "category"),
        Knob("columns", ("tap", "flat"), "category"),
        Knob("precision", precisions, "category"),
    ]


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    gemm, channels = gemm_of(problem), problem.c // problem.groups

    def columns(knobs: Knobs) -> str | None:
        block_n = number(knobs, "block_n")
        if knobs["columns"] == "tap":
            fitting = max(32, power_over(channels))
            return f"{channels} channels need a block_n of {fitting}, not {block_n}" if block_n > fitting else None
        if problem.r * problem.s == 1 or channels % block_n == 0:
            return f"tiles of one tap divide {channels} channels evenly, with less arithmetic"
        return None if channels <= 256 else f"{channels} channels fill tiles of {block_n} well enough"

    def fill(knobs: Knobs) -> str | None:
        programs, split = tiles(gemm, knobs) * number(knobs, "split_k"), number(knobs, "split_k")
        further = 2 * split <= SPLITS[-1] and gemm.k // (2 * split) >= SHORTEST_PART
        idle = 4 * programs < device.multiprocessors and further
        return f"{programs} programs leave most of {device.multiprocessors} multiprocessors idle" if idle else None

    return [
        directions(problem, "weight_gradient"),
        Constraint("columns", columns),
        Constraint("fill", fill),
        *gemm_constraints(problem, device),
    ]


IMPLICIT_GEMM_WEIGHT_GRADIENT = ConvTemplate(
    "implicit_gemm_weight_gradient",
    "kernelwright.kernels.conv2d.weight_gradient_kernel",
    _knobs,
    _constraints,
    gather_shared,
)
