"""Leaving out whole branches early changes neither the members of a space nor their order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.space import Constraint, Knob, KnobSpace
from kernelwright.types import Scalar, Schedule

KNOBS = [Knob("x", (1, 2, 3)), Knob("y", (0, 4)), Knob("name", ("p", "q"), "category"), Knob("z", (5, 6, 7))]


def product(space: KnobSpace) -> tuple[Schedule, ...]:
    """The members by the definition: every combination, checked whole."""
    combinations = itertools.product(*(knob.values for knob in space.knobs.values()))
    all_knobs = [dict(zip(space.knobs, values, strict=True)) for values in combinations]
    legal = [k for k in all_knobs if all(c.check(k) is None for c in space.constraints)]
    return tuple(Schedule(space.template, knobs) for knobs in legal)  # type: ignore[arg-type]


def short_circuit(knobs: Mapping[str, Scalar]) -> str | None:
    return "y 4 needs a small z" if knobs["y"] == 4 and int(knobs["z"]) > 5 else None


def reads_backwards(knobs: Mapping[str, Scalar]) -> str | None:
    return "z 7 goes with x 1" if knobs["z"] == 7 and knobs["x"] != 1 else None


def reads_all(knobs: Mapping[str, Scalar]) -> str | None:
    return "too much" if sum(v for v in knobs.values() if isinstance(v, int)) > 11 else None


def copies(knobs: Mapping[str, Scalar]) -> str | None:
    return "q is for odd x" if {**knobs, "w": 1}["name"] == "q" and dict(knobs)["x"] == 2 else None


def asks_for_more(knobs: Mapping[str, Scalar]) -> str | None:
    return "no" if knobs.get("w", 3) != 3 or "w" in knobs or "x" not in knobs or len(knobs) != 4 else None


def gets(knobs: Mapping[str, Scalar]) -> str | None:
    return "p and 6" if knobs.get("name") == "p" and knobs.get("z") == 6 else None


CHECKS = [short_circuit, reads_backwards, reads_all, copies, asks_for_more, gets, lambda k: "never", lambda k: None]


@given(st.lists(st.sampled_from(CHECKS), max_size=5), st.permutations(KNOBS))
@settings(max_examples=60, deadline=None)
def test_members_are_the_legal_part_of_the_product(checks: list, knobs: list[Knob]) -> None:  # type: ignore[type-arg]
    space = KnobSpace("t", knobs, [Constraint(f"c{place}", check) for place, check in enumerate(checks)])
    assert space.members == product(space)


def test_no_knobs_make_one_schedule() -> None:
    assert KnobSpace("t", [], []).members == (Schedule("t"),)
    assert KnobSpace("t", [], [Constraint("c", lambda knobs: "never")]).members == ()


@pytest.mark.parametrize("hardware", ["h100", "mi300x"])
def test_matmul_templates(hardware: str) -> None:
    for template in get_operator("matmul").templates.values():
        space = template.space(matmul_workload(16, 1024, 1000), named_device(hardware))
        assert isinstance(space, KnobSpace)
        assert space.members == product(space)


def test_a_knob_that_no_space_has_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="typo"):
        _ = KnobSpace("t", KNOBS, [Constraint("c", lambda knobs: str(knobs["typo"]))]).members


def test_a_branch_is_given_up_at_once() -> None:
    asked: list[Scalar] = []

    def check(knobs: Mapping[str, Scalar]) -> str | None:
        asked.append(knobs["x"])
        return "illegal" if knobs["x"] == 1 else None

    members = KnobSpace("t", KNOBS, [Constraint("c", check)]).members
    assert asked == [1, 2, 3] and len(members) == 2 * 2 * 2 * 3
