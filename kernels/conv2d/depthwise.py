"""Template "depthwise": convolution of each channel by itself, forward, transposed and both gradients; any GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import ConvTemplate, power_over
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, multiplies, number, over
from kernelwright.kernels.precision import own_precision
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_UNROLLED = 160
"""Products of one thread and channel beyond which whole kernels are not unrolled: the compiler takes minutes."""

MOST_IN_ROW = 256
"""The same for one row of taps, which is always unrolled."""

LANES = 32

MOST_PARTS = 512

TILES = (1, 2, 3, 4, 6, 7, 8, 14, 16)
"""Neighbouring results of a thread: those that divide common images, such as 7 and 14, among them."""


def _image_knobs(problem: Problem, precision: tuple[str, ...]) -> list[Knob]:
    packs = (0, 1) if problem.r * problem.s > 1 and _lanes(problem) == "channels" else (0,)
    return [
        Knob("along", ("w", "h"), "category"),
        Knob("tile", tuple(sorted({*TILES, *(problem.stride if problem.scatters else ())}))),
        Knob("block_v", (1, 2, 4, 8, 16, 32, 64, 128), "log2"),
        Knob("block_c", (1, 2, 4, 8, 16, 32, 64, 128, 256), "log2"),
        Knob("num_warps", (1, 2, 4, 8), "log2"),
        Knob("unroll", (0, 1), "category"),
        Knob("pack", packs, "category"),
        Knob("precision", precision, "category"),
    ]


def _weight_knobs(problem: Problem, precision: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("along", ("w", "h"), "category"),
        Knob("tile", (1, 2, 4, 8)),
        Knob("tap_rows", (1, 2, 3, 4, 5, 7)),
        Knob("block_v", (1, 2, 4, 8, 16, 32, 64), "log2"),
        Knob("block_c", (1, 2, 4, 8, 16, 32, 64, 128), "log2"),
        Knob("parts", (1, 8, 32, 128, MOST_PARTS), "log2"),
        Knob("num_warps", (1, 2, 4, 8), "log2"),
        Knob("precision", precision, "category"),
    ]


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    # sums and products are exact to fp32 (int32): the operands' own precision
    own = own_precision(*(problem.dtypes[name] for name in problem.operands))
    precision = tuple(p for p in precisions if p == own)
    return _weight_knobs(problem, precision) if problem.result == "w" else _image_knobs(problem, precision)


def _lanes(problem: Problem) -> str:
    """Along which axis of the operand image neighbouring threads should lie: "channels", or "w"."""
    return "channels" if problem.layouts[problem.operands[0]].strides[1] == 1 else "w"


def _axes(problem: Problem, knobs: Knobs) -> tuple[int, int]:
    """(axis in a thread's registers, the other one); 0 is vertical."""
    return (1, 0) if knobs["along"] == "w" else (0, 1)


def _walked(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the image whose pixels are dealt out to programs."""
    return problem.out_size if problem.result == "w" else problem.shapes[problem.result][2:]


def _rows(problem: Problem, axis: int) -> int:
    """Pixels along an axis that a block may span: where results scatter, those of one class."""
    return math.ceil(_walked(problem)[axis] / (problem.stride[axis] if problem.scatters else 1))


def _channels(problem: Problem) -> int:
    return problem.k if problem.result == "w" else problem.shapes[problem.result][1]


def _each(knobs: Knobs) -> float:
    """Elements of a block that a thread has."""
    return number(knobs, "block_v") * number(knobs, "block_c") / (32 * number(knobs, "num_warps"))


def _shared(problem: Problem, knobs: Knobs) -> int:
    if problem.result == "w":
        return 4 * number(knobs, "num_warps") * number(knobs, "block_c") * 2
    return 64 * 64 * problem.element_bytes if knobs["pack"] else 0


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    taps = (problem.r, problem.s)
    size = _walked(problem)

    def kind(knobs: Knobs) -> str | None:
        if problem.groups != problem.c:
            return f"computes each channel by itself: groups must be C, {problem.c}, got {problem.groups}"
        return multiplies(problem.dtypes[problem.operands[0]], device)

    def lanes(knobs: Knobs) -> str | None:
        block_v, block_c = number(knobs, "block_v"), number(knobs, "block_c")
        if _lanes(problem) == "channels":
            wanted = min(LANES, power_over(_channels(problem)))
            return f"neighbouring channels are read by {block_c} threads, not {wanted}" if block_c < wanted else None
        if knobs["along"] == "w":
            return "threads in a row would read pixels that are not neighbours"
        wanted = min(LANES, power_over(_rows(problem, 1)))
        return f"neighbouring pixels are read by {block_v} threads, not {wanted}" if block_v < wanted else None

    def oversize(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        for name, limit in (("block_v", _rows(problem, across)), ("block_c", _channels(problem))):
            if number(knobs, name) > power_over(limit):
                return f"{name} {knobs[name]} is more than {limit} needs"
        least = problem.stride[along] if problem.scatters else 1
        wasted = number(knobs, "tile") > max(size[along], least)
        return f"a tile of {knobs['tile']} for {size[along]} pixels" if wasted else None

    def registers(knobs: Knobs) -> str | None:
        along, _ = _axes(problem, knobs)
        each, tile = _each(knobs), number(knobs, "tile")
        if each < 1 and number(knobs, "num_warps") > 1:
            return "there are more threads than elements"
        # a weight lives for as many pixels as the tile has
        sums = tile * number(knobs, "tap_rows") * taps[along] if problem.result == "w" else tile
        sums = sums // tile if problem.result == "w" else sums
        window = tile if problem.result == "w" else min(tile, taps[along])
        return over(each, 8, "elements of a thread") or over(each * (sums + window + 1), 160, "registers of a thread")

    special = _weight_constraints if problem.result == "w" else _image_constraints
    return [
        Constraint("kind", kind),
        Constraint("lanes", lanes),
        Constraint("oversize", oversize),
        Constraint("registers", registers),
        *special(problem, device),
    ]


def _image_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    taps, size = (problem.r, problem.s), _walked(problem)

    def classes(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        if not problem.scatters:
            return None
        if number(knobs, "tile") % problem.stride[along]:
            return f"a tile must hold whole strides of {problem.stride[along]}"
        return "rows of taps depend on the pixel's class" if knobs["unroll"] and problem.stride[across] > 1 else None

    def code(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        row = number(knobs, "tile") * taps[along]
        if row > MOST_IN_ROW:
            return f"{row} products of a row of taps take the compiler too long"
        if knobs["unroll"]:
            return (
                "there is nothing to unroll"
                if taps[across] == 1
                else over(row * taps[across], MOST_UNROLLED, "unrolled products")
            )
        return None

    def programs(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        count = (
            problem.n
            * math.ceil(size[along] / number(knobs, "tile"))
            * math.ceil(_channels(problem) / number(knobs, "block_c"))
        )
        count *= math.ceil(size[across] / number(knobs, "block_v"))
        work = number(knobs, "tile") * number(knobs, "block_v") * number(knobs, "block_c")
        return f"{count} programs of {work} results: larger ones exist" if count > 2**16 and work < 2048 else None

    return [Constraint("classes", classes), Constraint("code", code), Constraint("programs", programs)]


def _weight_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    taps, size = (problem.r, problem.s), _walked(problem)

    def code(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        rows = number(knobs, "tap_rows")
        if rows > taps[across]:
            return f"{rows} rows of taps, the kernel has {taps[across]}"
        products = rows * number(knobs, "tile") * taps[along]
        return f"{products} unrolled products take the compiler too long" if products > MOST_IN_ROW else None

    def parts(knobs: Knobs) -> str | None:
        along, across = _axes(problem, knobs)
        items = problem.n * math.ceil(size[along] / number(knobs, "tile"))
        items *= math.ceil(size[across] / number(knobs, "block_v"))
        count, blocks = number(knobs, "parts"), math.ceil(_channels(problem) / number(knobs, "block_c"))
        blocks *= math.ceil(taps[across] / number(knobs, "tap_rows"))
        if count > max(items, 1):
            return f"{count} parts of {items} tiles"
        if count > 1 and blocks * count > 16 * device.multiprocessors:
            return f"{blocks * count} programs fill the device with fewer parts"
        if 2 * blocks * count < device.multiprocessors and 4 * count <= items and count < MOST_PARTS:
            return f"{blocks * count} programs leave most of {device.multiprocessors} multiprocessors idle"
        return None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        needed = 4 * problem.k * problem.r * problem.s * number(knobs, "parts") if number(knobs, "parts") > 1 else 0
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [Constraint("code", code), Constraint("parts", parts), Constraint("workspace", workspace)]


DEPTHWISE = ConvTemplate("depthwise", "kernelwright.kernels.conv2d.depthwise_kernel", _knobs, _constraints, _shared)
"""Bound by the bytes of the images; NHWC with neighbouring channels in neighbouring threads, NCHW with pixels."""
