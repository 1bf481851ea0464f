"""Searches that hand out more while they measure, and those that end because no gain is expected."""

from __future__ import annotations

import math
import random
import time

import pytest

from kernelwright.search.budget import Budget
from kernelwright.search.random_search import RandomSearch
from kernelwright.search.session import Session
from kernelwright.types import Measurement, Schedule
from tests.search.fakes import WORKLOAD, FakeRunner, fake_space
from tests.search.test_session import session


class FedRunner(FakeRunner):
    """Takes more all the time, and is done with what waits in an order drawn from `finishing`: 0 for the order in which
    it was asked. given: everything that it was asked for, in order; asked: how much at a time."""

    def __init__(self, seconds_each: float = 0.0, finishing: int = 0) -> None:
        super().__init__(seconds_each=seconds_each)
        self.asked: list[int] = []
        self.given: list[Schedule] = []
        self.most = 0
        self._draw = random.Random(finishing).randrange if finishing else lambda _: 0

    def measure_fed(self, workload, schedules, deadline, feed):  # type: ignore[no-untyped-def]
        waiting: list[Schedule] = []
        more = schedules
        while waiting or more:
            self.asked += [len(more)] if more else []
            self.given += more
            waiting += more
            self.most = max(self.most, len(waiting))
            yield from self.measure(workload, [waiting.pop(self._draw(len(waiting)))], deadline)
            more = feed()


@pytest.mark.parametrize("strategy", ["model", "bayesian", "evolutionary", "random"])
@pytest.mark.parametrize("budget", [Budget(trials=48), Budget(), Budget(trials=90, patience=20)])
def test_the_same_seed_proposes_the_same_whichever_compiler_is_faster(strategy: str, budget: Budget) -> None:
    def proposals(finishing: int) -> list[Schedule]:
        runner = FedRunner(finishing=finishing)
        trials = list(session(runner, budget, strategy))
        assert len(trials) == len(runner.given)
        return runner.given

    first = proposals(0)
    assert len(first) >= 20
    assert all(proposals(finishing) == first for finishing in (1, 2, 3))


def test_a_runner_that_takes_more_gets_it_when_half_of_a_batch_is_done() -> None:
    runner = FedRunner()
    trials = list(session(runner, Budget(trials=16)))
    assert runner.asked == [8, 4, 4] and runner.most == 8
    assert len({trial.schedule for trial in trials}) == 16
    runner = FedRunner()
    list(session(runner, Budget(), "random"))
    assert runner.asked == [16, *[8] * 6] and runner.most == 16 and len(runner.measured) == 64


@pytest.mark.parametrize("runner", [FakeRunner, FedRunner])
@pytest.mark.parametrize(
    ("budget", "enough", "tried"),
    [
        (Budget(), 30, 32),
        (Budget(), 1, 24),
        (Budget(), 200, 64),
        (Budget(trials=40), 30, 40),
        (Budget(trials=60, least_gain=0.5), 30, 32),
        (Budget(least_gain=0.0001), 30, 64),
    ],
)
def test_a_search_ends_when_no_gain_is_expected(
    runner: type[FakeRunner], budget: Budget, enough: int, tried: int
) -> None:
    """`enough`: trials after which a strategy expects a thousandth."""

    class Knowing(RandomSearch):
        seen = 0

        def observe(self, schedule: Schedule, measurement: Measurement) -> None:
            self.seen += 1

        def expected_gain(self) -> float:
            return 0.001 if self.seen >= enough else 1.0

    here = runner()
    search = Session(WORKLOAD, here, Knowing(here.space(WORKLOAD), 0), budget, batch=8)
    assert abs(len(list(search)) - tried) <= (0 if runner is FakeRunner else 6)
    assert search.record.schedule


def test_what_waits_counts_for_patience() -> None:
    runner = FedRunner()
    search = session(runner, Budget(trials=110, patience=12), "exhaustive")
    since = 0
    best = math.inf
    for trial in search:
        time_us = trial.measurement.median_us or math.inf
        since, best = (0, time_us) if time_us < best else (since + 1, best)
    assert since == 12


def test_a_search_by_time_is_fed_once_something_worked_and_ends_in_time() -> None:
    runner = FedRunner(seconds_each=0.02)
    begin = time.monotonic()
    list(session(runner, Budget(seconds=1.0)))
    assert time.monotonic() - begin >= 1.0
    # the whole space takes more than twice as long
    assert runner.asked[:2] == [16, 8] and 24 < len(runner.measured) < len(list(fake_space()))


def test_a_runner_that_takes_more_is_told_to_stop() -> None:
    runner = FedRunner()
    search = session(runner, Budget(trials=64))
    for number, _ in enumerate(search, 1):
        if number == 20:
            search.stop()
    assert len(runner.measured) == 20 and search.record.trials == 20
