"""Genetic search: children of the fastest schedules so far, crossed knob by knob and changed in places."""

from __future__ import annotations

import math
import random

from kernelwright.kernels.space import Space
from kernelwright.types import Measurement, Schedule

_PARENTS = 20
_TOURNAMENT = 4
_CROSS = 0.7
_ATTEMPTS = 20


class EvolutionarySearch:
    """A steady population: the best PARENTS measured breed, two of one template at a time, each chosen from a few.

    A child that was tried already is changed further in single steps; after too many of them a schedule is drawn at
    random instead.
    """

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._space = space
        self._rng = random.Random(seed)
        self._rest = space.sample(self._rng, len(space))
        self._taken: set[Schedule] = set()
        self._fitness: dict[Schedule, float] = {}

    def propose(self, count: int) -> list[Schedule]:
        """Up to `count` children; the first PARENTS of a search are drawn at random."""
        parents = sorted(self._fitness, key=lambda schedule: (self._fitness[schedule], schedule.key))[:_PARENTS]
        out: list[Schedule] = []
        while len(out) < count:
            schedule = self._child(parents) if len(self._taken) >= _PARENTS and parents else self._any()
            if schedule is None:
                break
            self._taken.add(schedule)
            out.append(schedule)
        return out

    def observe(self, schedule: Schedule, measurement: Measurement) -> None:
        """Take in a result; failures do not breed, and neither do schedules from outside the space."""
        self._taken.add(schedule)
        if measurement.median_us is not None and self._space.contains(schedule):
            self._fitness[schedule] = measurement.median_us

    def _child(self, parents: list[Schedule]) -> Schedule | None:
        child = self._tournament(parents)
        if self._rng.random() < _CROSS:
            child = self._crossed(child, self._tournament([p for p in parents if p.template == child.template]))
        for _ in range(_ATTEMPTS):
            if child not in self._taken:
                return child
            if not (steps := self._space.neighbours(child)):
                break
            child = self._rng.choice(steps)
        return self._any()

    def _tournament(self, parents: list[Schedule]) -> Schedule:
        entrants = self._rng.sample(parents, min(_TOURNAMENT, len(parents)))
        return min(entrants, key=lambda schedule: self._fitness.get(schedule, math.inf))

    def _crossed(self, one: Schedule, other: Schedule) -> Schedule:
        """Knobs of either parent; the first parent where that makes an illegal schedule."""
        knobs = {name: self._rng.choice((one.knobs[name], other.knobs[name])) for name in one.knobs}
        child = Schedule(one.template, knobs)  # type: ignore[arg-type]
        return child if self._space.contains(child) else one

    def _any(self) -> Schedule | None:
        while self._rest:
            schedule = self._rest.pop()
            if schedule not in self._taken:
                return schedule
        return None
