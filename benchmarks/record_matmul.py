"""Sweep matmul schedules on the GPU here and write every trial as JSON lines (gzip), workload by workload.

    python benchmarks/record_matmul.py --out trials.jsonl.gz --seconds 540

Each workload gets a sample of its space and then the neighbours of the best. Workloads that an existing --out
holds are left out, so that a sweep can be cut into slices. `python benchmarks/pack_recorded.py trials.jsonl.gz` turns
the file into the Parquet that the package ships.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from problems import Entry, group, load_matmul

from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.child_runner import ChildRunner
from kernelwright.search.sweep import sweep, uniform_choice
from kernelwright.types import Schedule, Trial, Workload

EXAMPLE = Entry("example", "the worked example of the README", matmul_workload(2048, 4096, 4096))
DENSE_PER_GROUP = 4


def recorded_workloads(path: Path) -> set[str]:
    """Keys of the workloads that the file already holds."""
    if not path.exists():
        return set()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {Workload.from_json(json.loads(line)["workload"]).key for line in lines}


def in_order(entries: Sequence[Entry], dense: int, sparse: int) -> list[tuple[Entry, int]]:
    """(entry, uniform sample size): the first DENSE_PER_GROUP workloads of each group densely, then all others."""
    seen: dict[str, int] = {}
    first, rest = [], []
    for entry in entries:
        name = group(entry.workload)
        seen[name] = seen.get(name, 0) + 1
        (first if seen[name] <= DENSE_PER_GROUP else rest).append(entry)
    return [(entry, dense) for entry in first] + [(entry, sparse) for entry in rest]


def sample(workload: Workload, runner: ChildRunner, count: int) -> list[Schedule]:
    """A third of the sample is what the analytic model expects to be fastest, the rest is uniform."""
    members = list(runner.space(workload))
    shares = RooflineModel().predict(workload, runner.device, members)
    ranked = sorted(zip(shares.tolist(), members, strict=True), key=lambda pair: (-pair[0], pair[1].key))
    expected = [schedule for _, schedule in ranked[: count // 3]]
    return list(dict.fromkeys([*expected, *uniform_choice(workload, runner, count - len(expected))]))


class Prefetch:
    """Compiles the samples of coming workloads into Triton's cache while earlier ones are measured."""

    def __init__(self, work: Sequence[tuple[Workload, list[Schedule]]], runner: ChildRunner, workers: int) -> None:
        self._pool = BuildPool(workers)
        self._ready = [threading.Event() for _ in work]
        self._thread = threading.Thread(target=self._run, args=(work, runner), daemon=True)
        self._thread.start()

    def _run(self, work: Sequence[tuple[Workload, list[Schedule]]], runner: ChildRunner) -> None:
        for (workload, schedules), ready in zip(work, self._ready, strict=True):
            for _ in self._pool.build_all(workload, schedules, runner.device):
                pass
            ready.set()

    def wait(self, place: int, seconds: float) -> None:
        """Wait until the workload at this place is compiled, at most so many seconds."""
        self._ready[place].wait(seconds)

    def close(self) -> None:
        """End the compilers."""
        self._pool.close()


def near_best(trials: Sequence[Trial], runner: ChildRunner, count: int) -> list[Schedule]:
    """Up to `count` unmeasured neighbours of the three best schedules."""
    done = {trial.schedule for trial in trials}
    timed = [
        (t.measurement.median_us, t.schedule.key, t.schedule) for t in trials if t.measurement.median_us is not None
    ]
    found: dict[Schedule, None] = {}
    for _, _, schedule in sorted(timed, key=lambda row: row[:2])[:3]:
        space = runner.space(trials[0].workload)
        found.update(dict.fromkeys(s for s in space.neighbours(schedule) if s not in done))
    return list(found)[:count]


def record(workload: Workload, runner: ChildRunner, schedules: Sequence[Schedule], deadline: float) -> list[Trial]:
    """All trials of one workload: the sample, neighbours of the best, and the finals with the vendor call."""
    trials = list(sweep(workload, runner, schedules, deadline, finals=False))
    more = near_best(trials, runner, len(schedules) // 3)
    return trials + list(sweep(workload, runner, more, deadline, known=trials))


def summary(trials: Sequence[Trial]) -> str:
    """One line: how many trials, how they ended, the best time of each template and the vendor's."""
    status: dict[str, int] = {}
    best: dict[str, float] = {}
    for trial in trials:
        status[trial.measurement.status.value] = status.get(trial.measurement.status.value, 0) + 1
        if trial.measurement.median_us is not None:
            name = trial.schedule.template
            best[name] = min(best.get(name, float("inf")), trial.measurement.median_us)
    return f"{status} | " + " ".join(f"{name}={us:.1f}" for name, us in best.items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default="core,extra")
    parser.add_argument("--only", default="", help="ids that contain this, comma-separated")
    parser.add_argument("--dense", type=int, default=180, help="sample size of the first workloads of each group")
    parser.add_argument("--sparse", type=int, default=60, help="sample size of the others")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--slice-seconds", type=float, default=40, help="at most this long a workload")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    end = time.monotonic() + args.seconds
    done = recorded_workloads(args.out)
    found = [EXAMPLE, *(entry for name in args.sets.split(",") for entry in load_matmul(name))]
    wanted = [word for word in args.only.split(",") if word]
    entries = [
        entry
        for key, entry in {entry.workload.key: entry for entry in found}.items()
        if key not in done and (not wanted or any(word in entry.id for word in wanted))
    ]
    runner = ChildRunner(compile_workers=5)
    work = [
        (entry.workload, sample(entry.workload, runner, count))
        for entry, count in in_order(entries, args.dense, args.sparse)
    ]
    prefetch = Prefetch(work, runner, 11)
    for place, (workload, schedules) in enumerate(work):
        if time.monotonic() > end - 15:
            break
        prefetch.wait(place, end - 15 - time.monotonic())
        begin = time.monotonic()
        trials = record(workload, runner, schedules, min(end - 5, begin + args.slice_seconds))
        with gzip.open(args.out, "at", encoding="utf-8") as lines:
            lines.writelines(json.dumps(trial.to_json()) + "\n" for trial in trials)
        print(
            f"{end - time.monotonic():5.0f}s left, took {time.monotonic() - begin:4.1f}s {workload} {summary(trials)}",
            flush=True,
        )
    prefetch.close()
    runner.close()


if __name__ == "__main__":
    sys.exit(main())
