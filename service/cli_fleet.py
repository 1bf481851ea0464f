"""`kernelwright tune --workloads FILE` and `tune model.py`: many workloads under one budget, on one or many GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.kernels.child_process import ChildProcess, ChildRaised
from kernelwright.search.campaign import Share, Standing, parse_shares
from kernelwright.search.fleet import Fleet, Member
from kernelwright.search.fleet_batch import Builders
from kernelwright.search.fleet_runner import FleetRunner, side_by_side
from kernelwright.search.local_fleet import local_fleet
from kernelwright.search.ray_runner import ray_fleet
from kernelwright.service.campaign import LATE_S, CampaignRun, Plan
from kernelwright.service.cli_output import print_json, print_table, to_stderr
from kernelwright.service.settings import Settings

RUNNERS = ("local", "ray")

ROWS = 24
"""Most workloads in the live table: those that take most of a step."""

_COLLECT = "kernelwright.compiler.collect:collect_file"
_COLLECT_TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True)
class Where:
    """Which devices: as typed, of this machine ("local") or of the Ray cluster at an address; count: most of each."""

    device: str
    runner: str = "local"
    address: str | None = None
    count: int | None = None


def is_model(operator: str | None) -> bool:
    """Whether what was typed for the operator is a Python file with a model."""
    return operator is not None and operator.partition(":")[0].endswith(".py")


def shares_of(model: str | None, workloads: Path | None, child: ChildProcess) -> list[Share]:
    """The workloads of a model's graphs, which `child` looks through, or of a file; UsageError when there are none."""
    if model is None:
        assert workloads is not None
        return parse_shares(_read(workloads))
    try:
        entries, left_out = child.call(model, _COLLECT_TIMEOUT_S)
    except ChildRaised as error:
        raise UsageError(f"{model} cannot be run to collect its workloads: {error}") from error
    for reason in left_out:
        to_stderr(f"left out {reason}")
    if not entries:
        raise UsageError(f"{model} has no product, convolution or attention that a kernel of ours could compute")
    return parse_shares(json.dumps(entries))


def tune_many(
    settings: Settings, where: Where, model: str | None, workloads: Path | None, plan: Plan, as_json: bool
) -> None:
    """Tune a model's workloads or a file's until the budget is spent or nothing more is worth it; Ctrl-C ends it with
    exit code 1."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.db))
        collector = stack.enter_context(ChildProcess(_COLLECT))
        # a model is looked through while the devices start; of a file it is told first what is wrong with it
        collecting = stack.enter_context(ThreadPoolExecutor(1)).submit(shares_of, model, workloads, collector)
        # whatever ends this ends the looking through
        stack.callback(collector.abandon)
        if model is None:
            collecting.result()
        fleet, builders = stack.enter_context(open_fleet(where, settings))
        shares = collecting.result()
        runs = [_run(store, fleet, slug, builders, shares, plan) for slug in fleet.slugs()]
        try:
            _follow(runs, fleet)
        except KeyboardInterrupt:
            for run in runs:
                run.stop()
            to_stderr("Stopped. The trials so far are stored; run the same command again to go on.")
            raise typer.Exit(1) from None
    reports = [report_of(run) for run in runs]
    if as_json:
        print_json({"devices": reports, "fleet": [_work_of(member) for member in fleet.members()]})
    else:
        for run in runs:
            print_table(table_of(run, len(shares)))
            typer.echo(_summary(run))


@contextlib.contextmanager
def open_fleet(where: Where, settings: Settings) -> Iterator[tuple[Fleet, Builders | None]]:
    """The devices and their compilers, given back at the end."""
    if where.runner not in RUNNERS:
        raise UsageError(f"runner must be one of {', '.join(RUNNERS)}, got {where.runner!r}")
    if where.runner == "ray":
        fleet, builders = ray_fleet(where.device, address=where.address, count=where.count, recorded=settings.recorded)
    else:
        fleet, builders = local_fleet(where.device, where.count, recorded=settings.recorded)
    try:
        yield fleet, builders
    finally:
        fleet.close()
        if builders is not None:
            builders.close()


@contextlib.contextmanager
def open_whole_fleet(where: Where, settings: Settings) -> Iterator[FleetRunner]:
    """All devices of a fleet as one runner, for the search of a single workload."""
    with open_fleet(where, settings) as (fleet, builders):
        slugs = fleet.slugs()
        if len(slugs) > 1:
            raise UsageError(f"one workload is tuned on one kind of device, got {', '.join(slugs)}; name one of them")
        yield FleetRunner(fleet, slugs[0], builders=builders, width=len(fleet.members(slugs[0])))


def report_of(run: CampaignRun) -> dict[str, Any]:
    """What a run came to, for --json."""
    campaign = run.campaign
    return {
        "hardware": run.device.slug,
        "new_trials": run.trials,
        "step_us_before": round(campaign.started_us(), 3),
        "step_us_now": round(campaign.total_us(), 3),
        "workloads": [
            {
                "workload": standing.share.workload.to_json(),
                "calls": standing.share.calls,
                "trials": standing.trials,
                "new_trials": standing.new_trials,
                "best_us": standing.best_us,
                "vendor_us": standing.vendor_us,
                "saved_us": round(standing.saved_us, 3),
                "failure": standing.failure or None,
            }
            for standing in campaign.standings
        ],
    }


def _work_of(member: Member) -> dict[str, Any]:
    """What one device of the fleet did, for --json."""
    return {"name": member.name, "hardware": member.slug, "calls": member.calls, "busy_s": round(member.busy_s, 3)}


def table_of(run: CampaignRun, rows: int = ROWS) -> Table:
    """The workloads that take most of a step, with what was found."""
    table = Table(box=None, pad_edge=False, title=run.device.name, title_justify="left")
    for heading in ("workload", "calls", "trials", "ours us", "vendor us", "saved us", ""):
        table.add_column(heading, justify="left" if heading in ("workload", "") else "right")
    busy = run.busy
    heaviest = sorted(run.campaign.standings, key=lambda one: -one.share.calls * one.started_us)
    for standing in heaviest[:rows]:
        state = "failed" if standing.failure else "tuning" if any(standing is one for one in busy) else ""
        table.add_row(
            Text(str(standing.share.workload)),
            f"{standing.share.calls:g}",
            str(standing.trials),
            _us(standing.best_us),
            _us(standing.vendor_us),
            f"{standing.saved_us:.1f}" if standing.trials else "",
            state,
        )
    return table


def _run(
    store: Store, fleet: Fleet, slug: str, builders: Builders | None, shares: Sequence[Share], plan: Plan
) -> CampaignRun:
    def opened() -> FleetRunner:
        return FleetRunner(fleet, slug, builders=builders)

    return CampaignRun(store, opened, len(fleet.members(slug)), shares, plan, side_by_side(builders))


def _follow(runs: Sequence[CampaignRun], fleet: Fleet) -> None:
    """Show a live table on a terminal, and a line for each finished round elsewhere, until all runs are done."""
    console = Console(stderr=True)
    told: dict[int, int] = {}
    given_up = False
    for run in runs:
        run.start()
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else _Quiet() as live:
        try:
            while not all([run.wait(0.25) for run in runs]):
                if any(run.late for run in runs) and not given_up:
                    given_up = True
                    _give_up(runs, fleet)
                live.update(Group(*(part for run in runs for part in (table_of(run), _summary(run)))))
                _tell_rounds(runs, told, console.is_terminal)
            _tell_rounds(runs, told, console.is_terminal)
        except BaseException:
            for run in runs:
                run.stop()
            raise
    for member in fleet.members() if not given_up else ():
        if member.state == "aside":
            to_stderr(f"{member.name} was set aside: {member.reason}")


def _give_up(runs: Sequence[CampaignRun], fleet: Fleet) -> None:
    """End what is still under way, long after the budget was spent."""
    names = ", ".join(str(standing.share.workload) for run in runs for standing in run.busy)
    to_stderr(f"Ended {LATE_S:g} s after the budget, with searches under way: {names}. Their trials so far are stored.")
    for run in runs:
        run.give_up()
    fleet.close()


class _Quiet:
    """Stands in for a live table where there is no terminal."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, shown: object) -> None:
        """Nothing."""


def _tell_rounds(runs: Sequence[CampaignRun], told: dict[int, int], terminal: bool) -> None:
    for run in runs:
        for standing in run.campaign.standings:
            if not terminal and standing.new_trials != told.get(id(standing), 0):
                told[id(standing)] = standing.new_trials
                to_stderr(_line(standing))
            if standing.failure and told.get(id(standing)) != -1:
                told[id(standing)] = -1
                to_stderr(f"{standing.share.workload}: {standing.failure}")


def _line(standing: Standing) -> str:
    times = f"ours {_us(standing.best_us)} us, vendor {_us(standing.vendor_us)} us"
    return f"{standing.share.workload}: {standing.trials} trials, {times}, saves {standing.saved_us:.1f} us a step"


def _summary(run: CampaignRun) -> str:
    before, now = run.campaign.started_us(), run.campaign.total_us()
    share = 100 * (1 - now / before) if before else 0.0
    return f"{run.trials} new trials; a step takes {now:.1f} us of {before:.1f} us, {share:.2f} % saved"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--workloads must be a file with workloads as JSON, but it cannot be read: {error}"
        ) from error
