"""Measuring stored winners again: those whose time may no longer hold, and those that nobody vouches for."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping

from kernelwright.db import Store, Trust
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.operator import roofline_us
from kernelwright.search import Runner
from kernelwright.search.runner import Finals
from kernelwright.search.staleness import UNTRUSTED, why_stale
from kernelwright.service.answering import fingerprints
from kernelwright.service.tuning import code_of
from kernelwright.types import Measurement, Status, Trial, TuningRecord

ORIGIN = "refresh"


@dataclasses.dataclass(frozen=True)
class Refreshed:
    """What became of one record.

    outcome: "measured" (`now` is the new record), "quarantined" (wrong or failing) or "skipped" (cannot be measured
    here). why: why it had to be measured again. detail: what went wrong, in words.
    """

    record: TuningRecord
    outcome: str
    why: str
    now: TuningRecord | None = None
    detail: str = ""


OnRefreshed = Callable[[Refreshed], None]


def refresh(store: Store, runner: Runner, limit: int | None, on_refreshed: OnRefreshed) -> list[Refreshed]:
    """Measure stale and untrusted records of the runner's device again, most used first.

    Each schedule is verified and timed beside the vendor call as in a search's final round. A good one becomes a record
    of today, one that is wrong or fails twice goes into quarantine. limit: at most so many, None for all.
    """
    done: list[Refreshed] = []
    for record in store.to_refresh(runner.device.key, runner.toolchain.key, _all_fingerprints(runner, store)):
        if limit is not None and len(done) == limit:
            break
        why = _why(store, runner, record)
        if why:
            done.append(_refresh_one(store, runner, record, why))
            on_refreshed(done[-1])
    return done


def _why(store: Store, runner: Runner, record: TuningRecord) -> str:
    """Why a record must be measured again; "" for one that is current by the code that the runner's times belong to."""
    state = store.record_state(record.key)
    reasons = [UNTRUSTED] if state is not None and state.trust is Trust.UNTRUSTED else []
    reasons += filter(None, [why_stale(record, runner.toolchain, code_of(runner, record.workload))])
    return " and ".join(reasons)


def _all_fingerprints(runner: Runner, store: Store) -> Mapping[str, str]:
    found: dict[str, str] = {}
    operators = {record.workload.operator for record in store.records(device_key=runner.device.key, limit=None)}
    for operator in sorted(operators):
        try:
            found |= fingerprints(operator)
        except UsageError:
            continue
    return found


def _refresh_one(store: Store, runner: Runner, record: TuningRecord, why: str) -> Refreshed:
    workload, schedule = record.workload, record.schedule
    try:
        illegal = get_operator(workload.operator).space(workload, runner.device).why_illegal(schedule)
        if illegal or not runner.space(workload).contains(schedule):
            detail = str(illegal) if illegal else "this device cannot measure the schedule"
            return Refreshed(record, "skipped", why, detail=detail)
        finals = _finals(runner, record)
    except UsageError as error:
        return Refreshed(record, "skipped", why, detail=str(error))
    ((_, seen),) = finals.measurements
    now = _moment()
    fingerprint = code_of(runner, workload).get(schedule.template, "")
    store.add_trial(Trial(workload, runner.device, runner.toolchain, schedule, seen, ORIGIN, fingerprint, now))
    if not seen.ok:
        reason = f"{seen.status.value} when measured again at {now}: {seen.message}".rstrip(": ")
        store.quarantine(record.key, reason)
        return Refreshed(record, "quarantined", why, detail=reason)
    new = _renewed(record, runner, finals, seen, fingerprint, now)
    store.put_winner(new)
    return Refreshed(record, "measured", why, now=new)


def _finals(runner: Runner, record: TuningRecord) -> Finals:
    finals = runner.finals(record.workload, [record.schedule])
    ((_, seen),) = finals.measurements
    # A wrong result is a fact; any other failure may be the machine's, so that it gets a second chance.
    if seen.ok or seen.status is Status.WRONG_RESULT:
        return finals
    return runner.finals(record.workload, [record.schedule])


def _renewed(
    record: TuningRecord, runner: Runner, finals: Finals, seen: Measurement, fingerprint: str, now: str
) -> TuningRecord:
    return dataclasses.replace(
        record,
        device=runner.device,
        toolchain=runner.toolchain,
        measurement=seen,
        template_fingerprint=fingerprint,
        origin=ORIGIN,
        created_at=now,
        vendor=finals.vendor,
        vendor_us=finals.vendor_us,
        noise=finals.noise,
        aa_ratio=finals.aa_ratio,
        runner_up=None,
        runner_up_us=None,
        roofline=_roofline(record, runner, seen),
    )


def _roofline(record: TuningRecord, runner: Runner, seen: Measurement) -> float | None:
    try:
        least = roofline_us(get_operator(record.workload.operator), record.workload, runner.device)
    except UsageError:
        return None
    return least / seen.median_us if seen.median_us else None


def _moment() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
