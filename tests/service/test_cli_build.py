"""`kernelwright build`: winners are compiled once, for a GPU that need not be there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kernelwright.db import Store
from kernelwright.errors import BuildFailed
from kernelwright.kernels.built import is_built
from kernelwright.service import building
from kernelwright.service.building import build_winners
from kernelwright.types import Schedule, TuningRecord, Workload
from tests.service.command_line import CommandLine

TUNE = ["tune", "matmul", "--dtype", "bf16", "--device", "replay:h100", "--trials", "4", "--strategy", "random"]
DB = ["--db", "sqlite:///winners.db"]


@pytest.fixture
def record(cli: CommandLine, db_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningRecord:
    """A winner that is ours, in a database of its own; Triton's cache is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    cli.json(*TUNE, "--shape", "M=2048,N=4096,K=4096")
    with Store.open("sqlite:///winners.db") as copy, Store.open(db_url) as store:
        (found,) = store.records()
        found = dataclasses.replace(found, vendor_us=2 * found.measurement.median_us)
        copy.put_winner(found)
    return found


class FakePool:
    """Refuses products of three rows, and breaks on those of four."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def build(self, workload: Workload, schedule: Schedule, device: Any) -> None:
        if workload.dims["M"] == 3:
            raise BuildFailed("the compiler died")
        if workload.dims["M"] == 4:
            raise ZeroDivisionError


def test_winners_are_compiled_for_a_gpu_that_is_not_here(
    cli: CommandLine, record: TuningRecord, tmp_path: Path
) -> None:
    cache = str(tmp_path / "cache")
    assert not is_built(record.workload, record.schedule, record.device)
    first = cli.json("build", "--hardware", "h100", *DB)
    assert first == {"built": 1, "held": 0, "failed": 0, "cache": cache, "failures": []}
    assert is_built(record.workload, record.schedule, record.device)
    assert list((tmp_path / "cache").glob("*/*.cubin"))
    code, out, err = cli.run("build", "--hardware", "h100", "--processes", "3", *DB)
    assert (code, out, err) == (0, f"0 built, 1 held, 0 failed in {cache}\n", "")
    assert cli.json("build", "--hardware", "h200", *DB)["built"] == 0, "of another GPU"
    assert cli.json("build", "--hardware", "h100", "--operator", "conv2d", *DB)["held"] == 0


def of_size(record: TuningRecord, m: int, **fields: Any) -> TuningRecord:
    workload = dataclasses.replace(record.workload, dims={**record.workload.dims, "M": m})
    return dataclasses.replace(record, workload=workload, **fields)


def test_what_the_compiler_refuses_is_told_and_the_rest_is_built(
    cli: CommandLine, record: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "BuildPool", FakePool)
    with Store.open("sqlite:///winners.db") as store:
        store.put_winner(of_size(record, 3))
    code, out, err = cli.run("build", "--hardware", "h100", *DB)
    assert code == 1 and out.startswith("1 built, 0 held, 1 failed in ")
    assert "failed: matmul[K=4096,M=3,N=4096]" in err and "the compiler died" in err


def test_only_the_first_kernel_of_a_workload_is_built(record: TuningRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BuildPool", FakePool)
    vendor = of_size(record, 5, vendor_us=record.measurement.median_us / 2)
    older = dataclasses.replace(record, created_at="2020-01-01T00:00:00+00:00")
    done = build_winners([record, older, vendor], 2)
    assert [(one.record, one.outcome) for one in done] == [(record, "built")]
    assert build_winners([vendor], 2) == []
    with pytest.raises(ZeroDivisionError):
        build_winners([of_size(record, 4)], 2)
