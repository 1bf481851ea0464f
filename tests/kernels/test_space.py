"""The three kinds of space keep the contract; constraints say why; matmul's templates have spaces that make sense."""

from __future__ import annotations

import random

import pytest

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import NAMED_DEVICES, named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.space import Constraint, FiniteSpace, Knob, KnobSpace, Space, UnionSpace
from kernelwright.types import FrozenMap, Schedule
from tests.contracts.space_contract import SpaceContract

TILE = Knob("tile", (16, 32, 64), "log2")
STAGES = Knob("stages", (1, 2, 3))
ORDER = Knob("order", ("row", "column", "snake"), "category")
MEMORY = Constraint("memory", lambda k: f"needs {k['tile']} KiB" if int(k["tile"]) * int(k["stages"]) > 128 else None)
PARITY = Constraint("parity", lambda k: "one stage has no order" if k["stages"] == 1 and k["order"] != "row" else None)


def knob_space(template: str = "tiled") -> KnobSpace:
    return KnobSpace(template, [TILE, STAGES, ORDER], [MEMORY, PARITY])


def union_space() -> UnionSpace:
    return UnionSpace([KnobSpace("plain", [TILE, STAGES], []), knob_space()])


def tiled(tile: int, stages: int, order: str) -> Schedule:
    return Schedule("tiled", FrozenMap({"tile": tile, "stages": stages, "order": order}))


class TestKnobSpace(SpaceContract):
    @pytest.fixture
    def space(self) -> Space:
        return knob_space()

    twin = space


class TestUnionSpace(SpaceContract):
    @pytest.fixture
    def space(self) -> Space:
        return union_space()

    twin = space


class TestFiniteSpace(SpaceContract):
    @pytest.fixture
    def space(self) -> Space:
        return FiniteSpace(list(union_space()))

    twin = space


class TestMatmulSpace(SpaceContract):
    @pytest.fixture
    def space(self) -> Space:
        return get_operator("matmul").space(matmul_workload(16, 64, 64, "fp16"), named_device("h100"))

    twin = space


def test_every_broken_constraint_is_named() -> None:
    assert knob_space().why_illegal(tiled(64, 3, "row")) == ("memory: needs 64 KiB",)
    assert knob_space().why_illegal(tiled(16, 1, "snake")) == ("parity: one stage has no order",)
    assert knob_space().why_illegal(tiled(48, 1, "spiral")) == (
        "tile: must be one of 16, 32, 64, got 48",
        "order: must be one of row, column, snake, got spiral",
    )
    assert "knobs: must be tile, stages, order, got tile" in knob_space().why_illegal(
        Schedule("tiled", FrozenMap({"tile": 16}))
    )
    assert union_space().why_illegal(Schedule("other")) == ("template: must be one of plain, tiled, got other",)


def test_members_are_all_that_the_constraints_let_through() -> None:
    assert len(knob_space()) == 3 * 1 + 3 * 3 + 2 * 3
    assert tiled(64, 2, "snake") in set(knob_space())
    assert tiled(64, 3, "row") not in set(knob_space())


def test_neighbours_step_by_one_along_numbers_and_anywhere_among_categories() -> None:
    found = set(knob_space().neighbours(tiled(16, 2, "row")))
    assert found == {
        tiled(32, 2, "row"),
        tiled(16, 1, "row"),
        tiled(16, 3, "row"),
        tiled(16, 2, "column"),
        tiled(16, 2, "snake"),
    }


def test_encoding_follows_the_scale() -> None:
    assert knob_space().encode(tiled(32, 3, "snake")) == {"tile": 5.0, "stages": 3.0, "order": 2.0}


def test_fingerprint_changes_with_what_is_offered() -> None:
    base = knob_space().fingerprint
    assert KnobSpace("tiled", [TILE, STAGES, ORDER], [MEMORY]).fingerprint != base
    assert KnobSpace("tiled", [Knob("tile", (16, 32), "log2"), STAGES, ORDER], [MEMORY, PARITY]).fingerprint != base
    assert knob_space("other").fingerprint != base
    assert FiniteSpace([tiled(16, 1, "row")]).fingerprint == FiniteSpace([tiled(16, 1, "row")] * 2).fingerprint


def test_templates_take_turns_in_a_sample() -> None:
    few = KnobSpace("few", [Knob("x", (1, 2))], [])
    many = KnobSpace("many", [Knob("x", tuple(range(1000)))], [])
    sample = UnionSpace([few, many]).sample(random.Random(0), 10)
    assert [schedule.template for schedule in sample].count("few") == 2
    assert {schedule.template for schedule in sample[:2]} == {"few", "many"}


def test_an_empty_space_is_a_space() -> None:
    never = KnobSpace("never", [TILE], [Constraint("no", lambda knobs: "never")])
    empty = UnionSpace([never])
    assert (len(empty), list(empty), empty.sample(random.Random(0), 3)) == (0, [], [])
    assert UnionSpace([]).why_illegal(Schedule("x")) == ("template: must be one of none, got x",)


@pytest.mark.parametrize("slug", sorted(NAMED_DEVICES))
def test_matmul_can_be_tuned_on_every_named_device(slug: str) -> None:
    device = named_device(slug)
    workload = matmul_workload(64, 64, 64, "fp16")
    operator = get_operator("matmul")
    space = operator.space(workload, device)
    assert space.contains(operator.default_schedule(workload, device))
    templates = {schedule.template for schedule in space}
    assert ("persistent_tma" in templates) == (slug in {"h100", "h100-pcie", "h200", "b200", "rtx5090"})


@pytest.mark.parametrize("slug", ["t4", "l4", "a100", "h100", "mi300x"])
def test_no_legal_schedule_is_estimated_over_the_devices_shared_memory(slug: str) -> None:
    device = named_device(slug)
    workload = matmul_workload(128, 128, 256, "fp16")
    operator = get_operator("matmul")
    space = operator.space(workload, device)
    needed = [operator.templates[s.template].shared_bytes(workload, s) for s in space]
    assert max(needed) <= device.shared_memory_bytes
