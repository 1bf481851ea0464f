"""One list of workloads tuned by one GPU of this machine, then by several: trials a second, and as good kernels?

    scripts/gpu-bench fleet --out fleet.json                     32 matmuls of the core and extra sets, one GPU and all
    scripts/gpu-bench fleet --counts 1,2,4 --only "M=" --out fleet.json

Each number of devices runs `kernelwright tune --workloads` as users do, with a database and compiler caches of its
own, so that nobody profits from the one before. `trials_per_s` counts from the first trial to the last record, with the
tail in which few searches are left; `steady_per_s` counts the time in which the trials from the first tenth to eight
tenths of all came. Starting up (`start_s`: collecting devices, starting compilers) is paid once a run, however long.
`busy` is the share of that time in which a device was asked something. `quality` compares the kernels that were found
for the same workloads: geometric mean of one device's times over theirs. The file is written anew every few seconds,
so that whatever ends the benchmark leaves what was done; a row that says `partial` was read from a run under way.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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

LOOK_S = 5.0
"""Between two looks at what a run under way has stored."""

STEADY = (0.1, 0.8)
"""Shares of all trials between which the steady rate is taken: after the first compilers, before the last searches."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a run left in its database. seconds: from the first trial to the last record. steady: trials a second in
    between, see STEADY. busy: seconds that devices were asked things, all together; None where the run did not tell.
    complete: whether it ended by itself."""

    trials: int
    seconds: float
    start_s: float
    records: Mapping[str, TuningRecord]
    steady: float = 0.0
    busy: float | None = None
    complete: bool = True


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


def tune(entries: Sequence[Entry], devices: int, trials: int, seconds: float, tell: Callable[[Tuned], None]) -> Tuned:
    """Tune in processes of their own and read what they stored. tell: is told every few seconds how far that is."""
    with tempfile.TemporaryDirectory(prefix="kernelwright-fleet-") as folder:
        listed, db, out = Path(folder) / "workloads.jsonl", f"sqlite:///{folder}/tuned.db", Path(folder) / "out.json"
        lines = [json.dumps({"id": entry.id, "workload": entry.workload.to_json()}) for entry in entries]
        listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
        words = ["tune", "--workloads", str(listed), "--device", "cuda", "--devices", str(devices), "--db", db]
        words += ["--trials", str(trials), "--seconds", f"{seconds:g}", "--worth", "0", "--json"]
        began = time.time()
        with Store.open(db) as store, out.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "kernelwright.service.cli", *words],
                env={**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton"},
                stdout=file,
            )
            try:
                while not _ended(process, LOOK_S) and time.time() < began + seconds + STOP_AFTER_S:
                    # whatever goes wrong with a look must not end the run
                    with contextlib.suppress(Exception):
                        tell(dataclasses.replace(read(store, began), complete=False))
            finally:
                _end(process)
            told = out.read_text(encoding="utf-8") if process.returncode == 0 else ""
            busy = sum(one["busy_s"] for one in json.loads(told)["fleet"]) if told else None
            return dataclasses.replace(read(store, began), busy=busy, complete=bool(told))


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        return process.wait(seconds) is not None
    except subprocess.TimeoutExpired:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a user would with Ctrl-C, and by force if that does not help."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    if not _ended(process, LOOK_S):
        process.kill()
        process.wait()


def read(store: Store, began: float) -> Tuned:
    """What a database holds. began: reading of `time.time` when the command was started."""
    trials = list(store.trials())
    # newest first: of several records of a workload the last one stays
    records = {record.workload.key: record for record in reversed(store.records(limit=None))}
    times = [seconds_of(trial.measured_at) for trial in trials]
    ends = [seconds_of(record.created_at) for record in records.values()]
    if not times or not ends:
        return Tuned(len(trials), 0.0, 0.0, records)
    return Tuned(len(trials), max(*ends, *times) - min(times), min(times) - began, records, steady_rate(times))


def steady_rate(times: Sequence[float]) -> float:
    """Trials a second between the STEADY shares of all trials; 0.0 of too few. times: when each was measured."""
    ordered = sorted(times)
    first, last = (int(share * (len(ordered) - 1)) for share in STEADY)
    spent = ordered[last] - ordered[first] if ordered else 0.0
    return (last - first) / spent if spent > 0 else 0.0


def seconds_of(stamp: str) -> float:
    """Seconds since 1970 of an ISO time."""
    return datetime.datetime.fromisoformat(stamp).timestamp()


def row_of(devices: int, run: Tuned, base: Tuned) -> dict[str, Any]:
    """A row of the result. ratio, steady_ratio: trials a second over those of one device."""
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
        "steady_per_s": round(run.steady, 3),
        "ratio": round(rate / alone, 4) if rate and alone else None,
        "steady_ratio": round(run.steady / base.steady, 4) if run.steady and base.steady else None,
        "busy": None if run.busy is None or not run.seconds else round(run.busy / run.seconds / devices, 4),
        **({} if run.complete else {"partial": True}),
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
    parser.add_argument("--workloads", type=int, default=32)
    parser.add_argument("--only", default="", help="ids or tags that contain one of these, by commas")
    parser.add_argument("--trials", type=int, default=16, help="of each workload")
    parser.add_argument("--seconds", type=float, default=150, help="budget of each run")
    args = parser.parse_args()
    counts = [int(word) for word in args.counts.split(",") if word] or sorted({1, gpu_count()})
    entries, toolchain, device = chosen(args.workloads, args.only), current_toolchain(TIMER_VERSION), present_device(0)
    versions = {"driver": toolchain.driver, "torch": toolchain.torch, "triton": toolchain.triton}
    runs: dict[int, Tuned] = {}
    before = report.clocks()

    def keep(devices: int, run: Tuned) -> list[dict[str, Any]]:
        runs[devices] = run
        rows = [row_of(count, one, runs[counts[0]]) for count, one in runs.items()]
        clocks = {"before": before, "after": report.clocks()}
        fields = {"gpu": device.name, "gpus": gpu_count(), "cores": os.cpu_count(), "clocks": clocks, **versions}
        report.write(args.out, rows, **fields)
        return rows

    for devices in counts:
        run = tune(entries, devices, args.trials, args.seconds, functools.partial(keep, devices))
        print(keep(devices, run)[-1], flush=True)


if __name__ == "__main__":
    main()
