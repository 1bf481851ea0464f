"""Template "implicit_gemm_tma": implicit GEMM, boxes of pixels copied by the bulk copy engine, from sm_90 on."""

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
from kernelwright.kernels.conv2d.tma_operands import copy_constraint, repack_knob, splits, tma_constraint
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

MOST_SPLITS = 32

LONGEST_BOX = 256
"""Elements of a box along each axis that the engine copies at once."""

LEAST_USEFUL = 0.9
"""Tiles of which a smaller share lies inside of the image than that of the best ones, times this, are not offered."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    splits_of_sums = split_choices(gemm_of(problem), device, MOST_SPLITS)
    return [
        Knob("block_m", (64, 128, 256), "log2"),
        *box_knobs(),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (16, 32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5)),
        # tiles of many shapes are choice enough between powers of two
        Knob("split_k", tuple(parts for parts in splits_of_sums if parts.bit_count() == 1), "log2"),
        Knob("combine", ("parts",), "category"),
        Knob("blocks_per_sm", (1, 2)),
        repack_knob(problem),
        Knob("precision", precisions, "category"),
    ]


def box_knobs() -> list[Knob]:
    """Rows and columns of a tile's pixels; the rest of block_m are images. The longest rows are for images of one."""
    return [Knob("tile_h", (1, 2, 4, 8, 16, 32), "log2"), Knob("tile_w", (1, 2, 4, 8, 16, 32, 64, 128, 256), "log2")]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * problem.element_bytes
    # a finished tile passes through shared memory on its way out, unless it is a part of a sum
    return ring + (m * n * DTYPES[problem.dtypes[problem.result]] // 8 if number(knobs, "split_k") == 1 else 0)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def residency(knobs: Knobs) -> str | None:
        per_sm = number(knobs, "blocks_per_sm")
        if per_sm == 1:
            return None
        if number(knobs, "split_k") > 1 or (problem.scatters and problem.stride != (1, 1)):
            return "only programs that walk over tiles can be told how many share a multiprocessor"
        registers = 32 * number(knobs, "num_warps") * per_sm * 128
        if registers > device.registers:
            return f"{per_sm} blocks of {knobs['num_warps']} warps need {registers} registers, {device.registers} there"
        return over(per_sm * (_shared(problem, knobs) + 1024), device.shared_memory_bytes, "bytes of shared memory")

    def wide(knobs: Knobs) -> str | None:
        inner = number(knobs, "block_k") * problem.element_bytes
        return (
            f"a row of {inner} bytes is too long for 4-byte elements"
            if problem.element_bytes == 4 < inner / 64
            else None
        )

    return [
        directions(problem, "forward", "transposed", "input_gradient"),
        tma_constraint(problem, device),
        *box_constraints(problem, device),
        *gemm_constraints(problem, device),
        copy_constraint(problem),
        Constraint("residency", residency),
        Constraint("wide", wide),
    ]


def box_constraints(problem: Problem, device: DeviceSpec, least: float = LEAST_USEFUL) -> list[Constraint]:
    """Limits on the tile of pixels and on blocks of channels. least: LEAST_USEFUL, or what stands in for it."""
    channels, columns = (problem.shapes[name][1] // problem.groups for name in (problem.operands[0], problem.result))
    best = _best_share(problem)

    def box(knobs: Knobs) -> str | None:
        images = number(knobs, "block_m") / (number(knobs, "tile_h") * number(knobs, "tile_w"))
        if images < 1 or images > LONGEST_BOX:
            return f"block_m {knobs['block_m']} is no whole number of images, or more than {LONGEST_BOX}"
        height, width = number(knobs, "tile_h"), number(knobs, "tile_w")
        if not _compact(problem, height, width):
            return f"{height} x {width} pixels share fewer neighbours than squarer ones"
        share = _useful(problem, int(images), height, width)
        small = share < least * best
        return f"only {share:.0%} of the tiles' pixels exist, {best:.0%} with others" if small else None

    def channel_blocks(knobs: Knobs) -> str | None:
        block_n, block_k = number(knobs, "block_n"), number(knobs, "block_k")
        if block_k > max(32, power_over(channels)) or (block_k == 16 and channels > 16):
            return f"block_k {block_k} for {channels} channels"
        whole = problem.groups > 1 or splits(problem, 1)
        if whole and channels % block_k:
            return f"blocks of {block_k} must divide the {channels} channels of a group, or of a stride's remainder"
        return (
            f"blocks of {block_n} must divide the {columns} channels of a group"
            if (problem.groups > 1 and columns % block_n)
            else None
        )

    return [Constraint("box", box), Constraint("channel_blocks", channel_blocks)]


def _compact(problem: Problem, height: int, width: int) -> bool:
    """Whether a tile is about square, or the image gives it no choice."""
    step = problem.stride if problem.scatters else (1, 1)
    rows, columns = (
        math.ceil(size / apart) for size, apart in zip(problem.shapes[problem.result][2:], step, strict=True)
    )
    return (
        height <= width <= 4 * height or (width > height >= power_over(rows)) or (height > width >= power_over(columns))
    )


def _useful(problem: Problem, images: int, height: int, width: int) -> float:
    """Share of a tile's pixels that lie in the result, on average."""
    step = problem.stride if problem.scatters else (1, 1)
    rows, columns = (
        math.ceil(size / apart) for size, apart in zip(problem.shapes[problem.result][2:], step, strict=True)
    )
    sizes = ((problem.n, images), (rows, height), (columns, width))
    return math.prod(size / (math.ceil(size / block) * block) if size else 1.0 for size, block in sizes)


def _best_share(problem: Problem) -> float:
    heights, widths = ([int(value) for value in knob.values] for knob in box_knobs())
    return max(
        _useful(problem, 128 // (height * width), height, width)
        for height in heights
        for width in widths
        if height * width <= 128 and _compact(problem, height, width)
    )


IMPLICIT_GEMM_TMA = ConvTemplate(
    "implicit_gemm_tma", "kernelwright.kernels.conv2d.implicit_gemm_tma_kernel", _knobs, _constraints, _shared
)
