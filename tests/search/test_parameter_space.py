from __future__ import annotations

import numpy as np
import pytest

from kernelwright.errors import UsageError
from kernelwright.search.coordinates import coordinates
from kernelwright.search.parameter_space import ParameterSpace
from kernelwright.search.restrictions import Restriction
from kernelwright.types import Schedule
from tests.contracts.space_contract import SpaceContract
from tests.search.fakes import fake_space

VALUES = {"x": (16, 32, 64), "y": (1, 2, 4, 8), "mode": (0, 1, 2), "fixed": (7,)}


@pytest.fixture
def made() -> ParameterSpace:
    return ParameterSpace("k", VALUES, ["x * y <= 128", "mode == 0 or x % 32 == 0"])


class TestParameterSpace(SpaceContract):
    @pytest.fixture
    def space(self, made: ParameterSpace) -> ParameterSpace:
        return made

    @pytest.fixture
    def twin(self) -> ParameterSpace:
        return ParameterSpace("k", VALUES, ["x * y <= 128", "mode == 0 or x % 32 == 0"])


def test_holds_what_keeps_every_restriction_and_nothing_else(made: ParameterSpace) -> None:
    for x in VALUES["x"]:
        for y in VALUES["y"]:
            for mode in VALUES["mode"]:
                schedule = Schedule("k", {"x": x, "y": y, "mode": mode, "fixed": 7})  # type: ignore[arg-type]
                assert made.contains(schedule) == (x * y <= 128 and (mode == 0 or x % 32 == 0))


def test_neighbours_differ_in_one_parameter_by_any_amount(made: ParameterSpace) -> None:
    one = Schedule("k", {"x": 16, "y": 1, "mode": 0, "fixed": 7})  # type: ignore[arg-type]
    found = {(s.knobs["x"], s.knobs["y"], s.knobs["mode"]) for s in made.neighbours(one)}
    assert found == {(32, 1, 0), (64, 1, 0), (16, 2, 0), (16, 4, 0), (16, 8, 0)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + b == 5", [False, True]),
        ("1 <= a < 3", [True, True]),
        ("a in (1, 9)", [True, False]),
        ("not a == 1", [False, True]),
        ("max(a, b) == 3", [False, True]),
        ("b % (a - 1) == 0", [False, True]),
        ("a == 1 and (b > 3 or b < 3)", [True, False]),
    ],
)
def test_restrictions_are_read_as_python_reads_them(text: str, expected: list[bool]) -> None:
    columns = {"a": np.array([1, 2]), "b": np.array([2, 3])}
    assert Restriction(text).holds(columns).tolist() == expected


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.real > 0", "c > 1", "[a][0] == 1", "(lambda: 1)() == 1", "a >"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="restriction"):
        Restriction(text).holds({"a": np.array([1])})


def test_products_in_restrictions_become_coordinates(made: ParameterSpace) -> None:
    assert list(made.terms) == ["x * y"]
    plain = ParameterSpace("k", VALUES, (), list(made))
    assert coordinates(made).shape[1] == coordinates(plain).shape[1] + 1


def test_a_divisor_is_read_as_a_quotient() -> None:
    terms = Restriction("a % (b * 2) == 0").terms({"a": np.array([8, 8]), "b": np.array([1, 2])})
    assert terms["a / (b * 2)"].tolist() == [4.0, 2.0]


def test_coordinates_tell_all_members_apart_inside_the_unit_box(made: ParameterSpace) -> None:
    for space in (made, fake_space()):
        points = coordinates(space)
        assert points.min() == 0.0 and points.max() == 1.0
        assert len(np.unique(points, axis=0)) == len(space)


def test_sizes_are_read_by_logarithm_and_by_alignment() -> None:
    space = ParameterSpace("k", {"x": (16, 32, 48, 64)})
    by_log, aligned = coordinates(space).T
    assert by_log.tolist() == pytest.approx([0.0, 0.5, np.log2(3) / 2, 1.0])
    assert aligned.tolist() == pytest.approx([0.0, 0.5, 0.0, 1.0])


def test_a_parameter_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="none for y"):
        ParameterSpace("k", {"x": (1,), "y": ()})
