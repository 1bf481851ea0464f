"""How long a search may go on."""

from __future__ import annotations

import dataclasses

from kernelwright.errors import UsageError

DEFAULT_TRIALS = 64
"""Most trials of a budget that names neither trials nor seconds."""

DEFAULT_GAIN = 0.005
"""Such a budget also ends when the strategy expects no schedule to be faster by more than this share: half the least
noise, because it may be found by any of several."""

LEAST_TRIALS = 24
"""So many trials come before what a strategy expects can end a search."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The most that a search may spend; whichever limit is reached first ends it.

    trials: different schedules tried, those remembered from an earlier run included.
    seconds: wall time of the search, from when its processes are up; the final round comes on top, and so does the wait
    for a first result where none was there by then (at most `session.FIRST_RESULT_S`).
    patience: end when so many trials in a row brought no better time; None never does.
    least_gain: end when no schedule is expected to be faster than the best by more than this share, where the strategy
    can tell; None only does where neither trials nor seconds are named.
    UsageError for a limit that is not above 0.
    """

    trials: int | None = None
    seconds: float | None = None
    patience: int | None = None
    least_gain: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(f"budget {field.name} must be above 0, got {value}; leave it out for no limit")

    @property
    def trial_limit(self) -> int | None:
        """Most trials, DEFAULT_TRIALS where nothing else ends the search; None where only the time does."""
        return DEFAULT_TRIALS if self.trials is None and self.seconds is None else self.trials

    @property
    def least_gain_limit(self) -> float | None:
        """Expected gain under which the search ends, DEFAULT_GAIN where nothing else does before DEFAULT_TRIALS."""
        return (
            DEFAULT_GAIN
            if self.trials is None and self.seconds is None and self.least_gain is None
            else self.least_gain
        )

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
