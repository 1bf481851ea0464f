from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.cost_model.model import Scores
from kernelwright.errors import UnknownStrategy
from kernelwright.kernels.space import FiniteSpace, Space
from kernelwright.search.model_guided_search import ModelGuidedSearch
from kernelwright.search.strategy import STRATEGIES, Strategy, make_strategy
from kernelwright.types import DeviceSpec, Schedule, Workload
from tests.contracts.strategy_contract import MakeStrategy, Measure, StrategyContract, drain
from tests.search.fakes import DEVICE, WORKLOAD, HalfRightModel, failure, fake_space, true_us, works


def made(name: str, space: Space, seed: int = 0) -> Strategy:
    return make_strategy(name, WORKLOAD, DEVICE, space, seed, HalfRightModel())


@pytest.fixture
def space() -> Space:
    return fake_space()


@pytest.fixture
def measure() -> Measure:
    return works


class TestModelGuidedSearch(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("model", space, seed)


class TestModelGuidedSearchOverARecording(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("model", space, seed)

    @pytest.fixture
    def space(self) -> Space:
        return FiniteSpace(list(fake_space())[::2])


class TestBayesianSearch(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("bayesian", space, seed)


class TestEvolutionarySearch(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("evolutionary", space, seed)


class TestRandomSearch(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("random", space, seed)


class TestExhaustiveSearch(StrategyContract):
    @pytest.fixture
    def make(self) -> MakeStrategy:
        return lambda space, seed: made("exhaustive", space, seed)


def test_an_unknown_strategy_is_told_the_names() -> None:
    with pytest.raises(UnknownStrategy, match="model, bayesian, evolutionary, random, exhaustive, got 'annealing'"):
        made("annealing", fake_space())


def test_exhaustive_search_keeps_the_order_of_the_space(space: Space) -> None:
    assert drain(made("exhaustive", space), works) == list(space)


@pytest.mark.parametrize("name", ["random", "model"])
def test_seeds_differ(name: str, space: Space) -> None:
    assert drain(made(name, space, 1), works, limit=40) != drain(made(name, space, 2), works, limit=40)


def test_random_search_gives_templates_turns(space: Space) -> None:
    assert {s.template for s in made("random", space).propose(2)} == {"pointer", "skinny"}


def test_the_first_proposal_is_the_predicted_best(space: Space) -> None:
    model = HalfRightModel()
    members = list(space)
    best = members[int(model.predict(WORKLOAD, DEVICE, members).argmax())]
    assert made("model", space, 7).propose(1) == [best]


def test_the_first_batch_spreads_over_templates_and_tiles(space: Space) -> None:
    first = made("model", space).propose(8)
    assert {s.template for s in first} == {"pointer", "skinny"}
    assert len({(s.knobs["block_m"], s.knobs.get("block_n")) for s in first}) >= 4


def test_a_wrong_model_is_corrected_by_what_is_measured(space: Space) -> None:
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, HalfRightModel(flatter=4.0))
    proposed = drain(strategy, works, batch=4, limit=24)
    assert min(map(true_us, proposed)) == 100.0


def test_finds_the_best_sooner_than_random_search(space: Space) -> None:
    def needed(name: str, seed: int) -> int:
        proposed = drain(made(name, space, seed), works, batch=4)
        return next(n for n, s in enumerate(proposed, 1) if true_us(s) <= 105)

    guided, blind = (sum(needed(name, seed) for seed in range(10)) for name in ("model", "random"))
    assert guided * 2 < blind


def test_steers_away_from_failures_before_anything_worked(space: Space) -> None:
    strategy = made("model", space)
    first = strategy.propose(1)[0]
    strategy.observe(first, failure())
    others = strategy.propose(3)
    assert [s.template for s in others].count(first.template) < 3


def test_the_model_is_told_failures_too(space: Space) -> None:
    model = HalfRightModel()
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, model)
    one, two = strategy.propose(2)
    strategy.observe(one, works(one))
    strategy.observe(two, failure())
    strategy.propose(1)
    assert [(t.schedule, t.measurement.ok) for t in model.told] == [(one, True), (two, False)]


def test_the_packaged_model_is_taken_when_none_is_given() -> None:
    common = {"block_k": 64, "num_warps": 8, "num_stages": 3, "group_m": 8, "split_k": 1, "precision": "bf16"}
    tiles = [Schedule("pointer", {"block_m": m, "block_n": m, **common}) for m in (16, 128)]  # type: ignore[arg-type]
    assert make_strategy("model", WORKLOAD, DEVICE, FiniteSpace(tiles)).propose(1) == [tiles[1]]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(STRATEGIES)),
    seed=st.integers(0, 2**31),
    batches=st.lists(st.integers(0, 9), max_size=8),
    broken=st.sets(st.integers(0, 109)),
)
def test_no_repeats_whatever_happens(name: str, seed: int, batches: list[int], broken: set[int]) -> None:
    space = fake_space()
    bad = {schedule for place, schedule in enumerate(space) if place in broken}
    strategy = made(name, space, seed)
    proposed: list[Schedule] = []
    for count in batches:
        for schedule in strategy.propose(count):
            assert space.contains(schedule)
            proposed.append(schedule)
            if len(proposed) % 3:
                strategy.observe(schedule, failure() if schedule in bad else works(schedule))
    assert len(proposed) == len(set(proposed)) == min(sum(batches), len(space))


def test_a_model_that_never_saw_the_operator_tries_every_template_first(space: Space) -> None:
    """However sure it is of one: it may be wrong about all the others."""

    class OneTemplate(HalfRightModel):
        def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
            return np.array([1.0 if s.template == favourite else 1e-3 for s in schedules])

    templates = {schedule.template for schedule in space}
    favourite = min(templates)
    assert len(templates) > 1
    never_measured = dataclasses.replace(WORKLOAD, operator="conv2d")
    strategy = make_strategy("model", never_measured, DEVICE, space, 0, OneTemplate())
    first = strategy.propose(len(templates) + 1)
    assert first[0].template == favourite
    assert {schedule.template for schedule in first[: len(templates)]} == templates
    measured_before = make_strategy("model", WORKLOAD, DEVICE, space, 0, OneTemplate())
    assert {schedule.template for schedule in measured_before.propose(len(templates))} == {favourite}


def test_half_of_the_first_batch_is_of_templates_that_a_trained_model_never_saw(space: Space) -> None:
    class Trained(HalfRightModel):
        def __init__(self, *templates: str) -> None:
            super().__init__()
            self.metadata = {"templates": list(templates)}

        def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
            return np.array([1.0 if s.template == "pointer" else 1e-3 for s in schedules])

    def first_batch(*templates: str, count: int = 8) -> list[str]:
        strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, Trained(*templates))
        return [schedule.template for schedule in strategy.propose(count)]

    assert first_batch("pointer", "skinny") == ["pointer"] * 8, "it saw all"
    assert first_batch() == ["pointer"] * 8, "an older model does not tell what it saw"
    assert first_batch("pointer") == ["pointer", *["skinny"] * 4, *["pointer"] * 3]
    assert first_batch("pointer", count=1) == ["pointer"]
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, Trained("pointer"))
    fresh = [s for s in strategy.propose(8) if s.template == "skinny"]
    assert len({s.knobs["block_m"] for s in fresh}) > 1, "they are unlike each other"
    for schedule in fresh:
        strategy.observe(schedule, failure())
    assert {s.template for s in strategy.propose(4)} != {"skinny"}, "only the first batch"
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, Trained("pointer"))
    twice = [schedule.template for _ in range(2) for schedule in strategy.propose(8)]
    assert twice.count("skinny") == 4, "only the first batch, also when the second is asked for before any result"


@pytest.mark.parametrize("size", [1, 2])
def test_templates_have_their_turn_once_however_many_batches_they_take(space: Space, size: int) -> None:
    never_measured = dataclasses.replace(WORKLOAD, operator="conv2d")
    strategy = make_strategy("model", never_measured, DEVICE, space, 0, HalfRightModel())
    count = len({schedule.template for schedule in space})
    asked = [schedule for _ in range(count) for schedule in strategy.propose(size)]
    assert len({schedule.template for schedule in asked[:count]}) == count
    assert len(set(asked)) == len(asked)


def test_the_gain_to_expect_shrinks_as_the_best_is_found(space: Space) -> None:
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, HalfRightModel())
    assert isinstance(strategy, ModelGuidedSearch) and math.isinf(strategy.expected_gain())
    expected, found, best = [], [], min(map(true_us, space))
    while batch := strategy.propose(8):
        for schedule in batch:
            strategy.observe(schedule, works(schedule))
            found.append(true_us(schedule))
        expected.append((strategy.expected_gain(), min(found) / best - 1))
    assert expected[0][0] > 0.005 and expected[-1] == (0.0, 0.0)
    stopped = next(missed for gain, missed in expected if gain < 0.005)
    assert stopped < 0.02
    assert all(gain >= 0.0 for gain, _ in expected)


def test_nothing_is_expected_while_nothing_worked(space: Space) -> None:
    strategy = make_strategy("model", WORKLOAD, DEVICE, space, 0, HalfRightModel())
    assert isinstance(strategy, ModelGuidedSearch)
    for schedule in strategy.propose(8):
        strategy.observe(schedule, failure())
    assert math.isinf(strategy.expected_gain())
