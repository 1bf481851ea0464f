"""The figures behind the plots: plain numbers from trials and records."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from kernelwright.errors import KernelwrightError
from kernelwright.kernels import get_operator
from kernelwright.types import VENDOR_TEMPLATE, DeviceSpec, Schedule, Status, Trial, TuningRecord, Workload

FINAL = ":final"
"""Origins of trials that repeat a finalist beside the vendor call end in this; they are no part of the search."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A schedule with its time in microseconds and its relative error."""

    schedule: Schedule
    time_us: float
    error: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The search after `number` trials: the time that this one took, None for a failure, and the best so far."""

    number: int
    time_us: float | None
    best_us: float | None


@dataclasses.dataclass(frozen=True)
class RooflinePoint:
    """A record in the roofline plot. intensity: flops a byte; tflops: reached by our kernel and by the vendor call."""

    record: TuningRecord
    intensity: float
    tflops: float
    vendor_tflops: float | None


def of_search(trials: Iterable[Trial]) -> list[Trial]:
    """The trials of our own schedules that a search made, in their order."""
    return [t for t in trials if t.schedule.template != VENDOR_TEMPLATE and not t.origin.endswith(FINAL)]


def tried(trials: Iterable[Trial]) -> list[Tried]:
    """Of each schedule that worked, its fastest trial with a known error."""
    best: dict[Schedule, Tried] = {}
    for trial in trials:
        seen = trial.measurement
        if seen.median_us is not None and seen.error is not None:
            known = best.get(trial.schedule)
            if known is None or seen.median_us < known.time_us:
                best[trial.schedule] = Tried(trial.schedule, seen.median_us, seen.error)
    return list(best.values())


def pareto_front(points: Iterable[Tried]) -> list[Tried]:
    """Those that no other one beats in both time and error, fastest first."""
    front: list[Tried] = []
    for point in sorted(points, key=lambda point: (point.time_us, point.error)):
        if not front or point.error < front[-1].error:
            front.append(point)
    return front


def convergence(trials: Sequence[Trial]) -> list[Step]:
    """Best time so far after each trial."""
    steps: list[Step] = []
    best: float | None = None
    for number, trial in enumerate(trials, 1):
        time_us = trial.measurement.median_us
        if time_us is not None:
            best = time_us if best is None else min(best, time_us)
        steps.append(Step(number, time_us, best))
    return steps


def by_status(trials: Iterable[Trial]) -> list[tuple[str, int]]:
    """How many trials ended in each way, all ways named."""
    counts = Counter(trial.measurement.status for trial in trials)
    return [(status.value, counts[status]) for status in Status]


def roofline_points(records: Iterable[TuningRecord]) -> list[RooflinePoint]:
    """Of each workload its newest record; those of operators that are not known here are left out."""
    newest: dict[Workload, TuningRecord] = {}
    for record in records:
        newest.setdefault(record.workload, record)
    return [point for record in newest.values() if (point := _roofline_point(record)) is not None]


def roofs(device: DeviceSpec, records: Iterable[TuningRecord]) -> list[tuple[str, float]]:
    """The peak rates (TFLOP/s) of the precisions that the records may compute in, highest first, equal ones once."""
    rates: dict[float, list[str]] = {}
    for precision in sorted({name for record in records for name in _precisions(record)}):
        if precision in device.peak_tflops:
            rates.setdefault(device.peak_tflops[precision], []).append(precision)
    return [("/".join(names), rate) for rate, names in sorted(rates.items(), reverse=True)]


def _precisions(record: TuningRecord) -> tuple[str, ...]:
    try:
        return get_operator(record.workload.operator).compute_precisions(record.workload)
    except KernelwrightError:
        return ()


def _roofline_point(record: TuningRecord) -> RooflinePoint | None:
    time_us = record.measurement.median_us
    try:
        work = get_operator(record.workload.operator).work(record.workload)
    except KernelwrightError:
        return None
    if not time_us or not work.bytes or not work.flops:
        return None
    vendor = work.flops / record.vendor_us / 1e6 if record.vendor_us else None
    return RooflinePoint(record, work.flops / work.bytes, work.flops / time_us / 1e6, vendor)
