"""Where a workload's sizes lie among those of its family, as one number that an index can hold.

Each size counts on a logarithmic scale, 64 steps to a factor of 2. The bits of the scaled sizes are interleaved (Morton
order), so that all workloads in a box of sizes have numbers in a few ranges, and one ordinary index finds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

STEPS = 64
"""Steps of the scale to a factor of 2."""

WIDTHS = (128, 32, 8, 2)
"""Widths of the boxes that are searched, in steps, each side. The first reaches a factor of 2 up and down at least."""

MAX_DIMS = 5
"""Sizes past these, in the order of their names, do not count: 12 bits each must fit into 63."""

_BITS = 12


def place(dims: Mapping[str, int]) -> int:
    """The number of these sizes, 0 or more and below 2**60."""
    return _interleaved(_scaled(dims), 0)


def boxes(dims: Mapping[str, int], width: int) -> list[tuple[int, int]]:
    """Ranges of numbers, both ends included, that hold every place within half of `width` steps of these sizes.

    width: a power of 2, 2 or more. There are at most 2 ranges a size, multiplied.
    """
    shift = width.bit_length() - 1
    choices = []
    for step in _scaled(dims):
        cell = step >> shift
        other = cell - 1 if step % width < width // 2 else cell + 1
        choices.append(sorted({cell, min(max(other, 0), (1 << (_BITS - shift)) - 1)}))
    span = 1 << (len(choices) * shift)
    starts = sorted(_interleaved(cells, shift) * span for cells in itertools.product(*choices))
    return _joined([(start, start + span - 1) for start in starts])


def _scaled(dims: Mapping[str, int]) -> tuple[int, ...]:
    # A size of 0 has no logarithm; it counts as 1.
    steps = (int(math.log2(max(dims[name], 1)) * STEPS) for name in sorted(dims)[:MAX_DIMS])
    return tuple(min(step, (1 << _BITS) - 1) for step in steps)


def _interleaved(numbers: tuple[int, ...], shift: int) -> int:
    """The bits of the numbers in turns, highest first; each has 12 less `shift`."""
    out = 0
    for bit in range(_BITS - shift - 1, -1, -1):
        for number in numbers:
            out = out << 1 | (number >> bit & 1)
    return out


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, last in ranges:
        if out and out[-1][1] + 1 == first:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    return out
