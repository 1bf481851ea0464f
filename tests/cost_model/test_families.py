from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from kernelwright.cost_model.families import distance, family
from kernelwright.types import FrozenMap, Workload

Make = Callable[..., Workload]


def test_a_family_shares_its_weights(make_matmul: Make) -> None:
    one = make_matmul(16, 4096, 1024)
    assert family(one) == family(make_matmul(8192, 4096, 1024))
    assert family(one) == family(make_matmul(16, 4096, 1024, epilogue=("bias",), layouts={"a": "row", "b": "row"}))
    assert len({family(one), family(make_matmul(16, 1024, 4096)), family(make_matmul(16, 4096, 1025))}) == 3
    assert family(one) != family(dataclasses.replace(one, operator="other"))


def test_distance_counts_octaves_fields_and_alignment(make_matmul: Make) -> None:
    one = make_matmul(1024, 4096, 1024)
    assert distance(one, one) == 0
    assert distance(one, make_matmul(2048, 4096, 1024)) == pytest.approx(1, abs=0.01)
    assert distance(one, make_matmul(1024, 4096, 1024, epilogue=("bias",))) == 1
    assert distance(one, make_matmul(1024, 4096, 1023)) == pytest.approx(1, abs=0.01)
    assert distance(one, make_matmul(2048, 2048, 1024)) == pytest.approx(math.sqrt(2), abs=0.01)
    assert distance(one, dataclasses.replace(one, operator="other")) == math.inf


def test_distance_is_symmetric_and_takes_empty_dimensions(make_matmul: Make) -> None:
    one, other = make_matmul(0, 7, 64, epilogue=("relu",)), make_matmul(9, 8, 1)
    assert distance(one, other) == distance(other, one) > 0
    fewer = dataclasses.replace(other, dims=FrozenMap({"M": 9}))
    assert math.isfinite(distance(other, fewer))
