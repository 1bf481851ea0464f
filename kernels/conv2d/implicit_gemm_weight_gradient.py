"""Template "implicit_gemm_weight_gradient": the gradient of the weight, a matrix product with long sums over pixels."""

from __future__ import annotations

from kernelwright.kernels.conv2d.implicit_gemm import gather_shared
from kernelwright.kernels.conv2d.template import (
    LONGEST_SUM,
    SHORTEST_PART,
    ConvTemplate,
    directions,
    gemm_constraints,
    gemm_of,
    power_over,
)
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def _splits(problem: Problem) -> tuple[int, ...]:
    pixels = gemm_of(problem).k
    most = 256 if pixels <= 256 * LONGEST_SUM else SPLITS[-1]
    return tuple(s for s in SPLITS if s == 1 or (s <= most and pixels // s >= SHORTEST_PART))


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (32, 64, 128, 256), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4)),
        Knob("split_k", _splits(problem), "log2"),
        Knob("combine", ("parts", "add"), "category"),
        Knob("columns", ("tap", "flat"), "category"),
        Knob("precision", precisions, "category"),
    ]


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    channels = problem.c // problem.groups

    def columns(knobs: Knobs) -> str | None:
        block_n = number(knobs, "block_n")
        if knobs["columns"] == "tap":
            fitting = max(32, power_over(channels))
            return f"{channels} channels need a block_n of {fitting}, not {block_n}" if block_n > fitting else None
        if problem.r * problem.s == 1 or channels % block_n == 0:
            return f"tiles of one tap divide {channels} channels evenly, with less arithmetic"
        return None if channels <= 256 else f"{channels} channels fill tiles of {block_n} well enough"

    return [
        directions(problem, "weight_gradient"),
        Constraint("columns", columns),
        *gemm_constraints(problem, device, _splits(problem)),
    ]


IMPLICIT_GEMM_WEIGHT_GRADIENT = ConvTemplate(
    "implicit_gemm_weight_gradient",
    "kernelwright.kernels.conv2d.weight_gradient_kernel",
    _knobs,
    _constraints,
    gather_shared,
)
