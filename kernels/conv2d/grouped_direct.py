"""Template "grouped_direct": small groups side by side on the tensor cores; every direction, any layout and GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import LONGEST_SUM, ConvTemplate, power_over
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, multiplies, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

WIDEST_GROUP = 32
"""Channels of a group above which a tile of one group is wide enough, and the other templates do as well."""

WIDEST_TILE = 64
"""Channels of a tile: with more of them products with zeros take longer than reading the image."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    gradient = problem.result == "w"
    return [
        Knob("block_m", (32, 64, 128) if gradient else (64, 128, 256), "log2"),
        Knob("span", (1, 2, 4, 8, 16, 32), "log2"),
        Knob("taps", (1, 2, 3, 5) if gradient else (1,)),
        Knob("split_k", (1, 8, 16, 32, 64, 128, 256) if gradient else (1,), "log2"),
        Knob("num_warps", (1, 2, 4, 8), "log2"),
        Knob("num_stages", (1, 2, 3, 4)),
        Knob("precision", precisions, "category"),
    ]


def _widths(problem: Problem, knobs: Knobs) -> tuple[int, int]:
    """Channels of a tile of input and output."""
    span = number(knobs, "span")
    return tuple(max(16, power_over(span * channels // problem.groups)) for channels in (problem.c, problem.k))  # type: ignore[return-value]


def _shared(problem: Problem, knobs: Knobs) -> int:
    c, k = _widths(problem, knobs)
    rows = number(knobs, "block_m")
    tile = rows * (c * number(knobs, "taps") + k) if problem.result == "w" else rows * max(c, k) + c * k
    return tile * max(number(knobs, "num_stages"), 1) * problem.element_bytes


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    inner, outer = problem.c // problem.groups, problem.k // problem.groups

    def groups(knobs: Knobs) -> str | None:
        if problem.groups == 1:
            return "is for grouped convolutions"
        if inner == outer == 1:
            return "channels by themselves need no tensor cores"
        if max(inner, outer) > WIDEST_GROUP:
            return f"is for groups of at most {WIDEST_GROUP} channels, got {inner} and {outer}"
        if problem.element_bytes == 1:
            return "8-bit products need 32 channels in a row; multiplies wider types"
        return multiplies(problem.dtypes[problem.operands[0]], device)

    def span(knobs: Knobs) -> str | None:
        count = number(knobs, "span")
        if count > power_over(problem.groups):
            return f"{count} groups of {problem.groups}"
        if count > 1 and count * max(inner, outer) > WIDEST_TILE:
            return f"{count} groups have more than {WIDEST_TILE} channels"
        least = min(16 // max(inner, outer), power_over(problem.groups))
        return f"{count} groups fill no 16 channels" if count < least else None

    def warps(knobs: Knobs) -> str | None:
        c, k = _widths(problem, knobs)
        rows, count = (k, number(knobs, "num_warps")) if problem.result == "w" else (0, number(knobs, "num_warps"))
        if rows:
            each = rows * c * number(knobs, "taps") / (32 * count)
            if count > max(1, rows * c // 256):
                return f"{count} warps for a tile of {rows} x {c}"
            read = number(knobs, "block_m") * c * number(knobs, "taps") / (32 * count)
            return over(each, 64, "sums of a thread") or over(read, 64, "elements that a thread reads ahead")
        columns = c if problem.direction == "input_gradient" else k
        each = number(knobs, "block_m") * columns / (32 * count)
        if number(knobs, "block_m") < 16 * count:
            return f"{count} warps need {16 * count} pixels"
        return over(each, 64, "sums of a thread")

    return [
        Constraint("groups", groups),
        Constraint("span", span),
        Constraint("warps", warps),
        *_sums(problem, device),
    ]


def _sums(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """Limits on the parts of sums over pixels, and on pipelines."""
    pixels = problem.n * math.prod(problem.out_size)

    def parts(knobs: Knobs) -> str | None:
        if problem.result != "w":
            return None
        count = number(knobs, "split_k")
        if pixels / count > LONGEST_SUM and problem.element_bytes < 4:
            return f"sums of {pixels // count} products lose too much on tensor cores"
        if count > 1 and count * number(knobs, "block_m") > pixels:
            return f"{count} parts of {pixels} pixels"
        blocks = math.ceil(problem.groups / number(knobs, "span"))
        blocks *= math.ceil(problem.r * problem.s / number(knobs, "taps"))
        many = count > 1 and blocks * count > 16 * device.multiprocessors and pixels / count < LONGEST_SUM / 2
        return f"{blocks * count} programs fill the device with fewer parts" if many else None

    def taps(knobs: Knobs) -> str | None:
        most = max(1, problem.r * problem.s)
        return f"{knobs['taps']} taps of {most}" if number(knobs, "taps") > most else None

    def ring(knobs: Knobs) -> str | None:
        stages, steps = number(knobs, "num_stages"), problem.r * problem.s
        waits = problem.result != "w" and stages > steps
        return f"{stages} stages for {steps} steps" if waits else None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None or number(knobs, "split_k") == 1:
            return None
        needed = 4 * number(knobs, "split_k") * math.prod(problem.shapes["w"])
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        Constraint("parts", parts),
        Constraint("taps", taps),
        Constraint("pipeline", ring),
        Constraint("workspace", workspace),
    ]


GROUPED_DIRECT = ConvTemplate(
    "grouped_direct", "kernelwright.kernels.conv2d.grouped_direct_kernel", _knobs, _constraints, _shared
)
"""Up to 64 channels of neighbouring groups in a tile; bound by the bytes of the images where groups are small."""
