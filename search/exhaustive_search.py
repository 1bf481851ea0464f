"""The whole space, in its own fixed order: for recording sweeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from kernelwright.kernels.space import Space
from kernelwright.types import Measurement, Schedule


class InOrder:
    """A strategy whose order is known before the first result; subclasses give the order."""

    def __init__(self) -> None:
        self._told: set[Schedule] = set()
        self._rest: Iterator[Schedule] | None = None

    def _order(self) -> Iterable[Schedule]:
        raise NotImplementedError

    def propose(self, count: int) -> list[Schedule]:
        """The next `count` schedules that were not observed already; fewer at the end."""
        if self._rest is None:
            self._rest = iter(self._order())
        fresh = (schedule for schedule in self._rest if schedule not in self._told)
        return list(itertools.islice(fresh, max(0, count)))

    def observe(self, schedule: Schedule, measurement: Measurement) -> None:
        """Remember that the schedule was tried; its time changes nothing."""
        self._told.add(schedule)


class ExhaustiveSearch(InOrder):
    """Every schedule of the space once, in the space's order."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space

    def _order(self) -> Iterable[Schedule]:
        return self._space
