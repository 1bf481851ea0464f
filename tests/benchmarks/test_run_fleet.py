"""The fleet benchmark: what it reads of a database, its rows, and its choice of workloads."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import report
import run_fleet

from kernelwright.db import Store
from kernelwright.search import Budget, ReplayRunner
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from tests.service.conftest import named_device, synthetic_trials


def tuned(folder: Path, name: str, budget: int) -> run_fleet.Tuned:
    device = named_device("h100")
    began = time.time()
    with Store.open(f"sqlite:///{folder / name}") as store:
        for rows in (512, 2048):
            workload = WorkloadArgs("matmul", {"M": rows, "N": 4096, "K": 4096}).workload()
            runner = ReplayRunner(synthetic_trials(workload, device), device)
            for trials in (2, budget):
                request = TuneRequest(workload, "random", Budget(trials))
                tune_and_store(store, runner, request, lambda *_: None)
        return run_fleet.read(store, began)


def test_a_run_is_read_from_what_it_stored_and_compared_by_workload(tmp_path: Path) -> None:
    few, many = tuned(tmp_path, "few.db", 4), tuned(tmp_path, "many.db", 24)
    assert (few.trials, len(few.records), many.trials) == (8, 2, 48)
    assert few.seconds > 0 and 0 <= few.start_s < 60
    assert all(record.trials == 24 for record in many.records.values()), "the last record of a workload counts"
    row = run_fleet.row_of(2, many, few)
    assert row["ratio"] == pytest.approx((48 / many.seconds) / (8 / few.seconds), rel=1e-3)
    assert row["compared"] == 2 and row["quality"] >= row["quality_worst"] >= 1.0
    alone = run_fleet.row_of(1, few, few)
    assert (alone["ratio"], alone["quality"]) == (1.0, 1.0)


def test_a_run_without_a_result_has_no_rate(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'empty.db'}") as store:
        empty = run_fleet.read(store, time.time())
    full = tuned(tmp_path, "full.db", 4)
    for base in (empty, full):
        row = run_fleet.row_of(2, empty, base)
        assert (row["trials"], row["trials_per_s"], row["ratio"], row["steady_ratio"]) == (0, 0.0, None, None)
    rows = [run_fleet.row_of(1, full, full), run_fleet.row_of(2, empty, full)]
    written = report.write(tmp_path / "fleet.json", rows)
    assert written["summary"]["all"] == {"count": 1, "geomean": 1.0, "worst": 1.0}
    assert report.summary([{"ratio": 0.0}]) == {}
    assert report.geomean([0.0]) == 0.0 and report.geomean([0.0, 4.0, 1.0]) == 2.0


def test_the_steady_rate_leaves_out_start_and_tail() -> None:
    times = [0.0, 5.0, *(10 + 0.5 * number for number in range(16)), 40.0, 60.0, 90.0]
    assert run_fleet.steady_rate(times) == pytest.approx(2.0)
    assert run_fleet.steady_rate([]) == run_fleet.steady_rate([1.0]) == run_fleet.steady_rate([1.0, 1.0]) == 0.0


PROGRAM = """
import sys, time
from kernelwright.db import Store
words = sys.argv
assert words[words.index("--devices") + 1] == "2" and words[words.index("--trials") + 1] == "4"
with Store.open(words[words.index("--db") + 1]) as store, Store.open("sqlite:///PREPARED") as prepared:
    store.add_trials(list(prepared.trials()))
    for record in prepared.records(limit=None):
        store.put_winner(record)
if HANGS:
    time.sleep(600)
print('{"devices": [], "fleet": [{"busy_s": 1.5}, {"busy_s": 2.5}]}')
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_run_stored_is_kept_whether_it_ends_or_not(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, begin = tmp_path / "cli.py", subprocess.Popen
    tuned(tmp_path, "prepared.db", 4)
    program.write_text(PROGRAM.replace("HANGS", str(hangs)).replace("PREPARED", f"{tmp_path}/prepared.db"))
    monkeypatch.setattr(
        run_fleet.subprocess, "Popen", lambda words, **more: begin([words[0], str(program), *words[3:]], **more)
    )
    monkeypatch.setattr(run_fleet, "LOOK_S", 0.5)
    monkeypatch.setattr(run_fleet, "STOP_AFTER_S", 8.0 if hangs else 100.0)
    seen: list[run_fleet.Tuned] = []

    def tell(run: run_fleet.Tuned) -> None:
        seen.append(run)
        raise ValueError("a look that fails ends nothing")

    run = run_fleet.tune(run_fleet.chosen(2, "k4096"), 2, 4, 0.0, tell)
    assert (run.trials, len(run.records), run.complete) == (8, 2, not hangs)
    assert run.busy == (None if hangs else 4.0)
    assert seen and not any(one.complete for one in seen)
    row = run_fleet.row_of(2, run, run)
    assert row.get("partial", False) == hangs and (row["busy"] is None) == hangs


def test_workloads_are_many_small_and_different() -> None:
    found = run_fleet.chosen(24, "")
    assert len({entry.workload.key for entry in found}) == 24
    assert max(run_fleet.flop(entry.workload) for entry in found) <= run_fleet.LARGEST_FLOP
    assert all("K=4096" in str(entry.workload) or "k4096" in entry.id for entry in run_fleet.chosen(9, "k4096"))
