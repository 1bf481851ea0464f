"""Template "patch_gradient": gradient of the input where the kernel is no larger than the stride, as one matrix
product of output pixels and the weights of a cell of the input; any strides and GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.implicit_gemm import gather_shared
from kernelwright.kernels.conv2d.template import (
    LONGEST_SUM,
    ConvTemplate,
    Gemm,
    directions,
    power_over,
    register_constraints,
)
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (32, 64, 128, 256), "log2"),
        Knob("block_n", (16, 32, 64, 128, 256), "log2"),
        Knob("block_k", (16, 32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (1, 2, 3, 4)),
        Knob("precision", precisions, "category"),
    ]


def cells_gemm(problem: Problem) -> Gemm:
    """Rows are cells of the input, columns a cell's pixels and channels, sums run over the filters."""
    sizes = zip(problem.shapes["x"][2:], problem.padding, problem.stride, strict=True)
    rows = problem.n * math.prod((size - 1 + pad) // step + 1 for size, pad, step in sizes)
    return Gemm(rows, problem.c * math.prod(problem.stride), problem.k, 1)


def _unfit(problem: Problem) -> str | None:
    taps, stride = (problem.r, problem.s), problem.stride
    apart = any(size > 1 and step > 1 for size, step in zip(taps, problem.dilation, strict=True))
    if problem.groups > 1 or apart:
        return "computes gradients of one group without dilation"
    if any(size > step for size, step in zip(taps, stride, strict=True)) or stride == (1, 1):
        return f"needs a kernel no larger than the stride, above 1; got {taps[0]} x {taps[1]} for {stride}"
    few = 2 * math.prod(taps) < math.prod(stride)
    return f"most of the columns would be zero: {taps[0]} x {taps[1]} taps for a stride of {stride}" if few else None


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    gemm, words = cells_gemm(problem), _unfit(problem)

    def oversize(knobs: Knobs) -> str | None:
        for side, size, least in (("block_m", gemm.m, 32), ("block_n", gemm.n, 16), ("block_k", gemm.k, 16)):
            fitting = max(least, power_over(size))
            if number(knobs, side) > fitting:
                return f"{side} {knobs[side]} is more than the problem's {size} needs, {fitting}"
        return None

    def narrow(knobs: Knobs) -> str | None:
        wanted = min(64, power_over(gemm.n))
        tight = number(knobs, "block_n") < wanted or number(knobs, "block_k") < min(32, power_over(gemm.k))
        return "reads the output's gradient more often than tiles of more columns do" if tight else None

    def ring(knobs: Knobs) -> str | None:
        steps, stages = math.ceil(gemm.k / number(knobs, "block_k")), number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps of the sum" if stages > max(steps, 1) + 1 else None

    def long_sums(knobs: Knobs) -> str | None:
        long = problem.element_bytes < 4 and gemm.k > LONGEST_SUM
        return f"sums of {gemm.k} products lose too much on tensor cores" if long else None

    return [
        directions(problem, "input_gradient"),
        Constraint("patches", lambda knobs: words),
        *register_constraints(problem, device),
        Constraint("oversize", oversize),
        Constraint("narrow", narrow),
        Constraint("pipeline", ring),
        Constraint("long_sums", long_sums),
    ]


PATCH_GRADIENT = ConvTemplate(
    "patch_gradient", "kernelwright.kernels.conv2d.patch_gradient_kernel", _knobs, _constraints, gather_shared
)
