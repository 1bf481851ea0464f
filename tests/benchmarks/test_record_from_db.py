"""What was tuned into a database becomes a recording that replays it, final round included."""

from __future__ import annotations

from pathlib import Path

from record_from_db import add

from kernelwright.db import Store
from kernelwright.search import Budget, ReplayRunner, load_recorded
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from tests.service.conftest import named_device, synthetic_trials


def test_a_tuned_database_is_recorded_once_and_replays_its_finals(tmp_path: Path) -> None:
    workload, device = WorkloadArgs("matmul", {"M": 2048, "N": 4096, "K": 4096}).workload(), named_device("h100")
    trials = synthetic_trials(workload, device)
    url = f"sqlite:///{tmp_path / 'tuned.db'}"
    request = TuneRequest(workload, "random", Budget(8))
    with Store.open(url) as store:
        tuned = tune_and_store(store, ReplayRunner(trials, device), request, lambda *_: None)
    counts = add(url, tmp_path / "recorded")
    assert counts == {f"{device.slug}/matmul": 8 + 2}
    assert add(url, tmp_path / "recorded") == counts
    again = ReplayRunner(load_recorded(tmp_path / "recorded" / device.slug / "matmul.parquet"), device)
    record = tuned.record
    finals = again.finals(workload, [record.schedule])
    assert (finals.vendor, finals.vendor_us) == (record.vendor, record.vendor_us)
    assert finals.measurements[0][1].median_us == record.measurement.median_us
    assert len(list(again.space(workload))) == 8
