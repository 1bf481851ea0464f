"""What every search strategy must keep; a test class supplies the fixture `make`."""

from __future__ import annotations

from collections.abc import Callable

from kernelwright.kernels.space import FiniteSpace, Space
from kernelwright.search.strategy import Strategy
from kernelwright.types import Measurement, Schedule, Status

MakeStrategy = Callable[[Space, int], Strategy]
Measure = Callable[[Schedule], Measurement]


def drain(strategy: Strategy, measure: Measure, batch: int = 7, limit: int = 10_000) -> list[Schedule]:
    """Every proposal until the strategy runs dry, each observed before the next batch."""
    out: list[Schedule] = []
    while len(out) < limit and (schedules := strategy.propose(batch)):
        for schedule in schedules:
            strategy.observe(schedule, measure(schedule))
        out.extend(schedules)
    return out


class StrategyContract:
    """Subclasses give the fixtures make (space, seed -> strategy), space, and measure (schedule -> measurement)."""

    def test_proposes_the_whole_space_once_then_nothing(
        self, make: MakeStrategy, space: Space, measure: Measure
    ) -> None:
        proposed = drain(make(space, 0), measure)
        assert len(proposed) == len(set(proposed))
        assert set(proposed) == set(space)

    def test_gives_as_many_as_asked_while_there_are_any(self, make: MakeStrategy, space: Space) -> None:
        strategy = make(space, 0)
        assert [len(strategy.propose(count)) for count in (0, 1, 5)] == [0, 1, 5]
        assert len(strategy.propose(len(space))) == len(space) - 6
        assert strategy.propose(4) == []

    def test_never_repeats_without_being_told_results(self, make: MakeStrategy, space: Space) -> None:
        strategy = make(space, 3)
        proposed = [schedule for _ in range(5) for schedule in strategy.propose(6)]
        assert len(set(proposed)) == 30

    def test_leaves_out_what_it_was_told_before(self, make: MakeStrategy, space: Space, measure: Measure) -> None:
        strategy = make(space, 0)
        known = list(space)[::2]
        for schedule in known:
            strategy.observe(schedule, measure(schedule))
        assert set(drain(strategy, measure)) == set(space) - set(known)

    def test_equal_seeds_give_equal_proposals(self, make: MakeStrategy, space: Space, measure: Measure) -> None:
        assert drain(make(space, 5), measure, limit=40) == drain(make(space, 5), measure, limit=40)

    def test_goes_on_when_everything_fails(self, make: MakeStrategy, space: Space) -> None:
        failed = Measurement(Status.BUILD_ERROR, message="no")
        assert set(drain(make(space, 0), lambda schedule: failed)) == set(space)

    def test_takes_results_from_outside_the_space(self, make: MakeStrategy, space: Space, measure: Measure) -> None:
        members = list(space)
        strategy = make(FiniteSpace(members[:10]), 0)
        strategy.observe(members[20], measure(members[20]))
        assert set(drain(strategy, measure)) == set(members[:10])

    def test_an_empty_space_has_nothing_to_propose(self, make: MakeStrategy) -> None:
        assert make(FiniteSpace([]), 0).propose(5) == []
