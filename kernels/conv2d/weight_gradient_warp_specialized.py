"""Template "weight_gradient_warp_specialized": a loading warp and two multiplying warpgroups, in Gluon; Hopper,
16-bit types, and fp32 as sums of narrow parts; images that are not NHWC are copied."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from kernelwright.kernels.conv2d.layout import Layout
from kernelwright.kernels.conv2d.resident_weights import FEW, packed_channels
from kernelwright.kernels.conv2d.template import (
    LONGEST_SUM,
    ConvTemplate,
    directions,
    gemm_of,
    power_over,
    workspace_of,
)
from kernelwright.kernels.conv2d.tma_operands import splits
from kernelwright.kernels.conv2d.workload import TMA_ALIGNMENT, Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

PANEL = 64
"""16-bit elements of a swizzled line of 128 bytes."""

BARRIERS = 256
"""Bytes of shared memory beside the ring, at most."""

MOST_SPLITS = 1024

MOST_MERGED = 16
"""Groups that become one, at most: of so many, a sixteenth of the products is kept."""

WAVES = (1, 2, 3)
"""How often the parts of all tiles may fill the multiprocessors."""

BETTER_FILLED = 1.1
"""More rounds of parts are offered where they leave fewer multiprocessors idle, by this factor."""

LEAST_WORK = 0.7
"""Tilings of which a smaller share is part of the gradient than of the best one's, times this, are not offered."""

LEAST_USEFUL = 0.85
"""Boxes of which a smaller share lies in the image than of the best ones, times this, are not offered."""

LEAST_SHARE = 0.06
"""Share of the best tiling that must be part of the gradient: half of the columns and an eighth of the rows, say."""

LEAST_INTENSITY = 0.7
"""Tiles that load more for each product than the best ones, divided by this, are not offered."""

PARTS_OF_A_NUMBER = {"bf16x3": 2, "bf16x6": 3}
"""Precisions in which fp32 is multiplied, and of how many bf16 parts they make a number."""

MOST_SUMS, MOST_SUMS_TWICE = 160, 64
"""Sums of a thread that fit its registers, once, and twice: those of parts are added up a second time."""

STAGES = (2, 3, 4, 5, 6, 8)
BLOCKS_K, TILES_H, TILES_W = (32, 64, 128), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS_M, BLOCKS_N, COLUMN_BLOCKS = (64, 128, 256), (64, 128, 256), (1, 2, 3, 4, 5, 6, 8, 10)


def _knobs(given: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    problem = computed_problem(given)
    shapes = itertools.product(BLOCKS_M, BLOCKS_N, COLUMN_BLOCKS)
    fitting = [shape for shape in shapes if _fits(problem, *shape) is None]
    possible = {split for shape in fitting for split in _splits(problem, device, shape)}
    return [
        Knob("block_m", BLOCKS_M, "log2"),
        Knob("block_n", BLOCKS_N, "log2"),
        # column blocks of a tile: block_n input channels of one tap each
        Knob("column_blocks", COLUMN_BLOCKS),
        Knob("block_k", BLOCKS_K, "log2"),
        # rows and columns of a box of pixels; the rest of block_k are images
        Knob("tile_h", TILES_H, "log2"),
        Knob("tile_w", TILES_W, "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", STAGES),
        Knob("split_k", tuple(sorted(possible)), "log2"),
        Knob("combine", ("parts",), "category"),
        # whether images are copied to where the engine can read them: a fact of the problem, not a choice
        Knob("repack", (int(bool(copied_images(problem))),), "category"),
        # groups that become one; 0 lays rows of an image of few channels side by side: facts of the problem, too
        Knob("span", (given.groups // problem.groups if problem.c == given.c else 0,)),
        Knob("precision", _precisions(problem, precisions), "category"),
    ]


def rearranged(problem: Problem) -> bool:
    """Whether this is the gradient of a weight over many pixels of tensors that are first brought into another form:
    reading them element by element takes several times as long."""
    if problem.result != "w" or gemm_of(problem).k < LONGEST_SUM:
        return False
    computed = computed_problem(problem)
    return problem.element_bytes == 4 or (computed.c, computed.groups) != (problem.c, problem.groups)


def _precisions(problem: Problem, precisions: tuple[str, ...]) -> tuple[str, ...]:
    # every budget that fp32 can keep to admits some
    several = tuple(precision for precision in precisions if precision in PARTS_OF_A_NUMBER)
    return several if problem.element_bytes == 4 and several else precisions


def _merged(problem: Problem) -> int:
    """How many small groups become one, of at most PANEL channels on both sides."""
    widest = max(problem.c, problem.k) // problem.groups
    spans = (1 << power for power in range(MOST_MERGED.bit_length()))
    return max(span for span in spans if span == 1 or (problem.groups % span == 0 and span * widest <= PANEL))


def computed_problem(problem: Problem) -> Problem:
    """What the kernel computes: of small groups several as one, of which only each group's own products are kept. Where
    x has few channels, as `packed_image` lays it: rows of x lie beside each other, as many as its stride, and the taps
    of a row are channels of one tap. Other problems as they are."""
    (step, across), (p, q), size = problem.stride, problem.out_size, problem.element_bytes
    if problem.result == "w" and problem.groups > 1 and size == 2:
        return dataclasses.replace(problem, groups=problem.groups // _merged(problem))
    if problem.result != "w" or problem.c > FEW or problem.groups > 1 or problem.dilation != (1, 1) or size != 2:
        return problem
    depth = packed_channels(problem)
    unit, rows, whole = step * depth, math.ceil(problem.r / step), math.lcm(across, TMA_ALIGNMENT // size)
    lines, columns = p + rows - 1, math.ceil(((q - 1) * across + problem.s) / whole) * whole
    strides = (lines * columns * unit, 1, columns * unit, across * unit)
    return dataclasses.replace(
        problem,
        c=problem.s * unit,
        h=lines,
        w=q,
        r=rows,
        s=1,
        stride=(1, 1),
        padding=(0, 0),
        laid_out=(("x", Layout("strided", strides)), ("out", problem.layouts["out"])),
    )


def _shared(problem: Problem, knobs: Knobs) -> int:
    return _step_bytes(knobs) * number(knobs, "num_stages") + BARRIERS


def _step_bytes(knobs: Knobs) -> int:
    """Bytes of a stage of the ring."""
    rows = number(knobs, "block_m") + number(knobs, "block_n") * number(knobs, "column_blocks")
    return 2 * rows * number(knobs, "block_k") * PARTS_OF_A_NUMBER.get(str(knobs["precision"]), 1)


def _fits(problem: Problem, block_m: int, block_n: int, column_blocks: int) -> str | None:
    """Why two warpgroups cannot share such a tile, or not well."""
    most = MOST_SUMS if problem.element_bytes == 2 else MOST_SUMS_TWICE
    if block_m == PANEL and column_blocks % 2:
        return "two warpgroups share out the column blocks of 64 output channels, an even number"
    each = block_m * block_n * column_blocks // 256
    if each > most:
        return f"a thread would hold {each} sums, {most} fit"
    return f"a thread would hold {each} sums: larger tiles exist" if each < 64 and block_m > PANEL else None


def _tiles(problem: Problem, shape: tuple[int, int, int]) -> int:
    block_m, block_n, column_blocks = shape
    columns = problem.r * problem.s * math.ceil(problem.c // problem.groups / block_n)
    return problem.groups * math.ceil(problem.k // problem.groups / block_m) * math.ceil(columns / column_blocks)


def _splits(problem: Problem, device: DeviceSpec, shape: tuple[int, int, int]) -> list[int]:
    """Parts of the sum worth offering for a tile: few that keep all multiprocessors busy, and half as many where the
    parts are larger than the images."""
    tiles, pixels = _tiles(problem, shape), gemm_of(problem).k
    least = math.ceil(pixels / LONGEST_SUM)
    most = max(least, min(MOST_SPLITS, pixels // 128), 1)
    first = math.ceil(least * tiles / device.multiprocessors)
    offered: dict[int, float] = {}
    for waves in WAVES:
        split = min(max((first + waves - 1) * device.multiprocessors // tiles, least, 1), most)
        rounds = math.ceil(split * tiles / device.multiprocessors)
        filled = split * tiles / (rounds * device.multiprocessors)
        if filled >= BETTER_FILLED * max(offered.values(), default=0):
            offered[split] = filled
    fewest = min(offered)
    if fewest // 2 >= least and 4 * fewest * math.prod(problem.shapes["w"]) > _image_bytes(problem):
        offered[fewest // 2] = 0.0
    return sorted(offered)


def _image_bytes(problem: Problem) -> int:
    return sum(math.prod(problem.shapes[name]) * problem.element_bytes for name in problem.operands)


def pixel_grid(problem: Problem) -> tuple[int, int, int]:
    """(images, rows, columns) of pixels that are summed over; one tap's pixels are one long row where memory allows."""
    plain = (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0))
    copied = copied_images(problem)
    # boxes of a row of all pixels would reach from one part of fp32 images into the next
    if plain and problem.element_bytes == 2 and all(name in copied or _even(problem, name) for name in ("x", "out")):
        return 1, 1, gemm_of(problem).k
    return problem.n, *problem.out_size


def _even(problem: Problem, name: str) -> bool:
    """Whether all pixels of an image are evenly spaced in memory."""
    sizes, strides = problem.shapes[name], problem.layouts[name].strides
    kept = [(sizes[place], strides[place]) for place in (0, 2, 3) if sizes[place] > 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(kept))


def _useful(grid: tuple[int, int, int], box: tuple[int, int, int]) -> float:
    """Share of the boxes' pixels that exist."""
    return math.prod(size / (math.ceil(size / block) * block) for size, block in zip(grid, box, strict=True))


@functools.lru_cache(maxsize=512)
def offered_boxes(problem: Problem) -> frozenset[tuple[int, int, int]]:
    """(block_k, rows, columns) of boxes of pixels with few that lie outside, and of as few images as these have."""
    grid, shares = pixel_grid(problem), {}
    for block_k, height, width in itertools.product(BLOCKS_K, TILES_H, TILES_W):
        images = max(1, block_k // (height * width))
        # nor may boxes of several images
        if images * height * width == block_k and (problem.element_bytes == 2 or not problem.n % images):
            shares[images, height, width] = _useful(grid, (images, height, width))
    best = max(shares.values())
    kept = {box: share for box, share in shares.items() if share >= LEAST_USEFUL * best}
    return frozenset(
        (math.prod(box), *box[1:])
        for box, share in kept.items()
        if not any(_preferred(other, box) and kept[other] >= share for other in kept)
    )


def _preferred(other: tuple[int, int, int], box: tuple[int, int, int]) -> bool:
    """Whether a box of as many pixels has fewer images, or is the same with longer rows."""
    fewer = math.prod(other) == math.prod(box) and other[0] < box[0]
    return fewer or (other == (box[0], box[2], box[1]) and other[2] > other[1])


@functools.lru_cache(maxsize=512)
def offered_tiles(problem: Problem) -> frozenset[tuple[int, int, int]]:
    """(block_m, block_n, column_blocks) of tiles of which much is part of the gradient and which load little."""
    useful = _useful_tiles(problem)
    best = max(useful.values())
    kept = [shape for shape, share in useful.items() if share >= LEAST_WORK * best]
    loads = {shape: 1 / shape[0] + 1 / (shape[1] * shape[2]) for shape in kept}
    return frozenset(shape for shape in kept if loads[shape] * LEAST_INTENSITY <= min(loads.values()))


def _useful_tiles(problem: Problem) -> dict[tuple[int, int, int], float]:
    """The share that is part of the gradient of every kind of tile that is not larger than it."""
    gemm, channels = gemm_of(problem), problem.c // problem.groups
    useful = {}
    for shape in itertools.product(BLOCKS_M, BLOCKS_N, COLUMN_BLOCKS):
        needed = shape[0] <= max(PANEL, power_over(gemm.m)) and shape[1] <= max(PANEL, power_over(channels))
        if needed and _fits(problem, *shape) is None:
            useful[shape] = gemm.batch * gemm.m * gemm.n / (_tiles(problem, shape) * math.prod(shape))
    return useful


def _constraints(given: Problem, device: DeviceSpec) -> list[Constraint]:
    problem = computed_problem(given)
    words = _unfit(problem, device)
    if words is not None or problem.result != "w":
        return [directions(problem, "weight_gradient"), Constraint("tma", lambda knobs: words)]
    return [
        _box_constraint(problem),
        *_tile_constraints(problem, device),
        *_sum_constraints(problem, device),
    ]


def _unfit(problem: Problem, device: DeviceSpec) -> str | None:
    if device.architecture != "sm_90":
        return f"is written for sm_90, the device is {device.architecture}"
    if not problem.n:
        return "needs at least one image"
    if problem.element_bytes not in (2, 4):
        return "the tensor cores read turned operands of 16-bit elements only"
    inner, outer = problem.c // problem.groups, problem.k // problem.groups
    if problem.groups > 1 and (inner % 8 or outer % 8):
        return f"needs groups of whole {TMA_ALIGNMENT} bytes of channels, got {inner} and {outer} channels"
    for name, size, axis in (("H", problem.h, 0), ("W", problem.w, 1)):
        if not splits(problem, axis) and -problem.padding[axis] % problem.stride[axis] >= size:
            return f"no tap meets a pixel along {name}"
    if problem.result != "w":
        return None
    share = max(_useful_tiles(problem).values())
    return f"only {share:.1%} of the smallest tiles is part of the gradient" if share < LEAST_SHARE else None


def copied_images(problem: Problem) -> tuple[str, ...]:
    """Images that the engine cannot read as they lie, or not in strides; all that are divided into parts."""
    if problem.element_bytes == 4:
        return "x", "out"
    found = []
    for name in ("x", "out"):
        repeated = problem.n > 1 and not problem.layouts[name].strides[0]
        sizes = problem.shapes[name][2:]
        ragged = name == "x" and any(splits(problem, i) and sizes[i] % problem.stride[i] for i in (0, 1))
        if not problem.aligned(name) or repeated or ragged:
            found.append(name)
    return tuple(found)


def copied_bytes(problem: Problem, parts: int) -> int:
    """Bytes of the copies: channels in whole pieces, rows and columns of x in whole strides, each part of a number."""
    total = 0
    for name in copied_images(problem):
        images, channels, *sizes = problem.shapes[name]
        steps = [problem.stride[i] if name == "x" and splits(problem, i) else 1 for i in (0, 1)]
        room = [math.ceil(size / step) * step for size, step in zip(sizes, steps, strict=True)]
        total += images * math.ceil(channels / 8) * TMA_ALIGNMENT * math.prod(room) * parts
    return total


def _box_constraint(problem: Problem) -> Constraint:
    offered = offered_boxes(problem)

    def box(knobs: Knobs) -> str | None:
        block_k, height, width = (number(knobs, name) for name in ("block_k", "tile_h", "tile_w"))
        if (block_k, height, width) in offered:
            return None
        boxes = ", ".join(f"{h} x {w}" for size, h, w in sorted(offered) if size == block_k)
        return f"rows and columns of {block_k} pixels that fit these images: {boxes or 'none'}"

    return Constraint("box", box)


def _tile_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    offered = offered_tiles(problem)

    def shape(knobs: Knobs) -> str | None:
        words = _fits(problem, *_tile(knobs))
        if words is not None or _tile(knobs) in offered:
            return words
        shapes = "; ".join(f"{m} x {blocks} blocks of {n}" for m, n, blocks in sorted(offered))
        return f"tiles of which most is part of the gradient and which load little: {shapes}"

    def ring(knobs: Knobs) -> str | None:
        step = _step_bytes(knobs)
        steps = math.ceil(gemm_of(problem).k / (number(knobs, "block_k") * number(knobs, "split_k")))
        fitting = [x for x in STAGES if x * step + BARRIERS <= device.shared_memory_bytes and x <= max(steps + 1, 2)]
        if number(knobs, "num_stages") == max(fitting, default=0):
            return None
        return f"the most stages that fit {steps} steps of {step} bytes are {max(fitting, default='none')}"

    return [Constraint("shape", shape), Constraint("pipeline", ring)]


def _tile(knobs: Knobs) -> tuple[int, int, int]:
    return number(knobs, "block_m"), number(knobs, "block_n"), number(knobs, "column_blocks")


def _sum_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def split_k(knobs: Knobs) -> str | None:
        offered = _splits(problem, device, _tile(knobs))
        if number(knobs, "split_k") in offered:
            return None
        return f"tiles of this shape fill the multiprocessors with {', '.join(map(str, offered))} parts"

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        parts = PARTS_OF_A_NUMBER.get(str(knobs["precision"]), 1)
        needed = workspace_of(problem, knobs) + copied_bytes(problem, parts)
        if number(knobs, "span") != 1 and number(knobs, "split_k") == 1:
            needed += 4 * math.prod(problem.shapes["w"])
        if not number(knobs, "span"):
            needed += problem.layouts["x"].strides[0] * problem.n * problem.element_bytes
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [Constraint("split_k", split_k), Constraint("workspace", workspace)]


WEIGHT_GRADIENT_WARP_SPECIALIZED = ConvTemplate(
    "weight_gradient_warp_specialized",
    "kernelwright.kernels.conv2d.weight_gradient_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
