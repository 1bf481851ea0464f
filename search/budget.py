"""How long a search may go on."""

from __future__ import annotations

import dataclasses

from kernelwright.errors import UsageError

DEFAULT_TRIALS = 64
"""Trials of a budget that names neither trials nor seconds."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most that a search may spend; whichever limit is reached first ends it.

    trials: different schedules tried, those remembered from an earlier run included.
    seconds: wall time of the search, from when its processes are up; the final round comes on top, and so does the wait
    for a first result where none was there by then (at most `session.FIRST_RESULT_S`).
    patience: end when so many trials in a row brought no better time; None never does.
    UsageError for a limit that is not above 0.
    """

    trials: int | None = None
    seconds: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(f"budget {field.name} must be above 0, got {value}; leave it out for no limit")

    @property
    def trial_limit(self) -> int | None:
        """Most trials, DEFAULT_TRIALS where nothing else ends the search; None where only the time does."""
        return DEFAULT_TRIALS if self.trials is None and self.seconds is None else self.trials

    def room(self, trials: int, seconds: float, since_gain: int) -> int | None:
        """How many more trials may be started, 0 when the budget is spent, None for any number.

        trials and seconds: spent so far. since_gain: trials in a row that brought no better time.
        """
        if self.seconds is not None and seconds >= self.seconds:
            return 0
        left = []
        if self.trial_limit is not None:
            left.append(self.trial_limit - trials)
        if self.patience is not None:
            left.append(self.patience - since_gain)
        return max(0, min(left)) if left else None
