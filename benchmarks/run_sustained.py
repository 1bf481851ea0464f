"""Does a winner stay ahead when it runs on and on? Calls in turns, as tuning compares them, beside blocks of each.

    scripts/gpu-bench sustained --db sqlite:///team.db --only "B=8" --out sustained.json

A card that reaches its power limit lowers its clock, and a kernel that draws more loses more. Turns of two calls do not
show this, since both contenders then run at one clock. `turns` is the vendor's time over ours with both in turns,
`ratio` the same with each running alone for `--block` seconds, the first half of which is not counted. `clocks` are
read behind a block of each. Values do matter: `--zeros` writes zeros to that share of the rows of a product's left
operand.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import report

from kernelwright.db import Store
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import present_device
from kernelwright.kernels.operator import launch_all
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import TuningRecord

CALLS = {"turns": 2, "blocks": 20}
"""Calls in one CUDA graph."""

TURNS = 60

BLOCKS = 4
"""Of each contender, in turns."""

Timed = Callable[[int], float]
"""Microseconds of one call, of so many replays of its graph."""


def compare(short: Mapping[str, Timed], long: Mapping[str, Timed], block_s: float) -> dict[str, Any]:
    """Times of contenders by name, in turns (`short`) and in blocks (`long`), and clocks behind their last block."""
    turns: dict[str, list[float]] = {name: [] for name in short}
    for _ in range(TURNS):
        for name, timed in short.items():
            turns[name].append(timed(1))
    turns_us = {name: statistics.median(found) for name, found in turns.items()}
    blocks: dict[str, list[float]] = {name: [] for name in long}
    clocks = {}
    for _ in range(BLOCKS):
        for name, timed in long.items():
            half = max(1, int(block_s * 1e6 / 2 / turns_us[name] / CALLS["blocks"]))
            timed(half)
            blocks[name].append(timed(half))
            clocks[name] = report.clocks()
    return {"turns_us": turns_us, "blocks_us": {n: statistics.median(v) for n, v in blocks.items()}, "clocks": clocks}


def row_of(record: TuningRecord, block_s: float, zeros: float) -> dict[str, Any] | None:
    """One record: its kernel and the vendor's call on the same operands; None where this machine's libraries have no
    such call."""
    operator, workload, schedule = get_operator(record.workload.operator), record.workload, record.schedule
    operands = operator.make_inputs(workload, 0, "cuda")
    if zeros and "a" in operands:
        rows = operands["a"].shape[-2]
        operands["a"][..., rows - round(zeros * rows) :, :] = 0
    vendor = operator.vendor(workload, operands)
    if vendor is None:
        return None
    launches = operator.plan(workload, schedule, operands, operator.empty_output(workload, "cuda"))
    calls = {"ours": lambda: launch_all(launches), "vendor": vendor[1]}
    short, long = ({name: replayed(one, CALLS[kind]) for name, one in calls.items()} for kind in ("turns", "blocks"))
    found = compare(short, long, block_s)
    ratios = {
        field: round(found[times]["vendor"] / found[times]["ours"], 4)
        for field, times in (("turns", "turns_us"), ("ratio", "blocks_us"))
    }
    return {
        "workload": str(workload),
        "schedule": str(schedule),
        "vendor": vendor[0],
        "zeros": zeros,
        **ratios,
        **found,
    }


def replayed(call: Callable[[], Any], count: int) -> Timed:
    """Captures `count` calls in a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()

    def timed(replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count / replays

    return timed


def chosen(records: Sequence[TuningRecord], only: str, least_us: float) -> list[TuningRecord]:
    """Records with a vendor's call whose workload has one of the words of `only`, the newest of each, longest kernel
    first; shorter ones than `least_us` are left out, as no card heats up by them alone."""
    words = [word for word in only.split(",") if word]
    newest = {one.workload.key: one for one in sorted(records, key=lambda one: one.created_at) if one.vendor}
    kept = [one for one in newest.values() if not words or any(word in str(one.workload) for word in words)]
    return sorted((one for one in kept if _us(one) >= least_us), key=_us, reverse=True)


def _us(record: TuningRecord) -> float:
    return record.measurement.median_us or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--db", required=True, help="a database with records of this GPU")
    parser.add_argument("--only", default="", help="words of workloads, by commas; one of them is enough")
    parser.add_argument("--least-us", type=float, default=200.0, help="kernels shorter than this are left out")
    parser.add_argument("--most", type=int, default=20, help="at most so many records, the longest kernels")
    parser.add_argument("--block", type=float, default=0.4, help="seconds of a block")
    parser.add_argument("--zeros", type=float, default=0.0, help="share of the rows of a product's left operand")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device, toolchain = present_device(), current_toolchain(TIMER_VERSION)
    with Store.open(args.db) as store:
        records = [record for record in store.records(limit=None) if record.device.key == device.key]
    before, rows = report.clocks(), []
    for record in chosen(records, args.only, args.least_us)[: args.most]:
        row = row_of(record, args.block, args.zeros)
        if row is None:
            continue
        rows.append(row)
        print({name: row[name] for name in ("workload", "turns", "ratio", "clocks")}, flush=True)
        fields = {"gpu": device.name, "clocks": {"before": before, "after": report.clocks()}}
        versions = {"driver": toolchain.driver, "torch": toolchain.torch, "triton": toolchain.triton}
        report.write(args.out, rows, **fields, **versions)
    if not rows:
        wanted = f"--only '{args.only}' and --least-us {args.least_us:g}"
        parser.error(f"{args.db} has no record of {device.name} for {wanted}")


if __name__ == "__main__":
    main()
