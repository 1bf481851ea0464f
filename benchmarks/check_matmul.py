"""Is every matmul template right on the GPU here? Sampled schedules of many workloads against fp64.

    scripts/gpu-bench check-matmul --out check.json                         everything that issue a matmul can have
    scripts/gpu-bench check-matmul --templates stream_k --only chain,fp8    one template, some workloads
    scripts/gpu-bench check-matmul --sets core --only "square 4096" --per-template 40 --time

Prints little: one line for each pair of workload and template that has a failure (every pair with --time), and a table
by template. The JSON file has every trial. Ends with 1 when something failed. `--knobs block_m=128,num_stages=3` keeps
to schedules with these values, which runs a single one again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attention_problems
import conv2d_problems
import report
from matmul_cases import coverage, label
from problems import group, load_matmul
from verify_job import Case
from verify_runner import Checked, Checker, Choice

from kernelwright.kernels import get_operator
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.device import present_device
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Workload

SETS = ("coverage", "core", "extra", "awkward")

BODY_CHARACTERS = 8000
LINE_CHARACTERS = 230

HARMLESS = (Status.OK, Status.OUT_OF_RESOURCES)
"""Not counted as failures beside schedules that work: spaces estimate shared memory, and the compiler has the last
word."""

GROUPS: Mapping[str, Callable[[Workload], str]] = {
    "matmul": group,
    "conv2d": conv2d_problems.group,
    "attention": attention_problems.group,
}
LABELS: Mapping[str, Callable[[Workload], str]] = {"matmul": label, "conv2d": str, "attention": str}
"""The group under which results of an operator are summed up, and how its workloads are told in a line."""

CasesOf = Callable[[Sequence[str], str], list[Case]]


class Lines:
    """Prints up to a number of characters, and counts what it held back."""

    def __init__(self, limit: int, write: Callable[[str], None]) -> None:
        self._left, self._write = limit, write
        self.held_back = 0

    def __call__(self, text: str) -> None:
        short = text if len(text) <= LINE_CHARACTERS else text[: LINE_CHARACTERS - 3] + "..."
        if len(short) + 1 > self._left:
            self.held_back += 1
            return
        self._left -= len(short) + 1
        self._write(short)


def cases_of(sets: Sequence[str], only: str) -> list[Case]:
    """The cases of the sets whose id, tag or label has one of the words in it."""
    found: list[Case] = []
    for name in sets:
        if name == "coverage":
            found += coverage()
            continue
        for entry in load_matmul(name):
            fills = {tensor: spec["fill"] for tensor, spec in (entry.tensors or {}).items() if spec["fill"] != "randn"}
            found.append(Case(entry.id, entry.tag, entry.workload, fills))
    words = [word for word in only.split(",") if word]
    return [
        case
        for case in found
        if not words or any(word in f"{case.id} {case.tag} {label(case.workload)}" for word in words)
    ]


def able(cases: Sequence[Case], choice: Choice, device: DeviceSpec) -> list[Case]:
    """The cases that the chosen templates and knobs can run; all of them where none are chosen."""
    if not (choice.templates or choice.knobs):
        return list(cases)
    return [case for case in cases if any(choice.of(case.workload, device).values())]


def failures(results: Sequence[tuple[Schedule, Measurement]]) -> list[tuple[Schedule, Measurement]]:
    """Those that count as failures; all of them where none was right."""
    harmless = HARMLESS if any(m.ok for _, m in results) else ()
    return [(s, m) for s, m in results if m.status not in harmless]


def lines_of(checked: Checked, timed: bool) -> list[str]:
    """What to print of a case: each template with a failure, or with a time; and why it could not be run."""
    workload = checked.case.workload
    name = f"{checked.case.id[:24]} {LABELS[workload.operator](workload)}"
    if checked.error:
        return [f"NOT RUN {name}: {one_line(checked.error)}"]
    if not any(checked.results.values()):
        return [] if checked.left_out else [f"NO TEMPLATE {name}"]
    return [line for template in checked.results if (line := _line(checked, template, timed, name))]


def _line(checked: Checked, template: str, timed: bool, name: str) -> str:
    results = checked.results[template]
    bad = failures(results)
    if not results or not (bad or timed):
        return ""
    errors = [m.error for _, m in results if m.error is not None]
    text = f"{'FAIL' if bad else 'ok  '} {template} {len(results) - len(bad)}/{len(results)} {name}"
    text += f" err {max(errors):.1e}" if errors else ""
    best, ratio = checked.best(template), checked.ratio(template)
    if best is not None:
        text += f" {best[1]:.1f}us" + (f" x{ratio:.3f} of {checked.vendor}" if ratio is not None else "")
        text += f" {knobs_of(best[0])}" if not bad else ""
    if bad:
        schedule, measurement = bad[0]
        text += f" | {measurement.status.value}: {one_line(measurement.message)[-90:]} | {knobs_of(schedule)}"
    return text


def knobs_of(schedule: Schedule) -> str:
    """The knobs as --knobs takes them."""
    return ",".join(f"{name}={value}" for name, value in schedule.knobs.items())


def one_line(text: str) -> str:
    """A message without line breaks."""
    return " ".join(text.split())


def rows_of(checked: Checked) -> list[dict[str, Any]]:
    """The JSON rows of a case, one a template."""
    case = checked.case
    shared = {
        "id": case.id,
        "tag": case.tag,
        "family": case.workload.operator,
        "group": GROUPS[case.workload.operator](case.workload),
        "label": LABELS[case.workload.operator](case.workload),
        "workload": case.workload.to_json(),
        "vendor": checked.vendor,
        "vendor_us": checked.vendor_us,
        "not_run": checked.error,
        "left_out": checked.left_out,
    }
    rows = []
    for template, results in checked.results.items():
        best, ratio = checked.best(template), checked.ratio(template)
        trials = [{"schedule": s.to_json(), **m.to_json()} for s, m in results]
        rows.append(
            {
                **shared,
                "template": template,
                "ours_us": best[1] if best else None,
                "ratio": None if ratio is None else round(ratio, 4),
                "trials": trials,
            }
        )
    return rows


def table(done: Sequence[Checked]) -> list[str]:
    """A line a template: workloads, trials by status, worst error over the tolerance, geometric mean of the ratios."""
    lines = [f"{'template':<18} cases trials    ok wrong build resrc crash hang  worst/tol  ratio (n)"]
    for template in dict.fromkeys(name for checked in done for name in checked.results):
        own = [checked for checked in done if checked.results.get(template)]
        counts = Counter(m.status for checked in own for _, m in checked.results[template])
        worst = [
            m.error / tolerance
            for checked in own
            if (tolerance := get_operator(checked.case.workload.operator).tolerance(checked.case.workload))
            for _, m in checked.results[template]
            if m.ok and m.error is not None
        ]
        ratios = [ratio for checked in own if (ratio := checked.ratio(template))]
        shown = (Status.OK, Status.WRONG_RESULT, Status.BUILD_ERROR, Status.OUT_OF_RESOURCES, Status.CRASHED)
        figures = " ".join(f"{counts[status]:5}" for status in shown)
        mean = f"{report.geomean(ratios):6.3f} ({len(ratios)})" if ratios else "     -"
        lines.append(
            f"{template:<18} {len(own):5} {sum(counts.values()):6} {figures} {counts[Status.TIMEOUT]:4}"
            f"  {max(worst, default=math.nan):9.2f} {mean}"
        )
    return lines


def count_failures(done: Sequence[Checked]) -> int:
    """Trials that failed, cases that could not be loaded, and cases that no template takes."""
    single = sum(len(failures(results)) for checked in done for results in checked.results.values())
    return single + sum(bool(checked.error) or _untried(checked) for checked in done)


def _untried(checked: Checked) -> bool:
    return not checked.left_out and not any(checked.results.values())


def run(cases: Sequence[Case], checker: Checker, choice: Choice, seconds: float, timed: bool) -> list[Checked]:
    """Check and print."""
    end = time.monotonic() + seconds
    say = Lines(BODY_CHARACTERS, lambda text: print(text, flush=True))
    done: list[Checked] = []
    for checked in checker.check(cases, choice, end):
        done.append(checked)
        for line in lines_of(checked, timed):
            say(line)
    if say.held_back:
        print(f"... and {say.held_back} more lines; the JSON file has all")
    left = len(cases) - len(done)
    skipped = sum(checked.left_out for checked in done)
    if left or skipped:
        print(f"LEFT OUT {left} workloads and {skipped} schedules: out of time, or their template was given up")
    if checker.given_up:
        print(f"GIVEN UP after killing or hanging the child too often: {', '.join(checker.given_up)}")
    return done


def arguments(operator: str, sets: Sequence[str]) -> argparse.Namespace:
    """The command line; errors for sets and templates that are not there."""
    parser = argparse.ArgumentParser(description=f"Sampled schedules of many {operator} workloads against fp64.")
    parser.add_argument("--out", type=Path, help="JSON file with every trial")
    parser.add_argument("--sets", default="coverage,awkward", help=f"comma-separated, of {', '.join(sets)}")
    parser.add_argument("--only", default="", help="ids, tags or labels that contain one of these, comma-separated")
    parser.add_argument("--templates", default="", help="comma-separated; all by default")
    parser.add_argument("--knobs", default="", help="name=value, comma-separated: only schedules with these values")
    parser.add_argument("--per-template", type=int, default=3, help="schedules of each template and workload")
    parser.add_argument("--seed", type=int, default=0, help="of the operands and of the choice of schedules")
    parser.add_argument("--time", action="store_true", help="also time each schedule once, and the vendor call")
    parser.add_argument("--total-seconds", type=float, default=540)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compilers at once")
    args = parser.parse_args()
    args.sets, args.templates = args.sets.split(","), [name for name in args.templates.split(",") if name]
    unknown = [name for name in args.sets if name not in sets]
    unknown += [name for name in args.templates if name not in get_operator(operator).templates]
    if unknown:
        parser.error(f"no set or template is called {', '.join(unknown)}")
    args.knobs = dict(pair.split("=", 1) for pair in args.knobs.split(",") if pair)
    return args


def main(operator: str = "matmul", sets: Sequence[str] = SETS, cases_of: CasesOf = cases_of) -> int:
    """Check an operator's workloads of the sets asked for; the exit status."""
    args = arguments(operator, sets)
    began = time.monotonic()
    cases = cases_of(args.sets, args.only)
    choice = Choice(args.per_template, args.seed, args.templates, args.knobs)
    device = present_device(0)
    cases = able(cases, choice, device)
    child = ChildProcess("verify_job:start", init={"device_index": 0, "l2_bytes": device.l2_bytes})
    checker = Checker(device, BuildPool(args.workers), child, workers=args.workers, timed=args.time)
    try:
        done = run(cases, checker, choice, args.total_seconds, args.time)
    finally:
        checker.close()
    for line in table(done):
        print(line)
    failed = count_failures(done)
    rows = [row for checked in done for row in rows_of(checked)]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        written = {"command": report.command(sys.argv), "commit": report.commit(), "gpu": device.name, "rows": rows}
        args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    verdict = f"FAILED: {failed} failures" if failed else "RIGHT: no failure"
    print(f"{verdict} in {len(done)} of {len(cases)} workloads, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
