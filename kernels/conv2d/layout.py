"""How the tensors of a convolution lie in memory: texts such as "nhwc", taken apart and made into strides."""

from __future__ import annotations

import dataclasses
import re

from kernelwright.errors import InvalidWorkload

Sizes = tuple[int, int, int, int]
"""Four sizes or strides, in the order of the tensor's dimensions: N, C, H, W for an image, K, C, R, S for a weight."""

_LAYOUT = re.compile(r"(nhwc|nchw|strided:(\d+),(\d+),(\d+),(\d+))(?:\+(\d+))?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parsed layout: strides in elements, and by how many elements the base misses a multiple of 16 bytes.

    order: "nhwc" (neighbouring channels are neighbours in memory), "nchw" or "strided".
    """

    order: str
    strides: Sizes
    offset: int = 0


def dense_strides(order: str, sizes: Sizes) -> Sizes:
    """Strides of a tensor without gaps, in "nhwc" or "nchw" order; sizes of 0 count as 1."""
    _, channels, height, width = (max(size, 1) for size in sizes)
    if order == "nhwc":
        return (height * width * channels, 1, width * channels, channels)
    return (channels * height * width, height * width, width, 1)


def parse_layout(name: str, text: str, sizes: Sizes) -> Layout:
    """The Layout of a tensor with these sizes from its text; InvalidWorkload when it reads otherwise."""
    match = _LAYOUT.fullmatch(text)
    if not match:
        raise InvalidWorkload(
            f"layout of {name} must be nhwc, nchw or strided:<four strides in elements>, with +<offset> where the base "
            f"misses a multiple of 16 bytes; got {text!r}"
        )
    order, *strides, offset = match.groups()
    if order.startswith("strided"):
        first, second, third, fourth = map(int, strides)
        return Layout("strided", (first, second, third, fourth), int(offset or 0))
    return Layout(order, dense_strides(order, sizes), int(offset or 0))


def overlaps(sizes: Sizes, strides: Sizes) -> bool:
    """Whether two places of such a tensor are one element, or may be."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < reach:
            return True
        if size > 1:
            reach = stride * size
    return False
