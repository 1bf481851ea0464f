"""Template "implicit_gemm_warp_specialized": a loading warp and two multiplying warpgroups, in Gluon; Hopper."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.implicit_gemm_tma import LEAST_USEFUL, box_constraints, box_knobs
from kernelwright.kernels.conv2d.template import ConvTemplate, directions, gemm_of, power_over
from kernelwright.kernels.conv2d.tma_operands import copy_constraint, repack_knob, store_knob, tma_constraint
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

LINE = 128
"""Bytes of a swizzled line: a row of a tile."""

LEAST_USEFUL_NCHW = 0.85
"""Stands in for LEAST_USEFUL where neighbouring pixels of the result are neighbours in memory: long rows of pixels are
worth more there."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("mode", ("cooperative", "pingpong"), "category"),
        Knob("block_m", (64, 128, 256), "log2"),
        *box_knobs(),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (LINE // problem.element_bytes,), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (3, 4, 5, 6, 7, 8)),
        Knob("split_k", (1,), "log2"),
        Knob("subtile", (1, 2, 4), "log2"),
        repack_knob(problem),
        store_knob(problem),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * problem.element_bytes
    rows = 2 * m if knobs["mode"] == "pingpong" else m
    return ring + rows * n // number(knobs, "subtile") * DTYPES[problem.dtypes[problem.result]] // 8 + 256


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    gemm = gemm_of(problem)

    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if problem.dtypes[problem.operands[0]] == "int8":
            return "multiplies 16-bit and fp8 operands, and fp32 as tf32"
        wide = problem.element_bytes == 4 and knobs["precision"] != "tf32"
        return f"multiplies fp32 as tf32 only, not in {knobs['precision']}" if wide else None

    def ring(knobs: Knobs) -> str | None:
        steps, stages = math.ceil(gemm.k / number(knobs, "block_k")), number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps of the sum" if stages > max(steps + 1, 3) else None

    return [
        directions(problem, "forward", "transposed", "input_gradient"),
        Constraint("hopper", hopper),
        tma_constraint(problem, device),
        copy_constraint(problem),
        *tile_constraints(problem, device),
        Constraint("pipeline", ring),
    ]


def tile_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """Limits on the tiles of two multiplying warpgroups, which share one or (mode "pingpong") take turns."""
    gemm = gemm_of(problem)
    nchw = problem.layouts[problem.result].strides[1] != 1
    out_line = 8 * LINE // DTYPES[problem.dtypes[problem.result]]

    def shape(knobs: Knobs) -> str | None:
        rows, columns = number(knobs, "block_m"), number(knobs, "block_n")
        groups = 1 if knobs["mode"] == "pingpong" else 2
        if rows // groups < 64:
            return "each of two warpgroups needs 64 rows"
        each = rows * columns // (128 * groups)
        if each > 128:
            return f"a thread would hold {each} accumulators, 128 fit"
        part = columns // number(knobs, "subtile")
        if part < out_line:
            return f"a part of {part} columns is less than a line of {LINE} bytes"
        if gemm.m <= 32:
            return f"a warpgroup multiplies 64 pixels at once, there are {gemm.m}"
        wasted = columns > max(64, power_over(gemm.n)) or rows > max(128, power_over(gemm.m))
        return f"tiles of {rows} x {columns} for {gemm.m} x {gemm.n}" if wasted else None

    def turns(knobs: Knobs) -> str | None:
        if knobs["mode"] != "pingpong":
            return None
        tiles = math.ceil(gemm.m / number(knobs, "block_m")) * math.ceil(gemm.n / number(knobs, "block_n"))
        alone = gemm.batch * tiles <= device.multiprocessors // 2
        return "there is no second tile to take turns with" if alone else None

    return [
        *box_constraints(problem, device, LEAST_USEFUL_NCHW if nchw else LEAST_USEFUL),
        Constraint("shape", shape),
        Constraint("turns", turns),
    ]


IMPLICIT_GEMM_WARP_SPECIALIZED = ConvTemplate(
    "implicit_gemm_warp_specialized",
    "kernelwright.kernels.conv2d.implicit_gemm_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
