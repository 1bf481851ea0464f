"""One list of workloads tuned by one GPU of this machine, then by several: trials a second, and as good kernels?

    scripts/gpu-bench fleet --out fleet.json                     24 matmuls of the core and extra sets, one GPU and all
    scripts/gpu-bench fleet --counts 1,2,4 --only "M=" --out fleet.json

Each number of devices runs `kernelwright tune --workloads` as users do, with a database and compiler caches of its
own, so that nobody profits from the one before. `trials_per_s` counts from the first trial to the last record, since
starting up (`start_s`: collecting devices, starting compilers) is paid once a run, however long. `quality` compares
the kernels that were found for the same workloads: geometric mean of one device's times over theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from problems import Entry, load_matmul

from kernelwright.db import Store
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import gpu_count, present_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import TuningRecord, Workload

LARGEST_FLOP = 1e11
"""Larger products keep a GPU busy for long whatever schedules them, and their fp64 references even longer."""

STOP_AFTER_S = 45.0
"""How far past its budget a run is let go on: starting up comes before, final rounds after."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a run left in its database. seconds: from the first trial to the last record."""

    trials: int
    seconds: float
    start_s: float
    records: Mapping[str, TuningRecord]


def chosen(count: int, only: str) -> list[Entry]:
    """The first `count` matmuls of the core and extra sets that are not too large, each workload once."""
    found = [entry for name in ("core", "extra") for entry in load_matmul(name)]
    words = [word for word in only.split(",") if word]
    kept = [entry for entry in found if not words or any(word in entry.id or word in entry.tag for word in words)]
    small = [entry for entry in kept if flop(entry.workload) <= LARGEST_FLOP]
    return list({entry.workload.key: entry for entry in small}.values())[:count]


def flop(workload: Workload) -> float:
    """Floating-point operations of one call."""
    return float(get_operator(workload.operator).work(workload).flops)


def tune(entries: Sequence[Entry], devices: int, trials: int, seconds: float) -> Tuned:
    """Tune in processes of their own and read what they stored."""
    with tempfile.TemporaryDirectory(prefix="kernelwright-fleet-") as folder:
        listed, db = Path(folder) / "workloads.jsonl", f"sqlite:///{folder}/tuned.db"
        lines = [json.dumps({"id": entry.id, "workload": entry.workload.to_json()}) for entry in entries]
        listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
        words = ["tune", "--workloads", str(listed), "--device", "cuda", "--devices", str(devices), "--db", db]
        words += ["--trials", str(trials), "--seconds", f"{seconds:g}", "--worth", "0", "--json"]
        began = time.time()
        subprocess.run(
            [sys.executable, "-m", "kernelwright.service.cli", *words],
            env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=seconds + STOP_AFTER_S,
        )
        with Store.open(db) as store:
            return read(store, began)


def read(store: Store, began: float) -> Tuned:
    """What a database holds. began: reading of `time.time` when the command was started."""
    trials = list(store.trials())
    # newest first: of several records of a workload the last one stays
    records = {record.workload.key: record for record in reversed(store.records(limit=None))}
    times = [seconds_of(trial.measured_at) for trial in trials]
    ends = [seconds_of(record.created_at) for record in records.values()]
    if not times or not ends:
        return Tuned(len(trials), 0.0, 0.0, records)
    return Tuned(len(trials), max(*ends, *times) - min(times), min(times) - began, records)


def seconds_of(stamp: str) -> float:
    """Seconds since 1970 of an ISO time."""
    return datetime.datetime.fromisoformat(stamp).timestamp()


def row_of(devices: int, run: Tuned, base: Tuned) -> dict[str, Any]:
    """A row of the result. ratio: trials a second over those of one device."""
    rate, alone = (one.trials / one.seconds if one.seconds else 0.0 for one in (run, base))
    both = sorted(run.records.keys() & base.records.keys())
    over = [best(base.records[key]) / best(run.records[key]) for key in both]
    return {
        "id": f"{devices} devices",
        "devices": devices,
        "trials": run.trials,
        "workloads": len(run.records),
        "seconds": round(run.seconds, 2),
        "start_s": round(run.start_s, 2),
        "trials_per_s": round(rate, 3),
        "ratio": round(rate / alone, 4) if alone else None,
        "quality": round(report.geomean(over), 4),
        "quality_worst": round(min(over, default=0.0), 4),
        "compared": len(both),
    }


def best(record: TuningRecord) -> float:
    """Microseconds of the record's kernel."""
    assert record.measurement.median_us is not None
    return record.measurement.median_us


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--counts", default="", help="numbers of devices, by commas; 1 and all where left out")
    parser.add_argument("--workloads", type=int, default=24)
    parser.add_argument("--only", default="", help="ids or tags that contain one of these, by commas")
    parser.add_argument("--trials", type=int, default=16, help="of each workload")
    parser.add_argument("--seconds", type=float, default=180, help="budget of each run")
    args = parser.parse_args()
    counts = [int(word) for word in args.counts.split(",") if word] or sorted({1, gpu_count()})
    entries, before = chosen(args.workloads, args.only), report.clocks()
    runs: dict[int, Tuned] = {}
    for devices in counts:
        runs[devices] = tune(entries, devices, args.trials, args.seconds)
        rows = [row_of(count, run, runs[counts[0]]) for count, run in runs.items()]
        print(rows[-1], flush=True)
        toolchain, device = current_toolchain(TIMER_VERSION), present_device(0)
        versions = {"driver": toolchain.driver, "torch": toolchain.torch, "triton": toolchain.triton}
        clocks = {"before": before, "after": report.clocks()}
        report.write(args.out, rows, gpu=device.name, gpus=gpu_count(), clocks=clocks, **versions)


if __name__ == "__main__":
    main()
