"""The benchmark of tuning time: rows of searches on a replayed device."""

from __future__ import annotations

import json
from typing import Any

import pytest
import run_tuning_time
from problems import load_matmul

from kernelwright.search import ReplayRunner
from tests.service.conftest import named_device, synthetic_trials

DEVICE = named_device("h100")


def test_a_row_compares_winners_of_short_and_long_searches_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in load_matmul("extra") if entry.tag == "llama70b tp8 qkv T2048")
    trials = [t for t in synthetic_trials(entry.workload, DEVICE) if t.measurement.median_us]
    slowest = max(trials, key=lambda trial: trial.measurement.median_us or 0.0)
    monkeypatch.setattr(run_tuning_time, "cold", lambda workload, count: (7.5, slowest.schedule))
    runner = ReplayRunner(trials, DEVICE)
    row = run_tuning_time.row_of(entry, runner, None, 8, 0.5)
    assert (row["cold_s"], row["cold_us"]) == (7.5, slowest.measurement.median_us)
    assert row["long_us"] == min(trial.measurement.median_us or 1e9 for trial in trials)
    assert row["ratio"] == pytest.approx(row["long_us"] / row["cold_us"], abs=1e-4) and row["ratio"] < 1
    assert row["seeds_ratio"] == pytest.approx(row["warm_us"] / row["cold_us"], abs=1e-4)
    assert row["trials"] == 8 <= row["long_trials"]


def test_a_fresh_process_tells_its_winner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entry = next(entry for entry in load_matmul("extra") if entry.tag == "llama70b tp8 qkv T2048")
    runner = ReplayRunner(synthetic_trials(entry.workload, DEVICE), DEVICE)
    monkeypatch.setattr(run_tuning_time, "ChildRunner", lambda: runner)
    run_tuning_time.one({"workload": entry.workload.to_json(), "trials": 4})
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["schedule"]["template"] and told["stored_at"] > 0


def test_medians_leave_out_what_is_missing() -> None:
    rows: list[dict[str, Any]] = [{"cold_s": 9, "warm_s": 2}, {"cold_s": 8, "warm_s": 3}, {"cold_s": 30, "warm_s": 4}]
    assert run_tuning_time.medians(rows) == {"cold_s": 9, "warm_s": 3, "inductor_s": None}
