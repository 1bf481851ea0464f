"""`serve --demo`: the winners at once, trials and a replayed job soon after, and nothing left behind."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kernelwright.db import JobRequest, JobState, Store
from kernelwright.db.pretuned import load_pretuned
from kernelwright.search import load_recorded, save_recorded
from kernelwright.service.cli import app
from kernelwright.service.demo import FIRST_JOB_TRIALS, demonstration
from kernelwright.service.settings import Settings


def wait_for_end(store: Store, job_id: str) -> JobState:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        job = store.get_job(job_id)
        if job is not None and job.state.is_final:
            return job.state
        time.sleep(0.05)
    raise AssertionError(f"job {job_id} did not end")


def test_it_serves_works_and_leaves_nothing(recorded: Path) -> None:
    asked = Settings(recorded=recorded, db="sqlite:////nonexistent/kept.db")
    with demonstration(asked, pace=0.0) as settings, Store.open(settings.db) as store:
        assert settings.db is not None and settings.db != asked.db
        path = Path(settings.db.removeprefix("sqlite:///"))
        assert path.exists()
        with Store.open("sqlite://") as other:
            assert store.count_records() == load_pretuned(other)
        end = time.monotonic() + 30
        while not store.jobs() and time.monotonic() < end:
            time.sleep(0.05)
        (job,) = store.jobs()
        assert (job.device, job.trials) == ("replay:h100", FIRST_JOB_TRIALS)
        assert wait_for_end(store, job.id) is JobState.DONE
        unknown = store.submit(JobRequest(job.workload, "replay:a100"))
        assert wait_for_end(store, unknown.id) is JobState.FAILED
    assert not path.exists()


def test_a_signal_to_end_leaves_nothing(recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELWRIGHT_RECORDED", str(recorded))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    during: list[Path] = []

    def run(server: object) -> None:
        """As uvicorn, which sends the signal again once it has ended."""
        during.extend(tmp_path.glob("kernelwright-demo-*"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("uvicorn.Server.run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert CliRunner().invoke(app, ["serve", "--demo"]).exit_code == 128 + signal.SIGTERM
    assert len(during) == 1 and not during[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_trials_of_most_workloads_are_there(recorded: Path, tmp_path: Path) -> None:
    trials = load_recorded(recorded / "h100" / "matmul.parquet")
    changed = dataclasses.replace(trials[0].workload, error_budget=0.02)
    others = [dataclasses.replace(trial, workload=changed) for trial in trials]
    save_recorded([*trials, *others], tmp_path / "h100" / "matmul.parquet")
    with demonstration(Settings(recorded=tmp_path), pace=0.0) as settings, Store.open(settings.db) as store:
        end = time.monotonic() + 30
        while sum(store.count_trials().values()) < len(others) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(list(store.trials(workload_key=changed.key))) == len(others)


def test_a_demo_takes_no_database() -> None:
    result = CliRunner().invoke(app, ["serve", "--demo", "--db", "sqlite:///kept.db"])
    assert result.exit_code != 0
    assert not Path("kept.db").exists()
