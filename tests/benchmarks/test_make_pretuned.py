"""The set that ships is the one that the recordings give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.db import Store, pretuned
from kernelwright.search import load_recorded
from kernelwright.search.recorded import recorded_folder

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_pretuned.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pretuned", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_set_that_ships_is_the_winners_of_what_was_recorded(script: ModuleType, tmp_path: Path) -> None:
    trials = [trial for path in sorted((recorded_folder() / "h100").glob("*.parquet")) for trial in load_recorded(path)]
    with Store.open(f"sqlite:///{tmp_path / 'x.db'}") as store:
        pretuned.load_pretuned(store)
        shipped = {record.workload: record for record in store.records(limit=None)}
    assert set(shipped) == {trial.workload for trial in trials}, "run python benchmarks/make_pretuned.py"
    few = sorted(shipped, key=str)[::20]
    made = {record.workload: record for record in script.crowned([trial for trial in trials if trial.workload in few])}
    assert made == {workload: shipped[workload] for workload in few}, "run python benchmarks/make_pretuned.py"
