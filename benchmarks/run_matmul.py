"""Tune matmuls on the GPU here and compare each winner with the vendor call, in turns in one final round.

    scripts/gpu-bench matmul --out matmul.json                    the sixteen of the spine
    scripts/gpu-bench matmul --all --trials 32 --out matmul.json  everything in core and extra that we compute

A row's ratio is the vendor's time over that of our best own kernel, whether it wins or not; `winner` says which of the
two the record names. `seconds` is the wall time from nothing known to the record stored.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import report
from problems import Entry, group, load_matmul

from kernelwright.db import Store
from kernelwright.errors import NoWorkingSchedule
from kernelwright.search import Budget
from kernelwright.search.child_runner import ChildRunner
from kernelwright.service.tuning import TuneRequest, TuneResult, tune_and_store
from kernelwright.types import Trial

SIXTEEN = (
    "square 4096",
    "prefill up/gate, compute bound",
    "70B down proj",
    "synthetic square 8192",
    "decode M=1",
    "decode M=1 lm_head",
    "decode M=8",
    "llama70b tp8 qkv T16",
    "router",
    "gpt2 vocab unpadded",
    "odd all dims",
    "odd K",
    "odd N",
    "vocab 30522",
    "tall K",
    "tall K tiny",
)
"""Tags of the workloads that the spine is judged by: compute-bound, skinny, unaligned, tall K."""


def chosen(everything: bool, only: str) -> list[Entry]:
    """The entries to run, those of the spine first."""
    found = {entry.workload.key: entry for name in ("core", "extra") for entry in load_matmul(name)}
    entries = sorted(found.values(), key=lambda e: SIXTEEN.index(e.tag) if e.tag in SIXTEEN else len(SIXTEEN))
    words = [word for word in only.split(",") if word]
    if words:
        return [entry for entry in entries if any(word in entry.id or word in entry.tag for word in words)]
    return entries if everything else [entry for entry in entries if entry.tag in SIXTEEN]


def row_of(entry: Entry, result: TuneResult) -> dict[str, Any]:
    """The row of one tuned workload."""
    record = result.record
    measurement = record.measurement
    return {
        "id": entry.id,
        "tag": entry.tag,
        "family": "matmul",
        "group": group(entry.workload),
        "workload": str(entry.workload),
        "dropped": list(entry.dropped),
        "ours_us": measurement.median_us,
        "vendor_us": None if record.vendor_us is None else round(record.vendor_us, 3),
        "vendor": record.vendor,
        "ratio": None if record.speedup is None else round(record.speedup, 4),
        "winner": record.winner,
        "noise": round(record.noise, 4),
        "aa_ratio": None if record.aa_ratio is None else round(record.aa_ratio, 4),
        "roofline": None if record.roofline is None else round(record.roofline, 4),
        "error": measurement.error,
        "schedule": record.schedule.to_json(),
        "trials": record.trials,
        "failed": result.failed_trials,
        "seconds": round(result.seconds, 2),
    }


def line(row: dict[str, Any]) -> str:
    """One line for people."""
    return (
        f"{row['ratio']:6.3f} {row['winner']:6} {row['group']:9} {row['ours_us']:9.2f} us,"
        f" vendor {row['vendor_us']:9.2f} {row['seconds']:5.1f} s"
        f" {row['trials']:3} trials ({row['failed']} failed) {row['workload']}"
    )


def quiet(trial: Trial, progress: object) -> None:
    """Nothing to say about single trials."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="ids or tags that contain this, comma-separated")
    parser.add_argument("--db", default="sqlite://", help="where trials and records go; in memory by default")
    parser.add_argument("--strategy", default="model")
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument(
        "--seconds", type=float, default=40, help="budget of each workload, the final round not counted"
    )
    parser.add_argument("--total-seconds", type=float, default=1e9, help="start no workload after so long")
    parser.add_argument("--keep", type=Path, help="a result file whose rows stay where they are not measured again")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    end = time.monotonic() + args.total_seconds
    before = report.clocks()
    store, runner = Store.open(args.db), ChildRunner()
    rows: dict[str, dict[str, Any]] = {}
    if args.keep:
        rows = {row["id"]: row for row in json.loads(args.keep.read_text(encoding="utf-8"))["rows"]}
    for entry in chosen(args.all, args.only):
        if time.monotonic() > end:
            print("out of time; left out:", entry.tag, flush=True)
            continue
        request = TuneRequest(entry.workload, args.strategy, Budget(args.trials, args.seconds))
        try:
            rows[entry.id] = row_of(entry, tune_and_store(store, runner, request, quiet))
            print(line(rows[entry.id]), flush=True)
        except NoWorkingSchedule as error:
            print(f"FAILED {entry.tag}: {error}", flush=True)
    ratios = [row["aa_ratio"] for row in rows.values() if row["aa_ratio"] is not None]
    toolchain = runner.toolchain
    result = report.write(
        args.out,
        list(rows.values()),
        gpu=runner.device.name,
        driver=toolchain.driver,
        torch=toolchain.torch,
        triton=toolchain.triton,
        clocks={"before": before, "after": report.clocks()},
        aa_ratio={
            "geomean": round(report.geomean(ratios), 4),
            "worst": max(ratios, key=lambda x: abs(x - 1), default=None),
        },
        seconds={"median": sorted(row["seconds"] for row in rows.values())[len(rows) // 2] if rows else None},
    )
    runner.close()
    for name, figures in result["summary"].items():
        print(f"{name:10} {figures}", flush=True)


if __name__ == "__main__":
    main()
