"""The one question: what is the fastest correct kernel for this workload on this GPU, and how is it known?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kernelwright.cost_model.calibration import tells_regret
from kernelwright.cost_model.model import CostModel
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.operator import Operator, roofline_us
from kernelwright.search.staleness import UNTRUSTED, why_stale
from kernelwright.types import DeviceSpec, Schedule, Toolchain, TuningRecord, Workload

NEAREST_FACTOR = 2.0
"""A neighbour's dimensions may each be larger or smaller by this factor at most."""

_OTHER_ALIGNMENT = 1.0
_ALIGNMENT = 8


class Records(Protocol):
    """Where records are kept; `kernelwright.db` has one."""

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """Records of that workload and device, newest first, of any toolchain."""
        ...

    def neighbours(self, workload: Workload, device_key: str, limit: int = 32) -> list[TuningRecord]:
        """Records on that device which differ from the workload in their dimensions only."""
        ...


@runtime_checkable
class SharedRecords(Protocol):
    """What a place adds where records of others may come in."""

    def find_untrusted(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """Records of that workload and device that nobody vouches for, newest first; not among `find_records`."""
        ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """What to run, and why.

    how: "measured" (this workload, device, toolchain and kernel source), "stale" (another toolchain or source, or a
        record that nobody vouches for),
        "nearest" (a measured workload of nearly the same size), "predicted" (the cost model's first choice) or "vendor"
        (nothing of ours is known).
    schedule: our best, None for "vendor". choice: "kernel" where ours is known to be faster than the vendor library,
        otherwise "vendor". expected_us: the schedule's time in microseconds, measured or estimated. vendor, vendor_us:
        the library call and its measured time. roofline: least possible time over expected_us. record: where it comes
        from. regret: share of the best speed that it loses on average, where the cost model tells. note: why, in words.
    """

    how: str
    workload: Workload
    device: DeviceSpec
    schedule: Schedule | None = None
    choice: str = "vendor"
    expected_us: float | None = None
    vendor: str = ""
    vendor_us: float | None = None
    roofline: float | None = None
    record: TuningRecord | None = None
    regret: float | None = None
    note: str = ""


def find_winner(
    workload: Workload,
    device: DeviceSpec,
    records: Records,
    *,
    toolchain: Toolchain | None = None,
    fingerprints: Mapping[str, str] | None = None,
    model: CostModel | None = None,
) -> Answer:
    """The best answer there is; a miss is an answer too, and raises nothing.

    toolchain: what the answer will run with; None takes any. fingerprints: digest of each template's source, None
    for the installed ones. model: what to predict with where nothing was measured; None predicts nothing.
    UnknownOperator and InvalidWorkload for a workload that no operator has.
    """
    operator = get_operator(workload.operator)
    operator.validate(workload)
    if fingerprints is None:
        fingerprints = {name: template.fingerprint for name, template in operator.templates.items()}
    same = records.find_records(workload.key, device.key)
    fresh = [r for r in same if toolchain in (None, r.toolchain) and _is_current(r, fingerprints)]
    if fresh:
        return _from_record(workload, device, _best_of_newest(fresh), "measured", "measured on this very workload")
    untrusted = records.find_untrusted(workload.key, device.key) if isinstance(records, SharedRecords) else []
    for found in (same, untrusted):
        legal = [record for record in found if _is_legal(operator, workload, device, record.schedule)]
        if legal:
            best = _best_of_newest(legal)
            reasons = [UNTRUSTED] if found is untrusted else []
            reasons += filter(None, [why_stale(best, toolchain, fingerprints)])
            note = f"{' and '.join(reasons)}; tune it again or run `kernelwright refresh` to be sure"
            return _from_record(workload, device, best, "stale", note)
    near = _nearest(operator, workload, device, records.neighbours(workload, device.key), fingerprints)
    if near is not None:
        return _from_neighbour(operator, workload, device, near, model)
    return _predicted(operator, workload, device, model) or _nothing(workload, device)


def check_schedule(workload: Workload, device: DeviceSpec, schedule: Schedule | None) -> None:
    """Raise ValueError, with the reasons, unless this is a legal schedule of the workload on the device."""
    if schedule is None:
        raise ValueError("a kernel without a schedule")
    reasons = get_operator(workload.operator).space(workload, device).why_illegal(schedule)
    if reasons:
        raise ValueError(f"{schedule} is not legal: {'; '.join(reasons)}")


def _is_current(record: TuningRecord, fingerprints: Mapping[str, str]) -> bool:
    return fingerprints.get(record.schedule.template) == record.template_fingerprint


def _is_legal(operator: Operator, workload: Workload, device: DeviceSpec, schedule: Schedule) -> bool:
    return not operator.space(workload, device).why_illegal(schedule)


def _best_of_newest(records: Sequence[TuningRecord]) -> TuningRecord:
    """The fastest record with the newest one's toolchain: a later, shorter search does not hide a better result."""
    comparable = [record for record in records if record.toolchain == records[0].toolchain]
    return min(comparable, key=lambda record: record.measurement.median_us or math.inf)


def _from_record(workload: Workload, device: DeviceSpec, record: TuningRecord, how: str, note: str) -> Answer:
    if record.winner == "vendor":
        note += f"; {record.vendor} is as fast or faster"
    return Answer(
        how=how,
        workload=workload,
        device=device,
        schedule=record.schedule,
        choice=record.winner,
        expected_us=record.measurement.median_us,
        vendor=record.vendor,
        vendor_us=record.vendor_us,
        roofline=record.roofline,
        record=record,
        note=note,
    )


def _nearest(
    operator: Operator,
    workload: Workload,
    device: DeviceSpec,
    neighbours: Sequence[TuningRecord],
    fingerprints: Mapping[str, str],
) -> TuningRecord | None:
    """The closest neighbour whose schedule can run this workload; of equally close ones, today's code, then newest."""
    near = [record for record in neighbours if _in_reach(workload, record.workload)]
    near.sort(key=lambda record: record.created_at, reverse=True)
    near.sort(key=lambda record: (_distance(workload, record.workload), not _is_current(record, fingerprints)))
    # what is legal takes a look at the space: not more often than need be
    return next((record for record in near if _is_legal(operator, workload, device, record.schedule)), None)


def _in_reach(workload: Workload, other: Workload) -> bool:
    if set(workload.dims) != set(other.dims) or not all([*workload.dims.values(), *other.dims.values()]):
        return False
    ratios = (size / other.dims[name] for name, size in workload.dims.items())
    return all(1 / NEAREST_FACTOR <= ratio <= NEAREST_FACTOR for ratio in ratios)


def _distance(workload: Workload, other: Workload) -> float:
    """Euclidean distance of log2 sizes; sizes on either side of alignment are further apart than they look, because
    vector loads and TMA end there."""
    total = 0.0
    for name, size in workload.dims.items():
        total += math.log2(size / other.dims[name]) ** 2
        if (size % _ALIGNMENT == 0) != (other.dims[name] % _ALIGNMENT == 0):
            total += _OTHER_ALIGNMENT
    return math.sqrt(total)


def _from_neighbour(
    operator: Operator, workload: Workload, device: DeviceSpec, record: TuningRecord, model: CostModel | None
) -> Answer:
    here = _roofline_us(operator, workload, device)
    there = _roofline_us(operator, record.workload, device)
    time_us = record.measurement.median_us
    expected = time_us * here / there if time_us and here and there else None
    return Answer(
        how="nearest",
        workload=workload,
        device=device,
        schedule=record.schedule,
        choice=record.winner,
        expected_us=expected,
        vendor=record.vendor,
        roofline=here / expected if here and expected else None,
        record=record,
        regret=_regret(operator, workload, device, record.schedule, model),
        note=f"taken from {record.workload}, the nearest that was measured; tune this workload to be sure",
    )


def _predicted(operator: Operator, workload: Workload, device: DeviceSpec, model: CostModel | None) -> Answer | None:
    schedules = list(operator.space(workload, device)) if model is not None else []
    if model is None or not schedules:
        return None
    regrets = model.expected_regret(workload, device, schedules)
    place = int(np.argmin(regrets))
    first = schedules[place]
    expected = float(RooflineModel(operator.name).expected_us(workload, device, [first])[0])
    here = _roofline_us(operator, workload, device)
    return Answer(
        how="predicted",
        workload=workload,
        device=device,
        schedule=first,
        expected_us=expected,
        roofline=here / expected if here and expected else None,
        regret=float(regrets[place]) if tells_regret(model, operator.name) else None,
        note="the cost model's first choice, never measured; the vendor library stays the safe one until it is tuned",
    )


def _regret(
    operator: Operator, workload: Workload, device: DeviceSpec, schedule: Schedule, model: CostModel | None
) -> float | None:
    if model is None or not tells_regret(model, operator.name):
        return None
    return float(model.expected_regret(workload, device, [schedule, *operator.space(workload, device)])[0])


def _roofline_us(operator: Operator, workload: Workload, device: DeviceSpec) -> float | None:
    try:
        return roofline_us(operator, workload, device)
    except UsageError:
        return None


def _nothing(workload: Workload, device: DeviceSpec) -> Answer:
    note = f"nothing is known of {workload} on {device.name}; tune it, or use the vendor library"
    return Answer(how="vendor", workload=workload, device=device, note=note)
