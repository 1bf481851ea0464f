"""How a tensor of an attention lies in memory: the text in a workload, and the strides behind it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from kernelwright.errors import InvalidWorkload

FORMS = ("bhsd", "bshd")
"""Dense memory behind a [B, H, S, D] view, outermost dimension first."""

_TEXT = re.compile(r"(bhsd|bshd|thd|paged|shared|strided:(\d+(?:,\d+)*))(?:\+(\d+))?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """shape and strides (in elements) of the view that kernels get, and by how many elements its base misses an
    alignment of 16 bytes. dense: whether the strides are those of a form without gaps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dense: bool = True

    @property
    def span(self) -> int:
        """Elements from the first to the last one, both counted; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def distinct(self) -> int:
        """Elements that differ in place: a dimension of stride 0 repeats one."""
        count = 1
        for size, stride in zip(self.shape, self.strides, strict=True):
            count *= size if stride or not size else 1
        return count

    def aligned(self, bits: int) -> bool:
        """Whether the last dimension has unit stride, and base and all other strides are multiples of 16 bytes, as the
        bulk copy engine needs them; it repeats no dimension."""
        outer = zip(self.shape[:-1], self.strides[:-1], strict=True)
        whole = all(stride and stride * bits % 128 == 0 for size, stride in outer if size > 1)
        return self.strides[-1] == 1 and self.offset == 0 and whole


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps; order names the dimensions from the outermost to the innermost."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def parse_layout(name: str, text: str, shape: tuple[int, ...], form: str) -> Layout:
    """The Layout of tensor `name` from its text. form: "bhsd" (and "bshd") for four dimensions, "thd" packed, "paged".

    InvalidWorkload for text that reads otherwise, or strides that are not one a dimension.
    """
    match = _TEXT.fullmatch(text)
    wanted = " or ".join(FORMS) if form == "bhsd" else form
    if not match or match[1] == "shared":
        raise InvalidWorkload(
            f"layout of {name} must be {wanted}, or strided:<{len(shape)} strides in elements>, then +<offset> where "
            f"the base is not aligned; got {text!r}"
        )
    kind, offset = match[1], int(match[3] or 0)
    if match[2]:
        strides = tuple(map(int, match[2].split(",")))
        if len(strides) != len(shape):
            raise InvalidWorkload(f"layout of {name} needs {len(shape)} strides, got {len(strides)} in {text!r}")
        return Layout(shape, strides, offset, strides == dense_strides(shape))
    if kind != form and not (form == "bhsd" and kind in FORMS):
        raise InvalidWorkload(f"layout of {name} must be {wanted} or strided here, got {text!r}")
    order = (0, 2, 1, 3) if kind == "bshd" else None
    return Layout(shape, dense_strides(shape, order), offset)
