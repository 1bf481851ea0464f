"""run_matmul on recorded trials: rows, summary, plot, the Inductor column, and going on where a run stopped."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import inductor_job
import pytest
import report
import roofline_plot
import run_matmul
import torch
import tuned_rows
from inductor_job import Compared, CompareJob
from problems import Entry

from kernelwright.db import Store
from kernelwright.kernels import get_operator
from kernelwright.kernels.child_process import ChildDied, ChildTimeout
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search import Budget, load_recorded
from kernelwright.search.recorded import recorded_path
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.types import Schedule

SVG = "{http://www.w3.org/2000/svg}"

COMPARED = Compared(ours_us=90.0, vendor_us=99.0, inductor_us=108.0, compile_s=3.0, inductor_error=1e-3, aa_ratio=1.01)


@pytest.fixture(scope="module")
def replayed() -> ReplayRunner:
    trials = load_recorded(recorded_path("h100"))
    return ReplayRunner(trials, trials[0].device)


@pytest.fixture(scope="module")
def entries(replayed: ReplayRunner) -> list[Entry]:
    known = set(replayed.workloads)
    return [entry for entry in run_matmul.chosen(True, "") if entry.workload in known][:4]


class Child:
    """Stands for the process that runs Inductor."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.jobs, self.killed = answer, list[Any](), 0

    def call(self, job: Any, timeout_s: float) -> Any:
        self.jobs.append(job)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def kill(self) -> None:
        self.killed += 1


def bench(runner: ReplayRunner, child: Child | None = None, end: float = math.inf) -> tuned_rows.Bench:
    rival = None if child is None else tuned_rows.Inductor(child, 9.0)  # type: ignore[arg-type]
    return tuned_rows.Bench(run_matmul.FAMILY, Store.open("sqlite://"), runner, "random", Budget(12, 30), end, rival)


def test_everything_of_core_and_extra_is_chosen() -> None:
    everything = run_matmul.chosen(True, "")
    assert len(everything) > 95
    assert [entry.tag for entry in everything[:2]] == list(run_matmul.SIXTEEN[:2])
    assert {entry.tag for entry in run_matmul.chosen(False, "")} == set(run_matmul.SIXTEEN)
    fp8 = run_matmul.chosen(False, "", "fp8")
    assert len(fp8) == 12 and all("fp8" in entry.id for entry in fp8)
    assert [entry.tag for entry in run_matmul.chosen(False, "T16", "int8")] == ["int8 w8a8 T16"] * 2


def test_a_run_makes_rows_a_summary_and_a_plot(
    replayed: ReplayRunner, entries: list[Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    saved: list[int] = []
    bench(replayed).run(entries, rows, lambda: saved.append(len(rows)))
    assert list(rows) == [entry.id for entry in entries] and saved == [1, 2, 3, 4]
    assert len(capsys.readouterr().out.splitlines()) == 4
    result = tuned_rows.write(tmp_path / "matmul.json", list(rows.values()), replayed, {"before": "", "after": ""})
    assert json.loads((tmp_path / "matmul.json").read_text())["rows"] == result["rows"]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["vendor_us"] / row["ours_us"], rel=1e-3)
    everything = result["summary"]["all"]
    assert everything["count"] == result["summary"]["float"]["count"] == 4
    assert 0 < everything["roofline"] <= 1 and "inductor" not in everything
    assert (tmp_path / "matmul_roofline.svg").exists()


def test_nothing_is_begun_after_the_end(
    replayed: ReplayRunner, entries: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    bench(replayed, end=0.0).run(entries, rows, lambda: None)
    assert rows == {} and capsys.readouterr().out.count("out of time; left out:") == 4


def test_inductor_times_replace_those_of_the_finals(replayed: ReplayRunner, entries: list[Entry]) -> None:
    rows: dict[str, dict[str, Any]] = {}
    child = Child(COMPARED)
    bench(replayed, child).run(entries[:1], rows, lambda: None)
    bare: dict[str, dict[str, Any]] = {}
    bench(replayed).run(entries[:1], bare, lambda: None)
    row, before = rows[entries[0].id], bare[entries[0].id]
    assert child.jobs == [CompareJob(entries[0].workload, Schedule.from_json(row["schedule"]), 0)]
    assert (row["ours_us"], row["ratio"], row["inductor_ratio"], row["aa_ratio"]) == (90.0, 1.1, 1.2, 1.01)
    assert row["roofline"] == pytest.approx(before["roofline"] * before["ours_us"] / 90.0, abs=1e-4)
    assert "inductor 1.200" in tuned_rows.line(row)
    figures = report.summary([row, before])["all"]
    assert (figures["count"], figures["inductor"], figures["inductor_count"]) == (2, 1.2, 1)


@pytest.mark.parametrize(
    ("error", "words", "killed"), [(ChildTimeout(9.0, ""), "not done in 9 s", 0), (ChildDied(1, "boom"), "boom", 1)]
)
def test_without_inductor_the_row_stays(
    replayed: ReplayRunner, entries: list[Entry], error: Exception, words: str, killed: int
) -> None:
    rows: dict[str, dict[str, Any]] = {}
    child = Child(error)
    bench(replayed, child).run(entries[:1], rows, lambda: None)
    row = rows[entries[0].id]
    assert row["inductor_us"] is None and words in row["inductor_note"] and child.killed == killed
    assert row["ratio"] is not None


def test_a_run_goes_on_with_what_is_missing() -> None:
    plain = Entry("a", "", matmul_workload(8, 8, 8))
    scaled = Entry("b", "", matmul_workload(16, 16, 16, "fp8e4m3", scaling="row"))
    assert tuned_rows.missing(run_matmul.FAMILY, [plain, scaled], {}, False) == [plain, scaled]
    rows: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    assert tuned_rows.missing(run_matmul.FAMILY, [plain, scaled], rows, False) == []
    assert tuned_rows.missing(run_matmul.FAMILY, [plain, scaled], rows, True) == [plain]
    assert tuned_rows.missing(run_matmul.FAMILY, [plain, scaled], {**rows, "a": {"inductor_us": None}}, True) == []


def test_the_round_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = matmul_workload(16, 24, 40, "fp32", epilogue=("bias", "gelu", "residual"))
    schedule = get_operator("matmul").default_schedule(workload, named_device("h100"))

    def samples(calls: list[Any]) -> list[list[float]]:
        assert len(calls) == 4
        # ours needs a GPU
        vendor, again, inductor = (call() for call in calls[1:])
        torch.testing.assert_close(vendor, inductor)
        assert torch.equal(vendor, again)
        return [[10.0, 11.0, 12.0], [20.0, 20.0, 20.0], [20.0, 22.0, 20.0], [30.0, 30.0, 33.0]]

    found = inductor_job.compare(CompareJob(workload, schedule, 0), "cpu", samples, lambda function: function)
    assert (found.ours_us, found.vendor_us, found.inductor_us, found.aa_ratio) == (11.0, 20.0, 30.0, 1.0)
    assert 0 < found.inductor_error < 1e-5


def test_what_inductor_is_compared_on() -> None:
    assert inductor_job.comparable(matmul_workload(8, 8, 8, epilogue=("swiglu",), batch=2))
    assert not inductor_job.comparable(matmul_workload(8, 8, 8, "int8", scaling="row"))
    assert not inductor_job.comparable(matmul_workload(8, 8, 8, groups=2))
    assert not inductor_job.comparable(matmul_workload(8, 8, 8, out_dtype="fp32"))


def row(id: str, group: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "tag": id, "group": group, "ours_us": 10.0, "vendor_us": 12.5, "roofline": 0.8, **more}


def test_the_plot_has_a_mark_for_each_time() -> None:
    rows = [
        row("plain", "large"),
        row("three <&>", "large", inductor_us=16.0),
        row("alone", "w4a16", vendor_us=None),
        row("no rate", "fp32", roofline=None),
    ]
    assert roofline_plot.shares(rows[1]) == pytest.approx({"ours": 0.8, "vendor": 0.64, "inductor": 0.5})
    text = roofline_plot.draw(rows, "Matmul on a GPU")
    root = ElementTree.fromstring(text)
    found = [element.get("class") for element in root.iterfind(f".//{SVG}g/*")]
    assert [found.count(name) for name in ("ours", "vendor", "inductor")] == [3, 2, 1]
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert "three <&>" in words and "no rate" not in words and "large" in words
    assert "ours 80 %, vendor 64 %, inductor 50 %" in words
    assert "prefers-color-scheme: dark" in text
    x = [float(circle.get("cx", 0)) for circle in root.iter(f"{SVG}circle")]
    # the first circle is the legend's
    assert x[1] == pytest.approx(roofline_plot._x(0.8), abs=0.1)


def test_a_result_file_is_drawn_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h100" / "matmul.json"
    out = tmp_path / "again.svg"
    monkeypatch.setattr(sys, "argv", ["run_matmul.py", "--plot", str(file), str(out)])
    run_matmul.main()
    count = len(json.loads(file.read_text())["rows"])
    marks = [e for e in ElementTree.fromstring(out.read_text()).iterfind(f".//{SVG}g/{SVG}circle")]
    assert len(marks) == count
