"""The benchmark of tuning time: rows of searches on a replayed device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_tuning_time
import tune_once
import tuning_timeline
from problems import load_matmul

from kernelwright.kernels.steps import Collector, Step
from kernelwright.search import ReplayRunner
from tests.service.conftest import named_device, synthetic_trials

DEVICE = named_device("h100")


def test_a_row_compares_winners_of_short_and_long_searches_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in load_matmul("extra") if entry.tag == "llama70b tp8 qkv T2048")
    trials = [t for t in synthetic_trials(entry.workload, DEVICE) if t.measurement.median_us]
    slowest = max(trials, key=lambda trial: trial.measurement.median_us or 0.0)
    monkeypatch.setattr(run_tuning_time, "cold", lambda workload, count, timeline: (7.5, slowest.schedule))
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
    monkeypatch.setattr(tune_once, "ChildRunner", lambda: runner)
    tune_once.one({"workload": entry.workload.to_json(), "trials": 4})
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["schedule"]["template"] and told["stored_at"] > 0


def test_medians_leave_out_what_is_missing() -> None:
    rows: list[dict[str, Any]] = [{"cold_s": 9, "warm_s": 2}, {"cold_s": 8, "warm_s": 3}, {"cold_s": 30, "warm_s": 4}]
    assert run_tuning_time.medians(rows) == {"cold_s": 9, "warm_s": 3, "inductor_s": None}


def test_a_timeline_tells_every_step_of_the_search_in_a_file_and_sums_them_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(entry for entry in load_matmul("extra") if entry.tag == "llama70b tp8 qkv T2048")
    runner = ReplayRunner(synthetic_trials(entry.workload, DEVICE), DEVICE)
    collected = Collector().attach()
    monkeypatch.setattr(run_tuning_time, "collected", collected)
    try:
        run_tuning_time.warm(runner, entry.workload, 8, tmp_path / "steps.txt")
    finally:
        collected.detach()
    told, kept = capsys.readouterr().out, (tmp_path / "steps.txt").read_text()
    assert told.startswith(f"warm: {entry.workload}") and kept.startswith(f"warm: {entry.workload}")
    assert kept.count("propose 4") == 2 and kept.count("search      store") == 9
    assert [line.split()[3:] for line in told.splitlines() if "propose" in line] == [["2", "propose", "4"]]


def test_a_timeline_has_only_what_overlaps_the_search() -> None:
    steps = [
        Step("before", 0.0, 1.0, 7),
        Step("compile", 1.5, 4.0, 8),
        Step("load", 3.0, 3.5, 7),
        Step("after", 9, 9, 7),
    ]
    found = tuning_timeline.lines(steps, 2.0, 5.0, parent=7)
    assert [line.split() for line in found[1:]] == [
        ["-0.50", "2.00", "2.500", "child", "1", "compile"],
        ["1.00", "1.50", "0.500", "search", "load"],
        ["3.00", "stored"],
    ]
    assert [line.split()[-1] for line in tuning_timeline.summary(steps, 2.0, 5.0)[1:]] == ["load", "compile", "stored"]


def test_a_fresh_process_imports_no_torch_before_it_tunes() -> None:
    words = "import sys; sys.path.insert(0, sys.argv[1]); import tune_once; print('torch' in sys.modules)"
    command = [sys.executable, "-c", words, str(Path(tune_once.__file__).parent)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
