"""Answers as text, between processes: only what a graph needs to be compiled."""

from __future__ import annotations

from typing import Any

from kernelwright.search.answer import Answer, check_schedule
from kernelwright.types import DeviceSpec, Schedule, Workload

_PLAIN = ("how", "choice", "expected_us", "vendor", "vendor_us", "note")


def written(answer: Answer) -> dict[str, Any]:
    """The answer as JSON values, without its workload, device and record."""
    plain = {name: getattr(answer, name) for name in _PLAIN}
    return {**plain, "schedule": answer.schedule and answer.schedule.to_json()}


def read(said: dict[str, Any], workload: Workload, device: DeviceSpec) -> Answer:
    """The answer that `written` wrote; ValueError, KeyError or TypeError for anything else, also for a kernel that is
    not legal here."""
    schedule = said["schedule"] and Schedule.from_json(said["schedule"])
    if said["choice"] == "kernel":
        check_schedule(workload, device, schedule)
    return Answer(workload=workload, device=device, schedule=schedule, **{name: said[name] for name in _PLAIN})
