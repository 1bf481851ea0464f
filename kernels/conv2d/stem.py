"""Template "stem": images of at most 4 channels, all taps and channels in one short sum; any layout and GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import ConvTemplate, directions, power_over
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, multiplies, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_CHANNELS = 4

MOST_UNROLLED = 16
"""Tiles of the sum that are written out one after the other, so that their loads are under way together."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (32, 64, 128, 256), "log2"),
        Knob("block_n", (16, 32, 64, 128, 256), "log2"),
        Knob("block_k", (16, 32, 64, 128), "log2"),
        Knob("num_warps", (2, 4, 8), "log2"),
        Knob("num_stages", (1, 2, 3)),
        Knob("reduction", ("runs", "flat"), "category"),
        Knob("unroll", (0, 1), "category"),
        Knob("precision", precisions, "category"),
    ]


def _run(problem: Problem) -> tuple[int, int]:
    """(elements of a run of neighbours, number of runs)."""
    if problem.layouts["x"].strides[1] == 1:
        return problem.s * problem.c, problem.r
    return problem.s, problem.r * problem.c


def _chunks(problem: Problem, knobs: Knobs) -> int:
    if knobs["reduction"] == "runs":
        return _run(problem)[1]
    return math.ceil(problem.r * problem.s * problem.c / number(knobs, "block_k"))


def _shared(problem: Problem, knobs: Knobs) -> int:
    tile = (number(knobs, "block_m") + number(knobs, "block_n")) * number(knobs, "block_k")
    return tile * number(knobs, "num_stages") * problem.element_bytes


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    least = 32 if problem.element_bytes == 1 else 16

    def few(knobs: Knobs) -> str | None:
        if problem.c > MOST_CHANNELS or problem.groups > 1:
            return f"is for at most {MOST_CHANNELS} channels in one group, got {problem.c} in {problem.groups}"
        return multiplies(problem.dtypes["x"], device)

    def runs(knobs: Knobs) -> str | None:
        block_k = number(knobs, "block_k")
        if block_k < least:
            return f"8-bit products need a block_k of {least}"
        if knobs["reduction"] == "flat":
            fitting = max(least, power_over(problem.r * problem.s * problem.c))
            return f"block_k {block_k} for {fitting} products" if block_k > fitting else None
        strides, unit = problem.layouts["x"].strides, problem.c if problem.layouts["x"].strides[1] == 1 else 1
        if strides[3] != unit or (problem.dilation[1] > 1 and problem.s > 1):
            return "the taps of a row are no neighbours in memory"
        fitting = max(least, power_over(_run(problem)[0]))
        return f"a run of {_run(problem)[0]} needs a block_k of {fitting}" if block_k != fitting else None

    def tile(knobs: Knobs) -> str | None:
        m, n, warps = number(knobs, "block_m"), number(knobs, "block_n"), number(knobs, "num_warps")
        if n > max(16, power_over(problem.k)):
            return f"block_n {n} for {problem.k} channels"
        if n < 128 and n < power_over(problem.k) and problem.k > 16:
            return f"blocks of {n} gather the image {math.ceil(problem.k / n)} times"
        if m < 16 * warps:
            return f"{warps} warps need {16 * warps} pixels"
        gathered = m * number(knobs, "block_k") / (32 * warps)
        return over(m * n / (32 * warps), 128, "sums of a thread") or over(
            gathered, 64, "gathered elements of a thread"
        )

    def code(knobs: Knobs) -> str | None:
        chunks = _chunks(problem, knobs)
        if knobs["unroll"]:
            if number(knobs, "num_stages") > 1:
                return "what is unrolled has no pipeline"
            return f"{chunks} tiles are too many to unroll" if chunks > MOST_UNROLLED else None
        return f"{knobs['num_stages']} stages for {chunks} steps" if number(knobs, "num_stages") > chunks else None

    return [
        directions(problem, "forward"),
        Constraint("few_channels", few),
        Constraint("runs", runs),
        Constraint("tile", tile),
        Constraint("code", code),
    ]


STEM = ConvTemplate("stem", "kernelwright.kernels.conv2d.stem_kernel", _knobs, _constraints, _shared)
"""Bound by the instructions that gather pixels, and by the bytes of the result."""
