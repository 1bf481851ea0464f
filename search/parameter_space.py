"""Spaces of anybody's kernels: parameters, their values, and restrictions as text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.errors import UsageError
from kernelwright.kernels.space import FiniteSpace
from kernelwright.search.restrictions import Restriction
from kernelwright.types import Scalar, Schedule

_SLICE = 1 << 18


class ParameterSpace(FiniteSpace):
    """The combinations of values that keep every restriction, as schedules of one template.

    members: given where they are known already, such as from a recording; otherwise they are worked out. UsageError
    when a restriction cannot be read, or speaks of something that is no parameter.
    """

    def __init__(
        self,
        template: str,
        values: Mapping[str, Sequence[Scalar]],
        restrictions: Sequence[str] = (),
        members: Sequence[Schedule] | None = None,
    ) -> None:
        if empty := [name for name, choices in values.items() if not choices]:
            raise UsageError(f"every parameter needs at least one value, got none for {', '.join(empty)}")
        self.template = template
        self.values = {name: tuple(choices) for name, choices in values.items()}
        self.restrictions = tuple(Restriction(text) for text in restrictions)
        super().__init__(self._enumerate() if members is None else members)

    def neighbours(self, schedule: Schedule) -> list[Schedule]:
        """The legal schedules with another value of one parameter, near or far."""
        steps = (
            Schedule(self.template, {**schedule.knobs, name: value})  # type: ignore[arg-type]
            for name, choices in self.values.items()
            for value in choices
            if value != schedule.knobs[name]
        )
        return [step for step in steps if self.contains(step)]

    @functools.cached_property
    def terms(self) -> dict[str, npt.NDArray[np.float64]]:
        """What the restrictions compute from two parameters or more, by its text, for each member."""
        columns = self._constants()
        for name in self.values:
            if name not in columns:
                columns[name] = np.array([schedule.knobs[name] for schedule in self.members])
        found: dict[str, npt.NDArray[np.float64]] = {}
        for restriction in self.restrictions:
            found.update(restriction.terms(columns))
        return found

    def _constants(self) -> dict[str, Any]:
        return {name: np.asarray(choices[0]) for name, choices in self.values.items() if len(choices) == 1}

    def _enumerate(self) -> list[Schedule]:
        members: list[Schedule] = []
        combinations = itertools.product(*self.values.values())
        while block := list(itertools.islice(combinations, _SLICE)):
            columns = dict(zip(self.values, map(np.array, zip(*block, strict=True)), strict=True))
            legal = np.ones(len(block), dtype=np.bool_)
            for restriction in self.restrictions:
                legal &= restriction.holds(columns)
            kept = itertools.compress(block, legal.tolist())
            members += [Schedule(self.template, dict(zip(self.values, row, strict=True))) for row in kept]  # type: ignore[arg-type]
        return members
