"""The load script's parts: what it fills in is what a service answers from, and latencies are counted honestly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.db import Store
from kernelwright.kernels.device import named_device
from kernelwright.service.answering import Answers

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("report", "load_api", "load_fill", "load_service")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_a_filled_database_answers_every_question_as_measured(modules: dict[str, ModuleType]) -> None:
    fill = modules["load_fill"]
    with Store.open("sqlite://") as store:
        fill.fill(store, fill.Size(winners=60, trials=300))
        assert store.count_records() == 60
        assert store.count_trials() == {"ok": 300}
        known = fill.shapes(60)
        assert len(set(known)) == 60
        workload = fill._workload(known[17])
        assert len(list(store.trials(workload_key=workload.key))) == 5
        assert Answers(store).stored(workload, named_device("h100")).how == "measured"


def test_latency_figures(modules: dict[str, ModuleType]) -> None:
    outcome = modules["load_api"].Outcome([float(n) for n in range(1, 101)], errors=3, seconds=2.0)
    assert outcome.summary() == {
        "requests": 103, "errors": 3, "rate": 51.5, "p50_ms": 51.0, "p95_ms": 96.0, "p99_ms": 100.0, "max_ms": 100.0
    }  # fmt: skip


def test_questions_apart_are_told_apart(modules: dict[str, ModuleType]) -> None:
    told = modules["load_api"].Outcome([1.0, 2.0], errors=0, seconds=2.0, apart=[50.0]).summary()
    assert (told["requests"], told["max_ms"]) == (3, 2.0)
    assert told["apart"] == {"requests": 1, "p50_ms": 50.0, "p95_ms": 50.0, "p99_ms": 50.0, "max_ms": 50.0}
    load = modules["load_service"]
    mixed = load.kinds(load.Size(winners=2000))["mixed"]
    assert (len(mixed.paths), len(mixed.apart)) == (1000, 100) and mixed.apart <= set(mixed.paths)
    assert not mixed.apart & set(load.kinds(load.Size(winners=2000))["measured"].paths)


def test_the_summary_names_the_worst(modules: dict[str, ModuleType]) -> None:
    def row(p99: float, batch: float, errors: int) -> dict[str, object]:
        load = {kind: {"p99_ms": p99, "errors": errors} for kind in ("measured", "popular", "mixed")}
        return {"load": load, "batch_max_ms": batch, "rss_peak_mb": 300.0}

    summary = modules["load_service"].summarise([row(4.0, 90.0, 0), row(9.0, 60.0, 2)])
    assert summary["p99_ms"] == {"worst": 9.0, "must": 15.0}
    assert summary["batch_ms"] == {"worst": 90.0, "must": 150.0}
    assert summary["errors"] == 6
