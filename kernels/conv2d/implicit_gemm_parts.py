"""Template "implicit_gemm_parts": fp32 as several products of narrower parts, by specialised warps; Hopper."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.implicit_gemm_tma import box_knobs
from kernelwright.kernels.conv2d.implicit_gemm_warp_specialized import LINE, tile_constraints
from kernelwright.kernels.conv2d.template import ConvTemplate, directions, gemm_of
from kernelwright.kernels.conv2d.tma_operands import splits, store_knob, tma_constraint
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.precision import PARTS
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

PARTS_OF_A_NUMBER = {"bf16x3": 2, "bf16x6": 3, "tf32x3": 2}
"""Precisions that this template computes in, and of how many parts they make a number."""


def _part_bytes(knobs: Knobs) -> int:
    return 4 if knobs["precision"] == "tf32x3" else 2


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    several = tuple(precision for precision in precisions if precision in PARTS_OF_A_NUMBER)
    return [
        Knob("mode", ("cooperative", "pingpong"), "category"),
        Knob("block_m", (64, 128, 256), "log2"),
        *box_knobs(),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (32, 64), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (3, 4, 5, 6, 7)),
        Knob("subtile", (1, 2, 4), "log2"),
        Knob("repack", (1,), "category"),
        store_knob(problem),
        Knob("precision", several or precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * _part_bytes(knobs)
    rows = 2 * m if knobs["mode"] == "pingpong" else m
    return ring + rows * n // number(knobs, "subtile") * DTYPES[problem.dtypes[problem.result]] // 8 + 256


def _copied_bytes(problem: Problem, knobs: Knobs) -> float:
    """Bytes of the parts, and of the result where it is copied."""
    block_k, each = number(knobs, "block_k"), PARTS_OF_A_NUMBER[str(knobs["precision"])] * _part_bytes(knobs)
    n, channels, *sizes = problem.shapes[problem.operands[0]]
    steps = [step if splits(problem, axis) else 1 for axis, step in enumerate(problem.stride)]
    pixels = n * math.prod(math.ceil(size / step) * step for size, step in zip(sizes, steps, strict=True))
    a, b, r, s = problem.shapes["w"]
    columns, summed = (problem.groups * b, a // problem.groups) if problem.scatters else (a, b)
    blocks = pixels * math.ceil(channels / block_k) + columns * r * s * math.ceil(summed / block_k)
    result = problem.result if knobs["store"] == "copied" else None
    back = math.prod(problem.shapes[result]) * DTYPES[problem.dtypes[result]] / 8 if result else 0
    return blocks * block_k * each + back


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    gemm = gemm_of(problem)

    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if any(problem.dtypes[name] != "fp32" for name in problem.operands):
            return "divides fp32 numbers into parts; other types need none"
        if knobs["precision"] not in PARTS_OF_A_NUMBER:
            return f"multiplies in {', '.join(PARTS_OF_A_NUMBER)}, the error budget asks for {knobs['precision']}"
        return None

    def line(knobs: Knobs) -> str | None:
        wanted = LINE // _part_bytes(knobs)
        return f"a line of {LINE} bytes has {wanted} elements" if knobs["block_k"] != wanted else None

    def ring(knobs: Knobs) -> str | None:
        steps = PARTS[str(knobs["precision"])][1] * math.ceil(gemm.k / number(knobs, "block_k"))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps of the sum" if stages > max(steps + 1, 3) else None

    def copies(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        return over(_copied_bytes(problem, knobs), problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        directions(problem, "forward", "transposed", "input_gradient"),
        Constraint("hopper", hopper),
        Constraint("line", line),
        tma_constraint(problem, device),
        Constraint("copies", copies),
        *tile_constraints(problem, device),
        Constraint("pipeline", ring),
    ]


IMPLICIT_GEMM_PARTS = ConvTemplate(
    "implicit_gemm_parts", "kernelwright.kernels.conv2d.implicit_gemm_parts_kernel", _knobs, _constraints, _shared
)
