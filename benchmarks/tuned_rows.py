"""Tunes the problems of a family on the GPU here, each beside the vendor call: rows, result file, plot, command line.

A row's ratio is the vendor's time over that of our best own kernel, whether it wins or not; `winner` says which of the
two the record names. `seconds` is the wall time from nothing known to the record stored. With --inductor the row's
times come from a round that Inductor's max-autotune takes part in, where it is done in that many seconds. The plot is
written beside the result, as <name>_roofline.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import roofline_plot
from inductor_job import Compared, CompareJob
from problems import Entry

from kernelwright.db import Store
from kernelwright.errors import KernelwrightError
from kernelwright.kernels.child_process import ChildProcess, ChildTimeout
from kernelwright.search import Budget
from kernelwright.search.child_runner import ChildRunner
from kernelwright.search.runner import Runner
from kernelwright.service.tuning import TuneRequest, TuneResult, tune_and_store
from kernelwright.types import Schedule, Trial, Workload


@dataclasses.dataclass(frozen=True)
class Family:
    """An operator's problems. group: the one group under which a workload is summed up; part_of: what it counts for
    besides; comparable: whether plain torch code says it, so that Inductor can compile it."""

    name: str
    group: Callable[[Workload], str]
    part_of: Callable[[Workload], Sequence[str]] = lambda workload: ()
    comparable: Callable[[Workload], bool] = lambda workload: False


def named(entries: Sequence[Entry], family: Family, only: str, groups: str) -> list[Entry]:
    """The entries whose id or tag contains one of the words `only`, and whose group is one of `groups`; an empty text
    holds nothing back."""
    words, wanted = ([word for word in text.split(",") if word] for text in (only, groups))
    found = [e for e in entries if not words or any(word in e.id or word in e.tag for word in words)]
    return [entry for entry in found if not wanted or family.group(entry.workload) in wanted]


def row_of(family: Family, entry: Entry, result: TuneResult) -> dict[str, Any]:
    """The row of one tuned workload."""
    record = result.record
    measurement = record.measurement
    return {
        "id": entry.id,
        "tag": entry.tag,
        "family": family.name,
        "group": family.group(entry.workload),
        "part_of": list(family.part_of(entry.workload)),
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


def with_inductor(row: dict[str, Any], compared: Compared | str) -> dict[str, Any]:
    """The row with the times of the round that Inductor took part in, or with why there was none."""
    if isinstance(compared, str):
        return {**row, "inductor_us": None, "inductor_ratio": None, "inductor_note": compared}
    share = None if row["roofline"] is None else row["roofline"] * row["ours_us"] / compared.ours_us
    return {
        **row,
        **dataclasses.asdict(compared),
        "ratio": round(compared.vendor_us / compared.ours_us, 4),
        "roofline": None if share is None else round(share, 4),
        "inductor_ratio": round(compared.inductor_us / compared.ours_us, 4),
    }


def line(row: Mapping[str, Any]) -> str:
    """One line for people."""
    ratio = "     -" if row["ratio"] is None else f"{row['ratio']:6.3f}"
    vendor = "        -" if row["vendor_us"] is None else f"{row['vendor_us']:9.2f}"
    theirs = f" inductor {row['inductor_ratio']:.3f}" if row.get("inductor_ratio") else ""
    return (
        f"{ratio} {row['winner']:6} {row['group']:9} {row['ours_us']:9.2f} us, vendor {vendor}{theirs}"
        f" {row['seconds']:5.1f} s {row['trials']:3} trials ({row['failed']} failed)"
        f" {row['schedule']['template']} {row['tag']}: {row['workload']}"
    )


def missing(
    family: Family, entries: Sequence[Entry], rows: Mapping[str, Mapping[str, Any]], inductor: bool
) -> list[Entry]:
    """The entries that have no row yet, or none with the column that is asked for."""

    def there(entry: Entry) -> bool:
        row = rows.get(entry.id)
        return row is not None and (not inductor or "inductor_us" in row or not family.comparable(entry.workload))

    return [entry for entry in entries if not there(entry)]


def quiet(trial: Trial, progress: object) -> None:
    """Nothing to say about single trials."""


class Inductor:
    """Times Inductor beside ours and the vendor's, in a child that is killed when compiling takes too long."""

    def __init__(self, child: ChildProcess, seconds: float) -> None:
        self._child, self._seconds = child, seconds

    def compare(self, entry: Entry, schedule: Schedule) -> Compared | str:
        """The times of one round, or in words why there are none."""
        try:
            compared: Compared = self._child.call(CompareJob(entry.workload, schedule, 0), self._seconds)
        except ChildTimeout:
            return f"not done in {self._seconds:g} s"
        except KernelwrightError as error:
            self._child.kill()
            return f"failed: {error}"[:300]
        return compared


@dataclasses.dataclass
class Bench:
    """What a run needs. end: a reading of `time.monotonic` after which no workload is begun."""

    family: Family
    store: Store
    runner: Runner
    strategy: str
    budget: Budget
    end: float
    inductor: Inductor | None = None

    def run(self, entries: Sequence[Entry], rows: dict[str, dict[str, Any]], save: Callable[[], object]) -> None:
        """Measure the entries into rows by id, print each, and call `save` after each."""
        for entry in entries:
            if time.monotonic() > self.end:
                print("out of time; left out:", entry.tag, flush=True)
                continue
            request = TuneRequest(entry.workload, self.strategy, self.budget)
            try:
                row = row_of(self.family, entry, tune_and_store(self.store, self.runner, request, quiet))
            except KernelwrightError as error:
                print(f"FAILED {entry.tag}: {error}", flush=True)
                continue
            if self.inductor is not None and self.family.comparable(entry.workload):
                compared = self.inductor.compare(entry, Schedule.from_json(row["schedule"]))
                row = with_inductor(row, compared)
            rows[entry.id] = row
            print(line(row), flush=True)
            save()


def arguments(description: str) -> argparse.Namespace:
    """The options that every family has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="ids or tags that contain this, comma-separated")
    parser.add_argument("--groups", default="", help="only workloads of these groups, comma-separated")
    parser.add_argument("--db", default="sqlite://", help="where trials and records go; in memory by default")
    parser.add_argument("--strategy", default="model")
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument(
        "--seconds", type=float, default=40, help="budget of each workload, the final round not counted"
    )
    parser.add_argument("--total-seconds", type=float, default=1e9, help="start no workload after so long")
    parser.add_argument(
        "--inductor", type=float, default=0, help="seconds for Inductor's max-autotune of each workload"
    )
    parser.add_argument("--keep", type=Path, help="a result file whose rows stay where they are not measured again")
    parser.add_argument("--resume", action="store_true", help="measure only what --keep has not")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("FILE.json", "OUT.svg"), help="only draw a result file")
    args = parser.parse_args()
    if args.out is None and args.plot is None:
        parser.error("--out or --plot is needed")
    return args


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a result file's rows."""
    title = f"{result['rows'][0]['family'].capitalize()} on {result['gpu']}: share of the roofline"
    path.write_text(roofline_plot.draw(result["rows"], title), encoding="utf-8")


def write(path: Path, rows: Sequence[Mapping[str, Any]], runner: Runner, clocks: Mapping[str, str]) -> dict[str, Any]:
    """Write the result file and its plot."""
    ratios = [row["aa_ratio"] for row in rows if row["aa_ratio"] is not None]
    toolchain = runner.toolchain
    result = report.write(
        path,
        rows,
        gpu=runner.device.name,
        driver=toolchain.driver,
        torch=toolchain.torch,
        triton=toolchain.triton,
        clocks=clocks,
        aa_ratio={
            "geomean": round(report.geomean(ratios), 4),
            "worst": max(ratios, key=lambda x: abs(x - 1), default=None),
        },
        seconds={"median": sorted(row["seconds"] for row in rows)[len(rows) // 2] if rows else None},
    )
    plot(result, path.with_name(f"{path.stem}_roofline.svg"))
    return result


def run(family: Family, chosen: Callable[[argparse.Namespace], list[Entry]], description: str) -> None:
    """The command line of a family. chosen: the entries that the options name."""
    args = arguments(description)
    if args.plot:
        plot(json.loads(args.plot[0].read_text(encoding="utf-8")), args.plot[1])
        return
    end = time.monotonic() + args.total_seconds
    clocks = {"before": report.clocks()}
    rows: dict[str, dict[str, Any]] = {}
    if args.keep and args.keep.exists():
        rows = {row["id"]: row for row in json.loads(args.keep.read_text(encoding="utf-8"))["rows"]}
    entries = chosen(args)
    if args.resume:
        entries = missing(family, entries, rows, args.inductor > 0)
    runner = ChildRunner()
    child = ChildProcess("inductor_job:start", init={"device_index": 0, "l2_bytes": runner.device.l2_bytes})
    rival = Inductor(child, args.inductor) if args.inductor > 0 else None
    bench = Bench(family, Store.open(args.db), runner, args.strategy, Budget(args.trials, args.seconds), end, rival)
    bench.run(entries, rows, lambda: write(args.out, list(rows.values()), runner, clocks))
    clocks["after"] = report.clocks()
    result = write(args.out, list(rows.values()), runner, clocks)
    child.close()
    runner.close()
    for name, figures in result["summary"].items():
        print(f"{name:10} {figures}", flush=True)
