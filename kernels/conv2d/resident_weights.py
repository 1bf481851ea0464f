"""Template "resident_weights": weights stay in shared memory while boxes of pixels pass, in Gluon; Hopper. For grouped
convolutions of small groups (several become one), first layers (few channels) and thin layers with stride 1."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import ConvTemplate, directions, power_over
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

LINE = 64
"""Channels of a swizzled line of 128 bytes: what a step of the sum takes."""

FEW = 4
"""Channels of an image up to which its rows are laid beside each other."""

WIDEST_MERGED = 128
"""Channels of merged groups: with more of them products with zeros take longer than reading the image."""

LEAST_USEFUL = 0.8
"""Tiles of which a smaller share lies inside of the image than that of the best ones, times this, are not offered."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        # groups that become one; 0 lays rows of an image of few channels side by side
        Knob("span", _spans(problem)),
        Knob("tile_h", (4, 8, 16, 32), "log2"),
        Knob("tile_w", (8, 16, 32), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (LINE,), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (2, 3, 4, 6)),
        Knob("subtile", (1, 2, 4), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _spans(problem: Problem) -> tuple[int, ...]:
    if problem.groups == 1:
        return (0,) if problem.c <= FEW else (1,)
    sides = problem.c // problem.groups, problem.k // problem.groups
    fitting = [
        span
        for span in (2**power for power in range(10))
        if problem.groups % span == 0 and span * max(sides) <= max(WIDEST_MERGED, max(sides))
    ]
    return tuple(fitting)


def packed_channels(problem: Problem) -> int:
    """Places for the channels of a pixel of a packed image, as `packed_depth` chooses them."""
    depth = problem.c
    while math.prod(problem.stride) * depth * problem.element_bytes % 16:
        depth += 1
    return depth


def _form(problem: Problem, knobs: Knobs) -> tuple[int, int, int, int, int]:
    """(groups, channels and result channels of a group, rows and columns of taps) of what the kernel computes."""
    span = number(knobs, "span")
    if not span:
        unit = problem.stride[0] * packed_channels(problem)
        return 1, problem.s * unit, problem.k, math.ceil(problem.r / problem.stride[0]), 1
    first, second = (problem.shapes[name][1] * span // problem.groups for name in (problem.operands[0], problem.result))
    return problem.groups // span, first, second, problem.r, problem.s


def _weights(problem: Problem, knobs: Knobs) -> int:
    """Bytes of weights that stand in shared memory."""
    _, channels, _, r, s = _form(problem, knobs)
    return r * s * math.ceil(channels / LINE) * number(knobs, "block_n") * 2 * LINE


def _lines(problem: Problem, knobs: Knobs) -> int:
    """Pixels of a box."""
    r = _form(problem, knobs)[3]
    return (number(knobs, "tile_h") + (power_over(r - 1) if r > 1 else 0)) * number(knobs, "tile_w")


def _shared(problem: Problem, knobs: Knobs) -> int:
    ring = _lines(problem, knobs) * 2 * LINE * number(knobs, "num_stages")
    pixels = number(knobs, "tile_h") * number(knobs, "tile_w")
    out = pixels * number(knobs, "block_n") // number(knobs, "subtile") * DTYPES[problem.dtypes[problem.result]] // 8
    return _weights(problem, knobs) + 2 * (ring + out) + 512


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    out_line = 16 * LINE // DTYPES[problem.dtypes[problem.result]]

    def form(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        return _unfit(problem)

    def channels(knobs: Knobs) -> str | None:
        groups, inner, outer, _, _ = _form(problem, knobs)
        block_n = number(knobs, "block_n")
        if groups > 1 and (inner % LINE or outer % block_n):
            return f"blocks of {LINE} and {block_n} must divide the {inner} and {outer} channels of merged groups"
        return f"block_n {block_n} for {outer} channels" if block_n > max(LINE, power_over(outer)) else None

    def tile(knobs: Knobs) -> str | None:
        height, width, block_n = (number(knobs, name) for name in ("tile_h", "tile_w", "block_n"))
        if height * width < 64:
            return f"a warpgroup multiplies 64 pixels at once, {height} x {width} are fewer"
        each = height * width * block_n // 128
        if each > 128:
            return f"a thread would hold {each} accumulators, 128 fit"
        part = block_n // number(knobs, "subtile")
        return f"a part of {part} columns is less than a line of {2 * LINE} bytes" if part < out_line else None

    def useful(knobs: Knobs) -> str | None:
        share, best = _useful(problem, number(knobs, "tile_h"), number(knobs, "tile_w")), _best_share(problem)
        small = share < LEAST_USEFUL * best
        return f"only {share:.0%} of the tiles' pixels exist, {best:.0%} with others" if small else None

    def ring(knobs: Knobs) -> str | None:
        _, inner, _, _, s = _form(problem, knobs)
        steps, stages = s * math.ceil(inner / LINE), number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps of a tile" if stages > max(2 * steps, 4) else None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        return over(_workspace(problem, knobs), problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        directions(problem, "forward", "input_gradient"),
        Constraint("form", form),
        Constraint("channels", channels),
        Constraint("tile", tile),
        Constraint("useful", useful),
        Constraint("pipeline", ring),
        Constraint("workspace", workspace),
    ]


def _unfit(problem: Problem) -> str | None:
    if problem.dtypes[problem.operands[0]] not in ("fp16", "bf16"):
        return "multiplies 16-bit operands"
    if not problem.n:
        return "needs at least one image"
    if problem.dilation != (1, 1):
        return f"needs taps that are neighbours, got dilation {problem.dilation}"
    if problem.groups == 1 and problem.c <= FEW:
        return "packs the images of a forward convolution only" if problem.direction != "forward" else None
    if problem.groups == problem.c:
        return "channels by themselves need no tensor cores"
    if problem.stride != (1, 1):
        return f"needs stride 1 where an image has more than {FEW} channels, got {problem.stride}"
    image = problem.operands[0]
    if not problem.aligned(image) or (problem.n > 1 and not problem.layouts[image].strides[0]):
        return f"needs {image} with neighbouring channels in memory and strides of whole 16 bytes"
    channels = problem.shapes[image][1]
    return f"needs channels in pieces of 16 bytes, got {channels}" if channels % 8 else None


def _workspace(problem: Problem, knobs: Knobs) -> int:
    """Bytes of the arranged weight, and of a packed image."""
    _, inner, _, r, s = _form(problem, knobs)
    rows = problem.shapes[problem.result][1]
    if number(knobs, "span"):
        return 2 * rows * r * s * inner
    step, across = problem.stride
    (height, columns), whole = problem.out_size, math.lcm(across, 8)
    width = math.ceil(((columns - 1) * across + problem.s) / whole) * whole
    image = problem.n * (height + r - 1) * width * step * packed_channels(problem)
    return 2 * (image + rows * r * math.ceil(inner / LINE) * LINE)


def _useful(problem: Problem, height: int, width: int) -> float:
    """Share of the tiles' pixels that lie in the result."""
    sizes = zip(problem.shapes[problem.result][2:], (height, width), strict=True)
    return math.prod(size / (math.ceil(size / block) * block) for size, block in sizes)


def _best_share(problem: Problem) -> float:
    return max(_useful(problem, h, w) for h in (4, 8, 16, 32) for w in (8, 16, 32) if 64 <= h * w <= 256)


RESIDENT_WEIGHTS = ConvTemplate(
    "resident_weights", "kernelwright.kernels.conv2d.resident_weights_kernel", _knobs, _constraints, _shared
)
"""Bound by the bytes of the images: every pixel is loaded about once for each column of taps."""
