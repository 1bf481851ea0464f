"""`record` and `pack` as typed, against a replayed GPU."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelwright.search import load_recorded
from kernelwright.service.cli import main
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import Trial

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must end with the exit code; its JSON, or its standard error."""

    def run(*argv: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        out, err = capsys.readouterr()
        assert (exit_.value.code or 0) == code, err
        return json.loads(out) if code == 0 else err

    return run


@pytest.fixture
def workloads(args: WorkloadArgs, tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNELWRIGHT_RECORDED", str(recorded))
    path = tmp_path / "workloads.jsonl"
    path.write_text(json.dumps({"workload": args.workload().to_json(), "count": 24}))
    return path


def test_record_then_replay_what_was_recorded(run: Run, workloads: Path, trials: list[Trial], tmp_path: Path) -> None:
    out = tmp_path / "mine"
    ask = ["record", "--workloads", str(workloads), "--device", "replay:h100", "--out", str(out), "--json"]
    (first,) = run(*ask)["recordings"]
    assert (first["wanted"], first["complete"], first["new"]) == (1, 1, 1)
    found = load_recorded(out / "h100" / "matmul.parquet")
    assert first["trials"] == len(found) > 24
    times = {t.schedule: t.measurement.median_us for t in trials}
    assert all(t.measurement.median_us == times[t.schedule] for t in found)
    prints = {t.schedule.template: t.template_fingerprint for t in trials}
    assert all(t.template_fingerprint == prints[t.schedule.template] for t in found)
    (again,) = run(*ask)["recordings"]
    assert (again["complete"], again["new"], again["trials"]) == (1, 0, len(found)), "there is nothing left to do"


def test_a_killed_sweep_keeps_its_parts(
    run: Run, workloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine"
    ask = ["record", "--workloads", str(workloads), "--device", "replay:h100", "--out", str(out), "--json"]

    def killed(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kernelwright.search.recording_files.RecordingFolder.pack", killed)
        run(*ask, code=130)
    assert not (out / "h100" / "matmul.parquet").exists()
    assert list((out / "h100" / "matmul.parts").iterdir())
    (again,) = run(*ask)["recordings"]
    assert (again["complete"], again["new"]) == (1, 0) and again["trials"] > 24


def test_workloads_from_standard_input(
    run: Run, workloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(workloads.read_text()))
    (got,) = run("record", "--workloads", "-", "--device", "replay:h100", "--out", str(tmp_path / "x"), "--json")[
        "recordings"
    ]
    assert got["complete"] == 1


def test_no_time_is_no_fault(run: Run, workloads: Path, tmp_path: Path) -> None:
    ask = ["record", "--workloads", str(workloads), "--device", "replay:h100", "--out", str(tmp_path), "--json"]
    (got,) = run(*ask, "--seconds", "1")["recordings"]
    assert (got["trials"], got["complete"]) == (0, 0)


def test_pack_merges(run: Run, recorded: Path, trials: list[Trial], tmp_path: Path) -> None:
    lines = tmp_path / "more.jsonl"
    lines.write_text("".join(json.dumps(trial.to_json()) + "\n" for trial in trials[:5]))
    (got,) = run("pack", str(recorded), str(lines), "--out", str(tmp_path / "all"), "--json")["recordings"]
    assert got == {"file": str(tmp_path / "all" / "h100" / "matmul.parquet"), "trials": len(trials)}


def test_misuse_is_told(run: Run, workloads: Path, tmp_path: Path) -> None:
    assert "cannot be read" in run("record", "--workloads", str(tmp_path / "no.json"), "--json", code=2)
    workloads.write_text("[]")
    assert "at least one workload" in run("record", "--workloads", str(workloads), "--json", code=2)
    assert "must be a recording" in run("pack", str(tmp_path / "none"), "--json", code=2)
