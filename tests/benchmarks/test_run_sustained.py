"""run_sustained: which records it takes, what it compares, and its file, with a card that slows down under load."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_sustained

from kernelwright.db import Store
from kernelwright.db.pretuned import load_pretuned
from kernelwright.kernels.device import named_device
from kernelwright.types import TuningRecord


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"sqlite:///{tmp_path_factory.mktemp('sustained')}/shipped.db"
    with Store.open(url) as store:
        load_pretuned(store)
    yield url


def records(db: str) -> list[TuningRecord]:
    with Store.open(db) as store:
        return [record for record in store.records(limit=None) if record.device.slug == "h200"]


def test_long_kernels_with_a_vendors_call_are_chosen_longest_first(db: str) -> None:
    found = run_sustained.chosen(records(db), "", 200.0)
    times = [record.measurement.median_us or 0.0 for record in found]
    assert len(times) > 3 and times == sorted(times, reverse=True) and times[-1] >= 200
    assert len({record.workload.key for record in found}) == len(found) and all(record.vendor for record in found)
    assert run_sustained.chosen(found, "attention", 0.0) == [r for r in found if r.workload.operator == "attention"]
    assert run_sustained.chosen(found, "nothing like it", 0.0) == []


def test_a_kernel_that_heats_up_loses_in_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sustained.report, "clocks", lambda: "1350 MHz")
    asked: list[int] = []

    def contender(cold_us: float, hot_us: float) -> Callable[[int], float]:
        def timed(replays: int) -> float:
            asked.append(replays)
            return cold_us if replays == 1 else hot_us

        return timed

    both = {"ours": contender(1000.0, 1150.0), "vendor": contender(1200.0, 1200.0)}
    found = run_sustained.compare(both, both, block_s=0.4)
    assert found["turns_us"] == {"ours": 1000.0, "vendor": 1200.0}
    assert found["blocks_us"] == {"ours": 1150.0, "vendor": 1200.0}
    assert found["clocks"] == {"ours": "1350 MHz", "vendor": "1350 MHz"}
    # 0.2 s of calls of 1 ms and 1.2 ms, 20 in a graph
    assert set(asked) == {1, 10, 8}


def run(monkeypatch: pytest.MonkeyPatch, db: str, out: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(run_sustained, "present_device", lambda: named_device("h200"))
    monkeypatch.setattr(run_sustained.report, "clocks", lambda: "1980 MHz")
    monkeypatch.setattr(sys, "argv", ["run_sustained.py", "--db", db, "--out", str(out), *words])
    run_sustained.main()
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_the_file_has_a_row_for_each_record(db: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def row_of(record: TuningRecord, block_s: float, zeros: float) -> dict[str, Any] | None:
        if record.workload == left_out.workload:
            return None
        return {"workload": str(record.workload), "turns": 1.2, "ratio": 1.05 + zeros, "clocks": {}}

    left_out, *others = run_sustained.chosen(records(db), "", 200.0)[:3]
    monkeypatch.setattr(run_sustained, "row_of", row_of)
    content = run(monkeypatch, db, tmp_path / "out.json", "--most", "3", "--zeros", "0.2")
    assert [row["workload"] for row in content["rows"]] == [str(record.workload) for record in others]
    assert content["summary"]["all"] == {"count": 2, "geomean": 1.25, "worst": 1.25}


def test_nothing_to_compare_is_told(
    db: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, db, tmp_path / "out.json", "--only", "nothing like it")
    assert "no record of NVIDIA H200 SXM 141 GB for --only 'nothing like it'" in capsys.readouterr().err
