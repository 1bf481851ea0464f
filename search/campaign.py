"""One budget for many workloads: which to tune next, how long, and when it is not worth it any more.

A workload's expected saving is its calls times its present time (the faster of our best and the vendor call) times the
share of it that more search should take off. Before the first trials that share is a prior: what tuned kernels won over
the vendor library elsewhere, and what the cost model's first choice is expected to lose. Afterwards it shrinks with the
trials that were made, and follows what the last round brought. Kernels that are behind the vendor call save nothing
until they pass it. What saves most a second goes first, but nothing gets a second round before all that are worth it
had one: the first few trials bring most, and what they bring is known least before.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence

from kernelwright.errors import UsageError
from kernelwright.search.recording_files import entries_of, parse_wanted
from kernelwright.types import Workload

FIRST_ROUND = 8
"""Trials of a workload's first round; each further round doubles what was tried."""

HALF_LIFE = 16.0
"""Trials after which half of what is to be gained has been."""

PRIOR_GAIN = 0.08
"""Share of a vendor call's time that a tuned kernel saves where nothing else is known."""

LEAST_GAIN = 0.002
"""Share that a search may always turn out to save, so that heavy workloads are not given up too early."""

_FOLLOWED = 0.5
_SECONDS_A_TRIAL = 0.15
_SECONDS_A_ROUND = 2.0


@dataclasses.dataclass(frozen=True)
class Share:
    """A workload and how much it matters. calls: how often a step of the model runs it."""

    workload: Workload
    calls: float = 1.0

    def __post_init__(self) -> None:
        if not (self.calls > 0 and math.isfinite(self.calls)):
            raise UsageError(f"calls of {self.workload} must be above 0, got {self.calls}")


def parse_shares(text: str) -> list[Share]:
    """Workloads and their calls from what `recording_files.parse_wanted` reads, where an entry may say {"calls": ...};
    the calls of equal workloads add up. UsageError tells which entry cannot be read."""
    calls: dict[Workload, float] = {}
    for number, entry in enumerate(entries_of(text), 1):
        (wanted,) = parse_wanted(json.dumps([entry]))
        said = entry.get("calls", 1) if "workload" in entry else 1
        if isinstance(said, bool) or not isinstance(said, int | float):
            raise UsageError(f"calls of workload {number} must be a number, got {said!r}")
        calls[wanted.workload] = calls.get(wanted.workload, 0) + said
    if not calls:
        raise UsageError("there must be at least one workload to tune, got none")
    return [Share(workload, count) for workload, count in calls.items()]


@dataclasses.dataclass(frozen=True)
class Round:
    """What a workload's tuning has come to. trials: all so far. best_us: ours, None while nothing works. vendor_us: the
    library's, None where there is none. seconds: what this round took, 0 for what was known before."""

    trials: int
    best_us: float | None
    vendor_us: float | None
    seconds: float = 0.0


@dataclasses.dataclass
class Standing:
    """One workload in a campaign. expected_us: time by the analytic model, before anything is measured. regret: share
    that the cost model's first choice is expected to lose. most: trials that its space allows."""

    share: Share
    expected_us: float
    regret: float = 0.1
    most: int | None = None
    trials: int = 0
    best_us: float | None = None
    vendor_us: float | None = None
    last_gain: float | None = None
    seconds: float = 0.0
    new_trials: int = 0
    failure: str = ""

    @property
    def started_us(self) -> float:
        """One call before tuning: the vendor's time, or the expected one."""
        return self.vendor_us or self.expected_us

    @property
    def now_us(self) -> float:
        """One call as it is now: the faster of ours and the vendor's."""
        return min(self.best_us or math.inf, self.vendor_us or math.inf, self.started_us)

    @property
    def saved_us(self) -> float:
        """What all calls of a step save already."""
        return self.share.calls * (self.started_us - self.now_us)

    def next_trials(self) -> int:
        """Trials in all that the next round goes up to."""
        wanted = max(FIRST_ROUND, 2 * self.trials)
        return wanted if self.most is None else min(wanted, self.most)

    def expected_saving_us(self) -> float:
        """What the next round should save of a step, in microseconds; 0 when there is nothing more to try."""
        to_come = self.next_trials()
        if self.failure or to_come <= self.trials:
            return 0.0
        ours = self.best_us or self.started_us
        left = self._left()
        reached = 1 - _remaining(to_come) / _remaining(self.trials)
        mean = left * reached
        behind = max(0.0, 1 - self.now_us / ours)
        # With a gain spread exponentially around its mean, this is what is expected beyond the point behind.
        return self.share.calls * ours * mean * math.exp(-behind / mean)

    def _left(self) -> float:
        prior = (PRIOR_GAIN + self.regret) if not self.trials else self.regret * _remaining(self.trials)
        return max(LEAST_GAIN, prior, _FOLLOWED * (self.last_gain or 0.0))

    def take(self, outcome: Round) -> None:
        """Take in a round."""
        before = self.now_us if self.trials else None
        self.new_trials += max(0, outcome.trials - self.trials) if outcome.seconds else 0
        self.trials, self.seconds = outcome.trials, self.seconds + outcome.seconds
        self.best_us, self.vendor_us = outcome.best_us, outcome.vendor_us or self.vendor_us
        if before is not None:
            self.last_gain = max(0.0, 1 - self.now_us / before)


class Campaign:
    """Hands out rounds; not safe for several threads at once.

    worth: end when a minute of one device is expected to save less than this share of the whole time of a step; 0 goes
    on as long as there are schedules to try.
    """

    def __init__(self, standings: Sequence[Standing], worth: float = 0.0001) -> None:
        if worth < 0:
            raise UsageError(f"worth must be 0 or more, got {worth}")
        self.standings = list(standings)
        self._worth = worth

    def next(self, busy: Collection[Standing] = ()) -> Standing | None:
        """The workload whose next round saves most a second, of those that are not being tuned now, and of those that
        were never tuned if there are any; None when none is worth it."""
        least = self._worth * self.total_us() / 60
        free = [standing for standing in self.standings if not any(standing is one for one in busy)]
        worth = [standing for standing in free if self.rate(standing) > 0 and self.rate(standing) >= least]
        return max([one for one in worth if not one.trials] or worth, key=self.rate, default=None)

    def rate(self, standing: Standing) -> float:
        """Microseconds of a step that a second of tuning this workload should save."""
        saving = standing.expected_saving_us()
        return saving and saving / self._seconds_of(standing)

    def total_us(self) -> float:
        """A step's time in all these workloads, as it is now."""
        return sum(standing.share.calls * standing.now_us for standing in self.standings)

    def started_us(self) -> float:
        """A step's time in all these workloads with the vendor library alone."""
        return sum(standing.share.calls * standing.started_us for standing in self.standings)

    def _seconds_of(self, standing: Standing) -> float:
        known = [s for s in ([standing] if standing.new_trials else self.standings) if s.new_trials]
        trials = standing.next_trials() - standing.trials
        if not known:
            return _SECONDS_A_ROUND + _SECONDS_A_TRIAL * trials
        return trials * sum(s.seconds for s in known) / sum(s.new_trials for s in known)


def _remaining(trials: int) -> float:
    """Share of what there is to gain that is left after so many trials."""
    return 1 / (1 + trials / HALF_LIFE)
