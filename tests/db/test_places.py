"""Numbers that stand for sizes: boxes hold what lies inside them, and stay few."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.db.places import STEPS, WIDTHS, boxes, place

sizes = st.integers(0, 2**40)


@given(
    dims=st.dictionaries(st.sampled_from("ABCDEFG"), sizes, min_size=1, max_size=7),
    steps=st.lists(st.integers(-300, 300), min_size=7, max_size=7),
)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_box_holds_all_that_is_near(width: int, dims: dict[str, int], steps: list[int]) -> None:
    other = {
        name: max(0, round(size * 2 ** (step / STEPS))) for (name, size), step in zip(dims.items(), steps, strict=False)
    }

    def scaled(size: int) -> int:
        return int(math.log2(max(size, 1)) * STEPS)

    near = all(abs(scaled(dims[name]) - scaled(other[name])) <= width // 2 - 1 for name in dims)
    ranges = boxes(dims, width)
    inside = any(first <= place(other) <= last for first, last in ranges)
    assert inside or not near
    assert len(ranges) <= 2 ** min(5, len(dims)) and all(first <= last < 2**60 for first, last in ranges)
    assert any(first <= place(dims) <= last for first, last in ranges)


def test_a_factor_of_two_is_inside_the_first_box() -> None:
    for m in (1, 3, 64, 100, 4095, 4096):
        for factor in (0.5, 2):
            other = place({"M": int(m * factor) or 1, "N": 128})
            assert any(first <= other <= last for first, last in boxes({"M": m, "N": 128}, WIDTHS[0]))


def test_few_of_far_sizes_are_inside() -> None:
    many = [place({"M": m, "N": n, "K": 4096}) for m in range(1, 4000, 7) for n in (512, 4096, 16384)]
    inside = [p for p in many if any(a <= p <= b for a, b in boxes({"M": 2000, "N": 4096, "K": 4096}, WIDTHS[-1]))]
    assert 0 < len(inside) < 20
