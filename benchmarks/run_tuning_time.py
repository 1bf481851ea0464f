"""How long until a good kernel is stored, and how good is it? Matmuls on the GPU here.

    scripts/gpu-bench tuning-time --out tuning_time.json
    scripts/gpu-bench tuning-time --only "tp8 qkv,thousand" --trials 16 --long 120 --inductor 60 --out tuning_time.json

Each workload is tuned three times, from nothing known about it: in a fresh process with empty compiler caches
(`cold_s`, from its start to the record stored), in a process that is up (`warm_s`), with another seed, and for --long
seconds. The three winners and the vendor call are then timed in turns. `ratio` is the long search's time over that of
the cold one's winner (1: nothing was lost); `seeds_ratio` compares the winners of the two seeds. Inductor's
max-autotune compiles the same expression in a child of its own: `inductor_s`, and `inductor_ratio` is its time over
ours (cold). --timeline tells where the seconds of the cold and the warm search go: a summary here, every step in a file
beside --out.
"""

from __future__ import annotations

import argparse
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
import tuning_timeline
from inductor_job import comparable
from problems import Entry, load_matmul
from tuned_rows import Inductor, quiet

from kernelwright.cost_model import packaged_model
from kernelwright.db import Store
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.device import present_device
from kernelwright.kernels.steps import Collector, Step
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search import Budget
from kernelwright.search.child_runner import ChildRunner
from kernelwright.search.runner import Runner
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.service.tuning import TuneRequest, TuneResult, tune_and_store
from kernelwright.types import Schedule, Workload

WORDS = "tp8 qkv T2048,thousand,small hidden,GQA k/v,layer scale,M=197,K=4544"
COLD_TIMEOUT_S = 120.0
ONCE = Path(__file__).with_name("tune_once.py")

collected = Collector()
"""The steps of the warm searches."""


def tuned(runner: Runner, workload: Workload, budget: Budget, seed: int) -> TuneResult:
    """One search into a database of its own."""
    with Store.open("sqlite://") as store:
        return tune_and_store(store, runner, TuneRequest(workload, "model", budget, seed), quiet)


def cold(workload: Workload, trials: int, timeline: Path | None = None) -> tuple[float, Schedule]:
    """Seconds from the start of a fresh process to the record stored, and the winner. Compiler caches are empty."""
    with tempfile.TemporaryDirectory(prefix="kernelwright-cold-") as folder:
        job = json.dumps({"workload": workload.to_json(), "trials": trials, "timeline": timeline is not None})
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(ONCE), job],
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=COLD_TIMEOUT_S,
        )
        told = json.loads(done.stdout.splitlines()[-1])
        if timeline is not None:
            steps = [Step("python and imports", began, told["began"], told["process"])]
            steps += [Step(**step) for step in told["steps"]]
            tuning_timeline.tell(timeline, f"cold: {workload}", steps, began, told["stored_at"], told["process"])
        return told["stored_at"] - began, Schedule.from_json(told["schedule"])


def warm(runner: Runner, workload: Workload, trials: int, timeline: Path | None = None) -> TuneResult:
    """A search in this process, with another seed than the cold one's."""
    began = time.monotonic()
    result = tuned(runner, workload, Budget(trials), 1)
    if timeline is not None:
        steps, ended = collected.take(), time.monotonic()
        tuning_timeline.tell(timeline, f"warm: {workload}", steps, began, ended, os.getpid())
    return result


def row_of(
    entry: Entry,
    runner: Runner,
    inductor: Inductor | None,
    trials: int,
    long_s: float,
    timeline: Path | None = None,
) -> dict[str, Any]:
    """Tune three times and compare."""
    workload = entry.workload
    cold_s, first = cold(workload, trials, timeline)
    second = warm(runner, workload, trials, timeline)
    long = tuned(runner, workload, Budget(100_000, long_s), 2)
    schedules = [first, second.record.schedule, long.record.schedule]
    finals = runner.finals(workload, list(dict.fromkeys(schedules)))
    times = {schedule: measurement.median_us for schedule, measurement in finals.measurements}
    cold_us, warm_us, long_us = (times[schedule] for schedule in schedules)
    assert cold_us and warm_us and long_us, [m.message for _, m in finals.measurements]
    row = {
        "id": entry.id,
        "tag": entry.tag,
        "workload": str(workload),
        "ratio": round(long_us / cold_us, 4),
        "seeds_ratio": round(warm_us / cold_us, 4),
        "noise": round(finals.noise, 4),
        "cold_s": round(cold_s, 2),
        "warm_s": round(second.seconds, 2),
        "long_s": round(long.seconds, 2),
        "trials": trials,
        "long_trials": long.record.trials,
        "cold_us": cold_us,
        "warm_us": warm_us,
        "long_us": long_us,
        "vendor_us": None if finals.vendor_us is None else round(finals.vendor_us, 3),
        "aa_ratio": None if finals.aa_ratio is None else round(finals.aa_ratio, 4),
        "schedule": first.to_json(),
    }
    if inductor is None or not comparable(workload):
        return row
    compared = inductor.compare(entry, first)
    if isinstance(compared, str):
        return {**row, "inductor_ratio": None, "inductor_note": compared}
    inductor_ratio = round(compared.inductor_us / compared.ours_us, 4)
    return {**row, "inductor_s": round(compared.compile_s, 2), "inductor_ratio": inductor_ratio}


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The middle one of each time, over the rows that have it."""
    found = {}
    for name in ("cold_s", "warm_s", "inductor_s"):
        values = sorted(row[name] for row in rows if row.get(name) is not None)
        found[name] = values[len(values) // 2] if values else None
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=WORDS, help="ids or tags that contain one of these, by commas")
    parser.add_argument("--trials", type=int, default=24, help="of the short searches")
    parser.add_argument("--long", type=float, default=600, help="seconds of the long search")
    parser.add_argument("--inductor", type=float, default=0, help="seconds for Inductor's max-autotune")
    parser.add_argument("--total-seconds", type=float, default=1e9, help="start no workload after so long")
    parser.add_argument("--timeline", action="store_true", help="tell where the seconds go")
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out is needed")
    words = [word for word in args.only.split(",") if word]
    found = {e.workload.key: e for name in ("core", "extra") for e in load_matmul(name)}.values()
    entries = [entry for entry in found if any(word in entry.id or word in entry.tag for word in words)]
    end, clocks, rows = time.monotonic() + args.total_seconds, {"before": report.clocks()}, []
    timeline = args.out.with_suffix(".timeline.txt") if args.timeline else None
    if timeline is not None:
        timeline.unlink(missing_ok=True)
        collected.attach()
    runner, device = ChildRunner(), present_device(0)
    runner.warm_up()
    # a process that is up has loaded its model before
    packaged_model("matmul")
    collected.take()
    child = ChildProcess("inductor_job:start", init={"device_index": 0, "l2_bytes": device.l2_bytes})
    rival = Inductor(child, args.inductor) if args.inductor > 0 else None
    toolchain = current_toolchain(TIMER_VERSION)
    versions = {"driver": toolchain.driver, "torch": toolchain.torch, "triton": toolchain.triton}
    for entry in entries:
        if time.monotonic() > end:
            print("out of time; left out:", entry.tag, flush=True)
            continue
        rows.append(row_of(entry, runner, rival, args.trials, args.long, timeline))
        print(rows[-1], flush=True)
        clocks["after"] = report.clocks()
        report.write(args.out, rows, gpu=device.name, clocks=clocks, seconds=medians(rows), **versions)
    child.close()
    runner.close()


if __name__ == "__main__":
    main()
