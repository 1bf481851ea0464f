"""Recording a GPU: which schedules of each workload are measured, workload by workload, within a time limit."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kernelwright.cost_model.model import CostModel
from kernelwright.search.runner import Runner
from kernelwright.search.sweep import sweep, uniform_choice
from kernelwright.types import VENDOR_TEMPLATE, Schedule, Trial, Workload

if TYPE_CHECKING:
    from kernelwright.kernels.build import BuildPool

logger = logging.getLogger(__name__)

DEFAULT_COUNT = 120

FINALS_SECONDS = 10.0
"""Kept free at the end for the final round of the last workload."""

_EXPECTED_PART = 3
_NEAR_PART = 3
_BEST = 3


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A workload to record. count: how many schedules to sample; a third of that many neighbours come on top."""

    workload: Workload
    count: int = DEFAULT_COUNT


@dataclasses.dataclass(frozen=True)
class Limits:
    """When recording ends. end: a reading of `time.monotonic`. workload_seconds: the most that one workload takes."""

    end: float
    workload_seconds: float = 40.0


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What one workload brought. complete: whether the final round ran, so that nothing is left to record."""

    workload: Workload
    trials: tuple[Trial, ...]
    complete: bool
    seconds: float


def is_complete(trials: Sequence[Trial]) -> bool:
    """Whether the trials of a workload include its final round."""
    return any(trial.origin.endswith(":final") for trial in trials)


def sample(wanted: Wanted, runner: Runner, model: CostModel) -> list[Schedule]:
    """The schedules to measure first: a third is what the model expects to be fastest, the rest is uniform."""
    members = list(runner.space(wanted.workload))
    if not members:
        return []
    shares = model.predict(wanted.workload, runner.device, members)
    ranked = sorted(zip(shares.tolist(), members, strict=True), key=lambda pair: (-pair[0], pair[1].key))
    expected = [schedule for _, schedule in ranked[: wanted.count // _EXPECTED_PART]]
    uniform = uniform_choice(wanted.workload, runner, wanted.count)
    return list(dict.fromkeys([*expected, *uniform]))[: wanted.count]


def near_best(workload: Workload, trials: Sequence[Trial], runner: Runner, count: int) -> list[Schedule]:
    """Up to `count` neighbours, not tried yet, of the three best schedules."""
    done = {trial.schedule for trial in trials}
    timed = [
        (trial.measurement.median_us, trial.schedule.key, trial.schedule)
        for trial in trials
        if trial.measurement.median_us is not None and trial.schedule.template != VENDOR_TEMPLATE
    ]
    space = runner.space(workload)
    best = dict.fromkeys(schedule for _, _, schedule in sorted(timed, key=lambda row: row[:2]))
    found: dict[Schedule, None] = {}
    for schedule in list(best)[:_BEST]:
        found.update(dict.fromkeys(s for s in space.neighbours(schedule) if s not in done))
    return list(found)[:count]


def record_workload(
    wanted: Wanted, schedules: Sequence[Schedule], runner: Runner, limits: Limits, known: Sequence[Trial] = ()
) -> list[Trial]:
    """New trials of one workload: the schedules, neighbours of the best, and the final round with the vendor call.

    known: trials of an earlier slice, not measured again. The final round is left out when the end came before all
    schedules were measured, so that the workload is gone on with next time.
    """
    end = limits.end - FINALS_SECONDS
    deadline = min(end, time.monotonic() + limits.workload_seconds)
    done = {trial.schedule for trial in known}
    missing = [schedule for schedule in schedules if schedule not in done]
    trials = list(sweep(wanted.workload, runner, missing, deadline, known=known, finals=False))
    if len(trials) < len(missing) and time.monotonic() >= end:
        return trials
    seen = [*known, *trials]
    near = near_best(wanted.workload, seen, runner, wanted.count // _NEAR_PART)
    return trials + list(sweep(wanted.workload, runner, near, deadline, known=seen))


def record_all(
    work: Sequence[tuple[Wanted, Sequence[Trial]]],
    runner: Runner,
    model: CostModel,
    limits: Limits,
    pool: BuildPool | None = None,
) -> Iterator[Recorded]:
    """Record workloads in order, each yielded once it is done, until the end; those that are not reached are left out.

    work: each workload with the trials that are known of it. pool: compilers that work ahead; None compiles when a
    workload's turn comes.
    """
    chosen = [sample(wanted, runner, model) for wanted, _ in work]
    ahead = None if pool is None else _Ahead([w.workload for w, _ in work], chosen, runner, pool)
    try:
        yield from _in_order(work, chosen, runner, limits, ahead)
    finally:
        if ahead is not None:
            ahead.stop()


def _in_order(
    work: Sequence[tuple[Wanted, Sequence[Trial]]],
    chosen: Sequence[Sequence[Schedule]],
    runner: Runner,
    limits: Limits,
    ahead: _Ahead | None,
) -> Iterator[Recorded]:
    for place, (wanted, known) in enumerate(work):
        if time.monotonic() >= limits.end - FINALS_SECONDS:
            return
        if ahead is not None:
            ahead.wait(place, limits.end - FINALS_SECONDS - time.monotonic())
        began = time.monotonic()
        trials = record_workload(wanted, chosen[place], runner, limits, known)
        complete = is_complete([*known, *trials])
        yield Recorded(wanted.workload, tuple(trials), complete, time.monotonic() - began)


class _Ahead:
    """Compiles the schedules of coming workloads into Triton's cache while earlier ones are measured."""

    def __init__(
        self, workloads: Sequence[Workload], chosen: Sequence[Sequence[Schedule]], runner: Runner, pool: BuildPool
    ) -> None:
        self._work = list(zip(workloads, chosen, strict=True))
        self._runner = runner
        self._pool = pool
        self._ready = [threading.Event() for _ in workloads]
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="compile ahead", daemon=True).start()

    def wait(self, place: int, seconds: float) -> None:
        """Wait until the workload at this place is compiled, at most so many seconds."""
        self._ready[place].wait(max(0.0, seconds))

    def stop(self) -> None:
        """Begin no further workload; compilers that are closed now are no fault."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for (workload, schedules), ready in zip(self._work, self._ready, strict=True):
                if self._stopped.is_set():
                    break
                for _ in self._pool.build_all(workload, schedules, self._runner.device):
                    pass
                ready.set()
        except Exception as error:
            if not self._stopped.is_set():
                logger.warning("compiling ahead ended, each workload compiles when its turn comes: %s", error)
        finally:
            # whatever happened to the compilers, nobody waits for them in vain
            for ready in self._ready:
                ready.set()
