"""Search that knows nothing in advance: a surrogate learned from this search's own measurements says where to look.

After a few schedules at random, each further one is where a faster time is most to be expected: a Gaussian process over
the logarithm of the time tells what is likely everywhere and how sure that is, and another one tells where schedules
fail. Now and then the choice is held to one step from the best: where times jump, the process takes the last few per
cent for noise. And now and then it counts uncertainty for much more than it is, to leave a valley that is not the best.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kernelwright.kernels.space import Space
from kernelwright.search.coordinates import coordinates
from kernelwright.search.surrogate import MOST_PENDING, Surrogate
from kernelwright.types import Measurement, Schedule

FIRST = 10
"""How many schedules are drawn at random before the surrogate is asked."""


_CURIOSITY = (1.25, 1.25, 1.25, 1.25, 1.25, 4.0, 1.25, 1.25)
_STEP_EVERY = 4
_STEP_FROM = 5


class BayesianSearch:
    """Proposes where the expected improvement over the best time so far is largest, times the chance to work at all."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        self._space = space
        self._members = list(space)
        self._place = {schedule: place for place, schedule in enumerate(self._members)}
        self._rng = np.random.default_rng(seed)
        self._open = np.ones(len(self._members), dtype=np.bool_)
        self._times: dict[int, float] = {}
        self._surrogate = Surrogate(coordinates(space), self._rng)
        self._turn = 0

    def propose(self, count: int) -> list[Schedule]:
        """Up to `count` schedules, each chosen as if the ones before it had turned out as expected."""
        count = min(count, int(self._open.sum()))
        if count <= 0:
            return []
        room = count if all(map(math.isinf, self._times.values())) else max(0, FIRST - self._closed())
        chosen = [self._take(self._any_open()) for _ in range(min(count, room))]
        if len(chosen) < count:
            chosen += self._guided(count - len(chosen))
        return [self._members[place] for place in chosen]

    def observe(self, schedule: Schedule, measurement: Measurement) -> None:
        """Take in a time or a failure; schedules outside the space are passed over."""
        place = self._place.get(schedule)
        if place is not None:
            self._open[place] = False
            self._times[place] = math.inf if measurement.median_us is None else math.log(measurement.median_us)

    def _guided(self, count: int) -> list[int]:
        self._surrogate.learn(self._times)
        chosen: list[int] = []
        for _ in range(count):
            self._turn += 1
            merit = self._surrogate.merit(_CURIOSITY[self._turn % len(_CURIOSITY)])
            allowed = self._open[self._surrogate.pool]
            if self._turn % _STEP_EVERY == 0 and (near := allowed & self._near_the_best()).any():
                allowed = near
            at = int(np.argmax(np.where(allowed, merit, -np.inf)))
            # The candidates drawn from a large space can run out before the space does.
            chosen.append(self._take(int(self._surrogate.pool[at]) if allowed[at] else self._any_open()))
            if len(chosen) < min(count, MOST_PENDING) and allowed[at]:
                self._surrogate.expect(at)
        self._surrogate.settle()
        return chosen

    def _near_the_best(self) -> npt.NDArray[np.bool_]:
        """Which of the candidates are one step from the fastest schedule that has such a one left, of the few best."""
        for place in sorted(self._times, key=lambda place: self._times[place])[:_STEP_FROM]:
            steps = [self._place[step] for step in self._space.neighbours(self._members[place])]
            if any(self._open[step] for step in steps):
                return np.isin(self._surrogate.pool, steps)
        return np.zeros(len(self._surrogate.pool), dtype=np.bool_)

    def _any_open(self) -> int:
        return int(self._rng.choice(np.flatnonzero(self._open)))

    def _take(self, place: int) -> int:
        self._open[place] = False
        return place

    def _closed(self) -> int:
        return len(self._members) - int(self._open.sum())
