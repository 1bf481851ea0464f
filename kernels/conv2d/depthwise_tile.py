"""Template "depthwise_tile": each channel by itself, a rectangle of results in each thread's registers, so that an
input is loaded once for all that it meets; NHWC, every direction, any GPU."""

from __future__ import annotations

import dataclasses
import functools
import math

from kernelwright.kernels.conv2d.depthwise_time import Tile, expected_clocks, used_registers
from kernelwright.kernels.conv2d.template import ConvTemplate, power_over
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, multiplies, number, over
from kernelwright.kernels.precision import own_precision
from kernelwright.kernels.space import Constraint, Knob, KnobSpace
from kernelwright.types import DeviceSpec

MOST_TAPS = 128

MOST_UNROLLED = 1400
"""Products of one thread and channel, all written out, beyond which the compiler takes too long."""

MOST_PRODUCTS = 2800
"""The same for all channels of a thread."""

MOST_REGISTERS = 255

SLOWEST = 1.25
"""How many times the least expected time a schedule may be expected to take: of so many schedules that differ little,
only those near the best are worth a compiler's seconds."""

SIDES = (1, 2, 4, 7, 8, 14)
"""Rows and columns of a thread's tile: those that divide common images, such as 7 and 14, among them."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    own = own_precision(*(problem.dtypes[name] for name in problem.operands))
    return [
        Knob("rows", _sides(problem, 0)),
        Knob("tile", _sides(problem, 1)),
        Knob("block_v", (1, 2, 4, 8), "log2"),
        Knob("block_c", (16, 32, 64, 128), "log2"),
        Knob("parts", (1, 8, 16, 32, 64, 128, 256) if problem.result == "w" else (1,), "log2"),
        Knob("num_warps", (1, 2, 4), "log2"),
        Knob("precision", tuple(p for p in precisions if p == own), "category"),
    ]


def _sides(problem: Problem, axis: int) -> tuple[int, ...]:
    step = problem.stride[axis] if problem.scatters else 1
    return tuple(sorted({*SIDES, step, 2 * step}))


def _walked(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the image that is cut into tiles."""
    return problem.out_size if problem.result == "w" else problem.shapes[problem.result][2:]


def _channels(problem: Problem) -> int:
    return problem.k if problem.result == "w" else problem.shapes[problem.result][1]


def _shared(problem: Problem, knobs: Knobs) -> int:
    # the blocks of a weight's sums meet in shared memory
    return 8 * number(knobs, "num_warps") * number(knobs, "block_c")


def _legal(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    size = _walked(problem)

    def kind(knobs: Knobs) -> str | None:
        if problem.groups != problem.c or problem.groups == 1:
            return f"computes each channel by itself: groups must be C, {problem.c}, got {problem.groups}"
        if problem.c != problem.k and problem.scatters:
            return "adds up no channels: the result must have as many as the operand"
        if problem.r * problem.s > MOST_TAPS:
            return f"writes out all taps, at most {MOST_TAPS}, got {problem.r * problem.s}"
        image = problem.operands[0]
        if problem.layouts[image].strides[1] != 1:
            return f"needs {image} with neighbouring channels in memory"
        return multiplies(problem.dtypes[image], device)

    def classes(knobs: Knobs) -> str | None:
        whole = number(knobs, "rows") % problem.stride[0] or number(knobs, "tile") % problem.stride[1]
        return f"a tile must hold whole strides of {problem.stride}" if problem.scatters and whole else None

    def oversize(knobs: Knobs) -> str | None:
        least = problem.stride if problem.scatters else (1, 1)
        rows, tile, block_v = (number(knobs, name) for name in ("rows", "tile", "block_v"))
        if tile > max(size[1], least[1]) or (block_v - 1) * rows >= size[0] or rows > max(size[0], least[0]):
            return f"tiles of {rows} x {tile}, {block_v} of them, for an image of {size[0]} x {size[1]}"
        block_c = number(knobs, "block_c")
        wide = block_c > max(32, power_over(_channels(problem)))
        return f"block_c {block_c} for {_channels(problem)} channels" if wide else None

    def registers(knobs: Knobs) -> str | None:
        each = number(knobs, "block_v") * number(knobs, "block_c") / (32 * number(knobs, "num_warps"))
        if each < 1:
            return "there are more threads than elements"
        words = used_registers(problem, _tile(knobs))
        return over(each, 4, "channels of a thread") or over(words, MOST_REGISTERS, "registers of a thread")

    return [
        Constraint("kind", kind),
        Constraint("classes", classes),
        Constraint("oversize", oversize),
        Constraint("registers", registers),
        *_work_constraints(problem, device),
    ]


def _clocks(problem: Problem, device: DeviceSpec, knobs: Knobs) -> float:
    """Clocks that a schedule is expected to take."""
    return expected_clocks(problem, device, _tile(knobs))


def _tile(knobs: Knobs) -> Tile:
    return Tile(*(number(knobs, field.name) for field in dataclasses.fields(Tile)))


@functools.lru_cache(maxsize=256)
def _least(problem: Problem, device: DeviceSpec) -> float:
    """Least clocks that any schedule within the other constraints is expected to take."""
    own = own_precision(*(problem.dtypes[name] for name in problem.operands))
    space = KnobSpace("depthwise_tile", _knobs(problem, device, (own,)), _legal(problem, device))
    return min((_clocks(problem, device, schedule.knobs) for schedule in space), default=0.0)


def _work_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    size = _walked(problem)

    def code(knobs: Knobs) -> str | None:
        classes = math.prod(problem.stride) if problem.scatters else 1
        products = number(knobs, "rows") * number(knobs, "tile") * problem.r * problem.s // classes
        each = number(knobs, "block_v") * number(knobs, "block_c") / (32 * number(knobs, "num_warps"))
        return over(products, MOST_UNROLLED, "unrolled products") or over(
            products * each, MOST_PRODUCTS, "products of a thread"
        )

    def blocks(knobs: Knobs) -> tuple[int, int]:
        """(blocks of channels, blocks of pixels)."""
        rows = number(knobs, "rows") * number(knobs, "block_v")
        pixels = problem.n * math.ceil(size[0] / rows) * math.ceil(size[1] / number(knobs, "tile"))
        return math.ceil(_channels(problem) / number(knobs, "block_c")), pixels

    def parts(knobs: Knobs) -> str | None:
        count = number(knobs, "parts")
        if count == 1:
            return None
        channels, pixels = blocks(knobs)
        if count > pixels:
            return f"{count} parts of {pixels} blocks"
        many = channels * count > 16 * device.multiprocessors
        return f"{channels * count} programs fill the device with fewer parts" if many else None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        # partial sums, or the weight in the type of sums
        copies = number(knobs, "parts") if problem.result != "w" or number(knobs, "parts") > 1 else 0
        needed = 4 * math.prod(problem.shapes["w"]) * copies
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        Constraint("code", code),
        Constraint("parts", parts),
        Constraint("workspace", workspace),
    ]


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def time(knobs: Knobs) -> str | None:
        needed, least = _clocks(problem, device, knobs), _least(problem, device)
        slow = needed > SLOWEST * least
        return f"about {needed:.0f} clocks, where {least:.0f} would do" if slow else None

    return [*_legal(problem, device), Constraint("time", time)]


DEPTHWISE_TILE = ConvTemplate(
    "depthwise_tile", "kernelwright.kernels.conv2d.depthwise_tile_kernel", _knobs, _constraints, _shared
)
"""Bound by multiply-adds for large kernels, by the bytes of the images for small ones."""
