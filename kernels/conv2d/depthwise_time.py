"""How long a tile schedule of a depthwise convolution should take, counted in instructions, registers and bytes."""

from __future__ import annotations

import dataclasses
import math

from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.types import DTYPES, DeviceSpec

CLOCKS_US = 1700.0
"""Clocks of a multiprocessor in a microsecond, under load."""

SCHEDULERS, MOST_WARPS = 4, 64

LATENCY = 1500.0
"""Clocks in which a warp waits for its first inputs and weights."""

BESIDE_LOAD, BESIDE_RESULT, FIXED = 3.0, 4.0, 120.0
"""Instructions: of a load with its mask, of a result's epilogue and store, and of a thread's addresses."""

COPY_SHARE = 0.9
"""Of the datasheet's bandwidth, what a copy reaches."""

_SOFT_MAX = 4.0
"""How sharply the longest of what overlaps decides."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """The knobs of a schedule: rows x tile results of a thread, block_v such tiles by block_c channels of a block."""

    rows: int
    tile: int
    block_v: int
    block_c: int
    parts: int
    num_warps: int

    @property
    def each(self) -> float:
        """Channels of a thread."""
        return self.block_v * self.block_c / (32 * self.num_warps)


def met(problem: Problem, rows: int, tile: int) -> tuple[int, int]:
    """Lines and columns of the source that a thread's tile meets."""
    found = []
    for axis, (size, taps) in enumerate(zip((rows, tile), (problem.r, problem.s), strict=True)):
        reach, step = (taps - 1) * problem.dilation[axis], problem.stride[axis]
        found.append((size - 1 + reach) // step + 1 if problem.scatters else (size - 1) * step + reach + 1)
    return found[0], found[1]


def least_registers(problem: Problem, rows: int, tile: int, each: float) -> float:
    """Registers of a thread that are needed at once: sums, a line of inputs and the weights of its rows."""
    columns = met(problem, rows, tile)[1]
    if problem.result == "w":
        return each * (problem.r * problem.s + rows * tile + columns) + 30
    return each * (rows * tile + columns + problem.s * min(rows, problem.r)) + 30


def used_registers(problem: Problem, tile: Tile) -> float:
    """What the compiler would take if it had them: it loads early, 16-bit inputs in pairs."""
    lines, columns = met(problem, tile.rows, tile.tile)
    early = lines * columns * tile.each * problem.element_bytes / 4
    needed = least_registers(problem, tile.rows, tile.tile, tile.each)
    return max(needed, 0.9 * (needed - columns * tile.each + early))


def _covers(problem: Problem, tile: Tile, axis: int) -> bool:
    """Whether one tile covers the result's axis: products with padding are left out then."""
    if problem.result == "w" or problem.scatters:
        return False
    size = tile.tile if axis else tile.rows
    return size >= problem.out_size[axis] and (axis == 1 or tile.block_v == 1)


def _written(problem: Problem, tile: Tile, axis: int) -> float:
    """Share of a tile's products along an axis for which there is code."""
    if problem.scatters:
        # taps meet results of one class
        return 1 / problem.stride[axis]
    if not _covers(problem, tile, axis):
        return 1.0
    count, inside, taps = problem.out_size[axis], problem.shapes["x"][2 + axis], (problem.r, problem.s)[axis]
    step, pad, apart = problem.stride[axis], problem.padding[axis], problem.dilation[axis]
    found = sum(0 <= at * step + tap * apart - pad < inside for at in range(count) for tap in range(taps))
    return found / ((tile.tile if axis else tile.rows) * taps)


def instructions(problem: Problem, tile: Tile) -> tuple[float, float]:
    """(instructions of a thread for one tile, loads among them)."""
    sides = met(problem, tile.rows, tile.tile)
    lines, columns = (
        min(side, problem.shapes["x"][2 + axis]) if _covers(problem, tile, axis) else side
        for axis, side in enumerate(sides)
    )
    results = tile.rows * tile.tile
    inputs = lines * columns + (results if problem.result == "w" else 0)
    products = results * problem.r * problem.s * tile.each
    products *= _written(problem, tile, 0) * _written(problem, tile, 1)
    loads = inputs * (tile.each + BESIDE_LOAD)
    if problem.result == "w":
        return products + loads, inputs
    weights = problem.r * problem.s
    ends = results * (BESIDE_RESULT + (2 + 6 * len(problem.epilogue)) * tile.each)
    return products + loads + 2 * weights + ends + FIXED, inputs + weights + results


def expected_clocks(problem: Problem, device: DeviceSpec, tile: Tile) -> float:
    """Clocks of a launch, and of the sum over parts of a weight's gradient."""
    walked = problem.out_size if problem.result == "w" else problem.shapes[problem.result][2:]
    channels = problem.k if problem.result == "w" else problem.shapes[problem.result][1]
    blocks = problem.n * math.ceil(walked[1] / tile.tile) * math.ceil(walked[0] / (tile.rows * tile.block_v))
    across = math.ceil(channels / tile.block_c)
    rounds = math.ceil(blocks / tile.parts) if problem.result == "w" else 1
    warps = across * (tile.parts if problem.result == "w" else blocks) * tile.num_warps
    work, loads = instructions(problem, tile)
    resident = min(MOST_WARPS, max(1.0, device.registers / (32 * min(255.0, used_registers(problem, tile)))))
    waves = math.ceil(warps / (device.multiprocessors * resident))
    ends = FIXED + 12 * problem.r * problem.s * tile.each if problem.result == "w" else 0.0
    issued = math.ceil(warps / (device.multiprocessors * SCHEDULERS)) * (work * rounds + ends)
    waiting = waves * (work * rounds + ends + LATENCY * rounds)
    # lines of 128 bytes that a load of a warp touches
    touched = max(1.0, 32 * tile.each / tile.block_c, 32 * tile.each * problem.element_bytes / 128)
    fetched = warps * rounds * loads * touched / device.multiprocessors
    images = sum(math.prod(problem.shapes[n]) * DTYPES[problem.dtypes[n]] / 8 for n in ("x", "out"))
    clocks_a_byte = CLOCKS_US / (device.bandwidth_gbs * 1e3 * COPY_SHARE)
    partial = 8.0 * tile.parts * problem.r * problem.s * channels if tile.parts > 1 else 0.0
    overlapped = sum(part**_SOFT_MAX for part in (issued, waiting, fetched, images * clocks_a_byte))
    return float(overlapped ** (1 / _SOFT_MAX)) + partial * clocks_a_byte
