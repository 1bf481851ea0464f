"""Sweep matmul schedules on the GPU here and write every trial as JSON lines (gzip), workload by workload.

    python benchmarks/record_matmul.py --out trials.jsonl.gz --per-workload 300 --seconds 500

Runs again with the same --out to go on where it stopped: workloads that are in the file are left out.
`python benchmarks/pack_recorded.py trials.jsonl.gz` turns the file into the Parquet that the package ships.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

from problems import Entry, load_matmul

from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.child_runner import ChildRunner
from kernelwright.search.sweep import sweep, uniform_choice
from kernelwright.types import Trial, Workload

EXAMPLE = Entry("example", "the worked example of the README", matmul_workload(2048, 4096, 4096))


def recorded_workloads(path: Path) -> set[str]:
    """Keys of the workloads that the file already holds."""
    if not path.exists():
        return set()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {Workload.from_json(json.loads(line)["workload"]).key for line in lines}


def record(entry: Entry, runner: ChildRunner, count: int, deadline: float) -> list[Trial]:
    """All trials of one workload: up to `count` schedules, the finalists and the vendor call."""
    schedules = uniform_choice(entry.workload, runner, count)
    return list(sweep(entry.workload, runner, schedules, deadline))


def summary(trials: list[Trial]) -> str:
    """One line: how many trials, how they ended, the best time of each template and the vendor's."""
    status: dict[str, int] = {}
    best: dict[str, float] = {}
    for trial in trials:
        status[trial.measurement.status.value] = status.get(trial.measurement.status.value, 0) + 1
        if trial.measurement.median_us is not None:
            name = trial.schedule.template
            best[name] = min(best.get(name, float("inf")), trial.measurement.median_us)
    times = " ".join(f"{name}={us:.1f}" for name, us in best.items())
    return f"{sum(status.values())} {status} | {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default="core,extra")
    parser.add_argument("--only", default="", help="ids that contain this, comma-separated")
    parser.add_argument("--per-workload", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--slice-seconds", type=float, default=60, help="at most this long a workload")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    done = recorded_workloads(args.out)
    found = [EXAMPLE, *(entry for name in args.sets.split(",") for entry in load_matmul(name))]
    entries = {entry.workload.key: entry for entry in found}
    wanted = [word for word in args.only.split(",") if word]
    runner = ChildRunner()
    for key, entry in entries.items():
        if key in done or (wanted and not any(word in entry.id for word in wanted)):
            continue
        if time.monotonic() > end - 10:
            break
        begin = time.monotonic()
        trials = record(entry, runner, args.per_workload, min(end - 5, begin + args.slice_seconds))
        with gzip.open(args.out, "at", encoding="utf-8") as lines:
            lines.writelines(json.dumps(trial.to_json()) + "\n" for trial in trials)
        print(f"{time.monotonic() - begin:5.1f}s {entry.workload} {summary(trials)}", flush=True)
    runner.close()


if __name__ == "__main__":
    sys.exit(main())
