"""The fleet benchmark without GPUs: rounds as a campaign makes them, and a machine whose parts take their time."""

from __future__ import annotations

import time
from typing import Any

import fleet
import fleet_pace
import pytest


@pytest.mark.parametrize(("trials", "rounds"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2), (32, 3), (33, 4)])
def test_rounds_double_what_was_tried(trials: int, rounds: int) -> None:
    assert fleet.rounds(trials) == rounds


def test_compilers_work_so_many_at_a_time_and_stop_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = fleet.recording()
    workload = trials[0].workload
    schedules = list(dict.fromkeys(trial.schedule for trial in trials if trial.workload == workload))[:6]
    compilers = fleet_pace.Compilers(2)
    compilers._times, compilers._any = {}, [0.05]
    began = time.monotonic()
    built = [schedule for schedule, _ in compilers.build_all(workload, schedules, trials[0].device)]
    assert sorted(built, key=str) == sorted(schedules, key=str)
    assert time.monotonic() - began >= 3 * 0.05
    assert compilers.seconds == pytest.approx(6 * 0.05)
    assert len(list(compilers.build_all(workload, schedules, trials[0].device, time.monotonic() + 0.07))) < 6
    compilers.close()


def test_a_device_loads_what_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fleet_pace.time, "sleep", slept.append)
    trials = fleet.recording()
    device = fleet_pace.Device(trials, trials[0].device)
    workloads = [share.workload for share in fleet.shares(trials, 32)][: fleet_pace.KEPT_WORKLOADS + 1]

    def loads(*chosen: Any) -> int:
        slept.clear()
        for workload in chosen:
            device.finals(workload, [])
        return slept.count(fleet_pace.LOAD_S) - (len(chosen) if fleet_pace.LOAD_S == fleet_pace.FINALS_S else 0)

    assert loads(*workloads[:-1]) == fleet_pace.KEPT_WORKLOADS
    assert loads(*workloads[:-1]) == 0
    assert loads(workloads[-1], workloads[1], workloads[0]) == 2
    list(device.measure(workloads[0], list(device.space(workloads[0]))[:3]))
    assert slept.count(fleet_pace.TRIAL_S) == 3
