"""One search: propose, measure, hand out each trial, and at the end time the finalists beside the vendor library."""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from kernelwright.errors import NoWorkingSchedule, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.operator import roofline_us
from kernelwright.kernels.steps import step
from kernelwright.search.budget import LEAST_TRIALS, Budget
from kernelwright.search.runner import Finals, RecordedCode, Runner, TakesMore
from kernelwright.search.strategy import ExpectsGain, Strategy
from kernelwright.types import DeviceSpec, Measurement, Schedule, Trial, TuningRecord, Workload

FINALISTS = 3
TIE_BAND = 0.05
"""Schedules slower than the best by more than this share are no finalists, and noise is never taken to be larger."""

FIRST_RESULT_S = 90.0
"""So much longer may a search of a few seconds go on until one schedule has worked: processes start, operands are made
and kernels are built before anything is measured, and a search without any result is of no use."""

_LEAST_BATCH = 4
_ROUNDS = 2
_SINGLE_FINALS = 8


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a search is. best_us: best median so far, None while nothing worked. seconds: since it began."""

    trials: int
    budget_trials: int | None
    best_us: float | None
    seconds: float


class Session:
    """Iterate over it to search; it yields each Trial as it is measured, for the caller to store at once.

    Then `record` holds the outcome. A bad schedule is a Trial like any other. known: trials of an earlier run; those
    of this very workload, device, toolchain and kernel source are taken in first, are not measured again, and count.
    batch: most schedules measured between two proposals, and most that wait where the runner takes more all the time; a
    small budget makes it smaller, so that strategies can learn.
    """

    def __init__(
        self,
        workload: Workload,
        runner: Runner,
        strategy: Strategy,
        budget: Budget,
        *,
        origin: str = "tune",
        known: Sequence[Trial] = (),
        batch: int = 16,
        patient: bool = True,
    ) -> None:
        self._patient = patient
        self._workload = workload
        self._runner = runner
        self._strategy = strategy
        self._budget = budget
        self._origin = origin
        self._batch = _batch_size(batch, budget.trial_limit)
        self._space = runner.space(workload)
        self._fingerprints = _fingerprints(runner, workload)
        self._known = [trial for trial in known if self._applies(trial)]
        self._measured: dict[Schedule, Measurement] = {}
        self._best_us = math.inf
        self._told = _Told()
        self._more: list[Schedule] = []
        self._began: float | None = None
        self._stopped = False
        self._record: TuningRecord | None = None
        self._ended = False
        self._trials = self._search()

    def __iter__(self) -> Iterator[Trial]:
        """The trials not yielded yet; a loop that was left goes on where it was."""
        return self._trials

    def stop(self) -> None:
        """Go to the final round after the present trial."""
        self._stopped = True

    def progress(self) -> Progress:
        """How far the search is, at any time."""
        best = None if math.isinf(self._best_us) else self._best_us
        return Progress(len(self._measured), self._budget.trial_limit, best, self._seconds())

    @property
    def record(self) -> TuningRecord:
        """The outcome, once the iteration ended; NoWorkingSchedule when every schedule failed."""
        if self._record is not None:
            return self._record
        if not self._ended:
            raise UsageError("the record is made at the end of the search; iterate over the session first")
        raise NoWorkingSchedule(self._why_nothing())

    def _search(self) -> Iterator[Trial]:
        self._began = time.monotonic()
        deadline = None if self._budget.seconds is None else self._began + self._budget.seconds
        for trial in self._known:
            self._note(trial.schedule, trial.measurement)
        while schedules := self._next_batch():
            patient = None if deadline is None else deadline + self._late_s
            fed = patient == deadline and isinstance(self._runner, TakesMore)
            for schedule, measurement in self._measure(schedules, patient, fed):
                self._note(schedule, measurement, fed)
                yield self._trial(schedule, measurement)
                if self._stopped or (deadline is not None and self._worked and time.monotonic() >= deadline):
                    break
            self._told.give_up_waiting(self._strategy)
            self._more = []
        yield from self._final_rounds()
        self._ended = True

    def _measure(
        self, schedules: list[Schedule], deadline: float | None, fed: bool
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """fed: the runner takes more while it measures, and gets them as soon as half a batch is done."""
        if fed and isinstance(self._runner, TakesMore):
            return self._runner.measure_fed(self._workload, schedules, deadline, self._feed)
        return self._runner.measure(self._workload, schedules, deadline)

    def _feed(self) -> list[Schedule]:
        more, self._more = self._more, []
        return more

    @property
    def _worked(self) -> bool:
        return math.isfinite(self._best_us)

    @property
    def _late_s(self) -> float:
        """How far past its seconds it may go on as things are."""
        return 0.0 if self._worked or not self._patient else FIRST_RESULT_S

    def _next_batch(self) -> list[Schedule]:
        """What to measure next beside those that the strategy has not heard of yet."""
        waiting = len(self._told.waiting)
        seconds = self._seconds()
        if self._budget.seconds is not None and seconds < self._budget.seconds + self._late_s:
            seconds = 0.0
        room = self._budget.room(self._told.count + waiting, seconds, self._told.since_gain + waiting)
        if self._stopped or room == 0 or self._expects_too_little():
            return []
        most = self._batch - waiting
        count = most if room is None else min(room, most)
        with step(f"propose {count}"):
            proposed = self._strategy.propose(count)
        self._told.waiting.extend(proposed)
        return proposed

    def _expects_too_little(self) -> bool:
        limit = self._budget.least_gain_limit
        if limit is None or self._told.count < LEAST_TRIALS or not isinstance(self._strategy, ExpectsGain):
            return False
        return self._strategy.expected_gain() < limit

    def _note(self, schedule: Schedule, measurement: Measurement, fed: bool = False) -> None:
        before = self._measured.get(schedule)
        if before is None or before.ok:
            self._measured[schedule] = measurement
        self._best_us = min(self._best_us, _time(measurement))
        for _ in self._told.tell(self._strategy, schedule, measurement):
            if fed and len(self._told.waiting) == self._batch // 2:
                self._more += self._next_batch()

    def _final_rounds(self) -> Iterator[Trial]:
        """Rounds until one has a finalist that works again; schedules that fail now are yielded as failed trials."""
        for schedules in self._groups():
            finals = self._runner.finals(self._workload, schedules)
            worked = [(s, self._completed(s, m)) for s, m in finals.measurements if m.ok]
            # One bad schedule can take a whole round down, so a round that failed as one proves nothing.
            if worked or len(schedules) == 1:
                for schedule, measurement in finals.measurements:
                    if not measurement.ok:
                        self._measured[schedule] = measurement
                        yield self._trial(schedule, measurement)
            if worked:
                self._record = self._crown(worked, finals)
                return

    def _groups(self) -> Iterator[list[Schedule]]:
        ranking = self._ranking()
        if not ranking:
            return
        limit = self._time_of(ranking[0]) * (1 + TIE_BAND)
        first = [schedule for schedule in ranking[:FINALISTS] if self._time_of(schedule) <= limit]
        yield first
        yield from ([schedule] for schedule in ranking[:_SINGLE_FINALS] if first != [schedule])

    def _crown(self, worked: Sequence[tuple[Schedule, Measurement]], finals: Finals) -> TuningRecord:
        schedule, measurement = _winner(worked, finals.noise)
        runner_up, runner_up_us = self._runner_up(schedule, worked)
        return TuningRecord(
            workload=self._workload,
            device=self._runner.device,
            toolchain=self._runner.toolchain,
            schedule=schedule,
            measurement=measurement,
            template_fingerprint=self._fingerprints.get(schedule.template, ""),
            origin=self._origin,
            created_at=_now(),
            vendor=finals.vendor,
            vendor_us=finals.vendor_us,
            noise=finals.noise,
            aa_ratio=finals.aa_ratio,
            runner_up=runner_up,
            runner_up_us=runner_up_us,
            roofline=_roofline(self._workload, self._runner.device, measurement),
            trials=len(self._measured),
            space_fingerprint=self._space.fingerprint,
        )

    def _runner_up(
        self, winner: Schedule, worked: Sequence[tuple[Schedule, Measurement]]
    ) -> tuple[Schedule | None, float | None]:
        """The second best of the final round or, when it had only one, of the search."""
        timed = [(m.median_us, s) for s, m in worked if s != winner and m.median_us is not None]
        if not timed:
            timed = [(self._time_of(s), s) for s in self._ranking() if s != winner]
        time_us, schedule = min(timed, key=lambda pair: (pair[0], pair[1].key), default=(None, None))
        return schedule, time_us

    def _ranking(self) -> list[Schedule]:
        worked = [schedule for schedule, measurement in self._measured.items() if measurement.ok]
        return sorted(worked, key=lambda schedule: (self._time_of(schedule), schedule.key))

    def _time_of(self, schedule: Schedule) -> float:
        return _time(self._measured[schedule])

    def _completed(self, schedule: Schedule, final: Measurement) -> Measurement:
        """The final's measurement with what only the compiler told in the search."""
        seen = self._measured[schedule]
        names = ("error", "registers", "spills", "shared_bytes", "compile_s")
        missing = {name: getattr(seen, name) for name in names if getattr(final, name) is None}
        return dataclasses.replace(final, **missing)

    def _applies(self, trial: Trial) -> bool:
        return (
            trial.workload == self._workload
            and trial.device.key == self._runner.device.key
            and trial.toolchain == self._runner.toolchain
            and trial.template_fingerprint == self._fingerprints.get(trial.schedule.template)
            and self._space.contains(trial.schedule)
        )

    def _trial(self, schedule: Schedule, measurement: Measurement) -> Trial:
        return Trial(
            self._workload,
            self._runner.device,
            self._runner.toolchain,
            schedule,
            measurement,
            self._origin,
            self._fingerprints.get(schedule.template, ""),
            _now(),
        )

    def _seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _why_nothing(self) -> str:
        what = f"{self._workload} on {self._runner.device.name}"
        if not len(self._space):
            return f"no schedule of {what} is legal; the vendor library has to do it"
        if not self._measured:
            return f"nothing was measured for {what} before the budget ran out; allow more seconds"
        counts = Counter(measurement.status.value for measurement in self._measured.values())
        listed = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        message = next((m.message for m in self._measured.values() if m.message), "no message")
        return f"all {len(self._measured)} schedules tried for {what} failed ({listed}); one said: {message}"


class _Told:
    """Tells a strategy of measurements in the order in which it proposed the schedules: what it proposes next depends
    on them and its seed, not on which compiler was done first.

    waiting: proposed, not told yet. count: measurements told. since_gain: the last of them that brought no better time.
    """

    def __init__(self) -> None:
        self.waiting: deque[Schedule] = deque()
        self.count = self.since_gain = 0
        self._ahead: dict[Schedule, Measurement] = {}
        self._best_us = math.inf

    def tell(self, strategy: Strategy, schedule: Schedule, measurement: Measurement) -> Iterator[Schedule]:
        """Take in a measurement; what can be told then is told, and yielded, one by one."""
        if schedule not in self.waiting:
            self._tell(strategy, schedule, measurement)
            yield schedule
            return
        self._ahead[schedule] = measurement
        while self.waiting and self.waiting[0] in self._ahead:
            first = self.waiting.popleft()
            self._tell(strategy, first, self._ahead.pop(first))
            yield first

    def give_up_waiting(self, strategy: Strategy) -> None:
        """Tell what is there: nothing else comes of what was proposed."""
        while self.waiting:
            first = self.waiting.popleft()
            if first in self._ahead:
                self._tell(strategy, first, self._ahead.pop(first))

    def _tell(self, strategy: Strategy, schedule: Schedule, measurement: Measurement) -> None:
        strategy.observe(schedule, measurement)
        self.count += 1
        self.since_gain = 0 if _time(measurement) < self._best_us else self.since_gain + 1
        self._best_us = min(self._best_us, _time(measurement))


def _batch_size(batch: int, trials: int | None) -> int:
    if batch < 1:
        raise UsageError(f"batch must be 1 or more, got {batch}")
    return batch if trials is None else min(batch, max(_LEAST_BATCH, trials // _ROUNDS))


def _fingerprints(runner: Runner, workload: Workload) -> Mapping[str, str]:
    if isinstance(runner, RecordedCode):
        return runner.fingerprints(workload)
    return {name: template.fingerprint for name, template in get_operator(workload.operator).templates.items()}


def _winner(worked: Sequence[tuple[Schedule, Measurement]], noise: float) -> tuple[Schedule, Measurement]:
    """The fastest; of those that the noise cannot tell from it, the one that asks least of the GPU, so that two runs
    of one search choose the same."""
    limit = min(_time(measurement) for _, measurement in worked) * (1 + min(noise, TIE_BAND))
    tied = [(schedule, measurement) for schedule, measurement in worked if _time(measurement) <= limit]
    return min(tied, key=lambda pair: (pair[1].shared_bytes or 0, pair[1].registers or 0, pair[0].key))


def _time(measurement: Measurement) -> float:
    return math.inf if measurement.median_us is None else measurement.median_us


def _roofline(workload: Workload, device: DeviceSpec, measurement: Measurement) -> float | None:
    """Least possible time over the measured one; None on a device that has no rate for the workload's precisions."""
    try:
        return roofline_us(get_operator(workload.operator), workload, device) / _time(measurement)
    except UsageError:
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
