"""The set that ships is the one that the recordings give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.db import Store, pretuned
from kernelwright.search import load_recorded
from kernelwright.search.recorded import recorded_devices, recorded_folder

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_pretuned.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pretuned", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("slug", recorded_devices())
def test_the_set_that_ships_is_the_winners_of_what_was_recorded(script: ModuleType, tmp_path: Path, slug: str) -> None:
    paths = sorted((recorded_folder() / slug).glob("*.parquet"))
    trials = [trial for path in paths for trial in load_recorded(path) if trial.origin != script.CHECK]
    with Store.open(f"sqlite:///{tmp_path / 'x.db'}") as store:
        pretuned.load_pretuned(store)
        records = store.records(limit=None, device_key=trials[0].device.key)
    shipped = {record.workload: record for record in records}
    assert set(shipped) <= {trial.workload for trial in trials} and len(shipped) > 50
    few = sorted({trial.workload for trial in trials}, key=str)[::20]
    made = {record.workload: record for record in script.crowned([trial for trial in trials if trial.workload in few])}
    assert made == {w: shipped[w] for w in few if w in shipped}, "run python benchmarks/make_pretuned.py"
