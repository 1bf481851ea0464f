"""Recording a workload: many schedules measured once, then the best and the vendor call in turns."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from kernelwright.kernels import get_operator
from kernelwright.search.runner import RecordedCode, Runner
from kernelwright.types import VENDOR_TEMPLATE, Measurement, Schedule, Status, Trial, Workload, digest

FINALISTS = 5


def uniform_choice(workload: Workload, runner: Runner, count: int, salt: str = "") -> list[Schedule]:
    """Up to `count` schedules of the runner's space, templates in equal shares.

    The choice is by the digest of the schedule itself, so that workloads which share a template also share their
    schedules, and each kernel is compiled once for all of them.
    """
    by_template: dict[str, list[Schedule]] = {}
    for schedule in runner.space(workload):
        by_template.setdefault(schedule.template, []).append(schedule)
    queues = [sorted(members, key=lambda s: digest([salt, s.key])) for members in by_template.values()]
    chosen: list[Schedule] = []
    while queues and len(chosen) < count:
        chosen.extend(queue.pop(0) for queue in queues[: count - len(chosen)])
        queues = [queue for queue in queues if queue]
    return chosen


def sweep(
    workload: Workload,
    runner: Runner,
    schedules: Sequence[Schedule],
    deadline: float | None = None,
    *,
    known: Sequence[Trial] = (),
    finals: bool = True,
) -> Iterator[Trial]:
    """Trials of the schedules as they are measured, then of the FINALISTS best and of the vendor call, timed in turns.

    deadline: a reading of `time.monotonic` after which no further schedule is measured; the finals still run.
    known: earlier trials of this workload that may become finalists too. finals: whether to run them.
    """
    timed = {t.schedule: t.measurement.median_us for t in known if t.measurement.median_us is not None}
    for schedule, measurement in runner.measure(workload, schedules, deadline):
        yield _trial(workload, runner, schedule, measurement, "record")
        if measurement.median_us is not None:
            timed[schedule] = measurement.median_us
    if finals:
        best = sorted(timed, key=lambda schedule: (timed[schedule], schedule.key))[:FINALISTS]
        yield from _finals(workload, runner, best)


def _finals(workload: Workload, runner: Runner, best: Sequence[Schedule]) -> Iterator[Trial]:
    finals = runner.finals(workload, best)
    for schedule, measurement in finals.measurements:
        yield _trial(workload, runner, schedule, measurement, "record:final")
    if finals.vendor_us is not None:
        vendor = Schedule(VENDOR_TEMPLATE, {"call": finals.vendor})  # type: ignore[arg-type]
        yield _trial(workload, runner, vendor, Measurement(Status.OK, finals.vendor_us), "record:final")


def _trial(workload: Workload, runner: Runner, schedule: Schedule, measurement: Measurement, origin: str) -> Trial:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    fingerprint = _fingerprint(workload, runner, schedule.template)
    return Trial(workload, runner.device, runner.toolchain, schedule, measurement, origin, fingerprint, now)


def _fingerprint(workload: Workload, runner: Runner, template: str) -> str:
    if isinstance(runner, RecordedCode):
        return runner.fingerprints(workload).get(template, "")
    known = get_operator(workload.operator).templates.get(template)
    return known.fingerprint if known else ""
