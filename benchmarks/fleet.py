"""What a fleet costs and brings, on this machine without GPUs: recorded devices that take as long as the real one did.

    python benchmarks/fleet.py                    everything, about six minutes
    python benchmarks/fleet.py scaling --most 4   only that part

scaling: 1 to 16 recorded H100s as actors of a Ray cluster on this machine, tuning side by side into one SQLite file.
machine: 1 to 16 GPUs as fast as an H200, in machines of two with 32 cores that compile, for 20 seconds each.
list: one and two of these GPUs with the same list of 32 workloads, 16 trials each, to its end.
budget: one budget for many workloads against the same number of trials for each, on the recorded H100.
costs and simulation: what trials cost the driver and the databases here, and from that 1,000 devices of 5 kinds with
10,000 workloads, event by event. Results go to benchmarks/results/cpu/fleet.json.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report
from fleet_pace import Compilers, Device
from fleet_simulation import Costs, Installation, simulate
from load_service import new_postgresql

from kernelwright.db import JobRequest, Store
from kernelwright.search import ReplayRunner, load_recorded, recorded_path
from kernelwright.search.campaign import FIRST_ROUND, Share
from kernelwright.search.fleet import Fleet
from kernelwright.search.fleet_runner import FleetRunner, side_by_side
from kernelwright.search.local_fleet import LocalLink
from kernelwright.search.paced_runner import FINALS_S, seconds_of
from kernelwright.search.ray_runner import ray_fleet
from kernelwright.service.campaign import CampaignRun, Plan
from kernelwright.types import VENDOR_TEMPLATE, Trial

OUT = Path(__file__).resolve().parent / "results" / "cpu" / "fleet.json"
SPEC = "replay:h100"
# Two rounds: 16 trials and a final round, 16 more and another.
TRIALS = 32
SECONDS = 16.0
CALLS = (1, 64)
PAGE = 64
COUNTS = (1, 2, 4, 8, 16)
CORES, MACHINE_S, LISTED = 32, 20.0, 32
KINDS, DEVICES, WORKLOADS = 5, 1000, 10_000


def recording() -> list[Trial]:
    """The packaged trials of the H100."""
    return load_recorded(recorded_path("h100"))


def shares(trials: Sequence[Trial], least: int) -> list[Share]:
    """The recorded workloads with at least so many schedules, each with calls of its own, drawn once."""
    rng = random.Random(9)
    runner = ReplayRunner(trials, trials[0].device)
    counts = Counter(
        trial.workload for trial in {(t.workload, t.schedule): t for t in trials}.values() if _is_ours(trial)
    )
    found = [workload for workload in runner.workloads if counts[workload] >= least]
    low, high = CALLS
    return [Share(workload, round(low * (high / low) ** rng.random())) for workload in found]


def _is_ours(trial: Trial) -> bool:
    return trial.schedule.template != VENDOR_TEMPLATE


def scaling(counts: Sequence[int], strategies: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """For each number of devices, over SECONDS of work without end: trials a second, and the share of the devices' time
    that went into trials and final rounds. The rows so far, each time one is done."""
    trials = recording()
    times = {(t.workload, t.schedule): t.measurement for t in trials}
    ray = _cluster(max(counts))
    rows: list[dict[str, Any]] = []
    for strategy in strategies:
        alone = 0.0
        for count in counts:
            fleet, _ = ray_fleet(SPEC, count=count, pace=1.0)
            with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/t.db") as store:
                plan = Plan(strategy, trials=TRIALS, seconds=SECONDS, worth=0)
                runner = functools.partial(FleetRunner, fleet, "h100")
                run = CampaignRun(store, runner, count, shares(trials, TRIALS), plan, side_by_side(None))
                spent = _timed(run)
                paced = sum(seconds_of(times[trial.workload, trial.schedule]) for trial in store.trials())
                finals = sum(rounds(standing.new_trials) for standing in run.campaign.standings)
                row = _scaling_row(strategy, count, run.trials, spent, paced + FINALS_S * finals)
            fleet.close()
            alone = alone or row["busy"]
            rows.append({**row, "efficiency": round(row["busy"] / alone, 4)})
            print(rows[-1], flush=True)
            yield rows
    ray.shutdown()


def rounds(trials: int) -> int:
    """In how many rounds a campaign makes so many trials of a workload, each with a final round."""
    reached = count = 0
    while reached < trials:
        reached, count = max(FIRST_ROUND, 2 * reached), count + 1
    return count


def machine(counts: Sequence[int], plan: Plan, workloads: int | None = None) -> Iterator[list[dict[str, Any]]]:
    """Trials a second with so many GPUs, and CORES cores for each two of them, of all workloads or the first so many.
    efficiency: trials a second of a device over those of one alone. The rows so far, each time one is done."""
    trials = recording()
    rows: list[dict[str, Any]] = []
    for count in counts:
        cores = max(CORES, count * CORES // 2)
        compilers = Compilers(cores - 1)
        # one for each device: what lies on it is its own
        links = {f"gpu{n}": LocalLink(functools.partial(Device, trials, trials[0].device)) for n in range(count)}
        fleet = Fleet(links)
        with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/t.db") as store:
            runner = functools.partial(FleetRunner, fleet, "h100", builders=compilers)
            work = shares(trials, TRIALS)[:workloads]
            run = CampaignRun(store, runner, count, work, plan, side_by_side(compilers))
            wall, cpu = _timed(run)
        busy = sum(member.busy_s for member in fleet.members())
        fleet.close()
        compilers.close()
        rate = run.trials / wall
        alone = rows[0]["trials_per_s"] / rows[0]["devices"] if rows else rate / count
        rows.append(
            {
                "devices": count,
                "cores": cores,
                "trials": run.trials,
                "seconds": round(wall, 2),
                "trials_per_s": round(rate, 2),
                "efficiency": round(rate / count / alone, 3),
                "devices_busy": round(busy / wall / count, 4),
                "compilers_busy": round(compilers.seconds / wall / (cores - 1), 4),
                "driver_busy": round(cpu / wall, 4),
            }
        )
        print(rows[-1], flush=True)
        yield rows


def _timed(run: CampaignRun) -> tuple[float, float]:
    """(wall, processor seconds of this process) of a run."""
    cpu, began = time.process_time(), time.monotonic()
    run.start()
    while not run.wait(60.0):
        pass
    return time.monotonic() - began, time.process_time() - cpu


def _cluster(devices: int) -> Any:
    import ray

    ray.init(num_cpus=2, resources={SPEC: devices}, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return ray


def _scaling_row(strategy: str, count: int, trials: int, spent: tuple[float, float], paced: float) -> dict[str, Any]:
    wall, cpu = spent
    return {
        "strategy": strategy,
        "devices": count,
        "trials": trials,
        "seconds": round(wall, 2),
        "trials_per_s": round(trials / wall, 2),
        "busy": round(paced / wall / count, 4),
        "driver_cpu_ms_a_trial": round(1e3 * cpu / trials, 3),
    }


def budget() -> list[dict[str, Any]]:
    """Step time saved by the same number of trials, spent by expected saving and spent evenly."""
    trials = recording()
    runner = ReplayRunner(trials, trials[0].device)
    work = shares(trials, 32)
    rows = []
    for total in (4 * len(work), 8 * len(work), 16 * len(work)):
        saved = {
            name: _saved(runner, work, total, name == "by expected saving") for name in ("by expected saving", "evenly")
        }
        rows.append({"workloads": len(work), "trials": total, "percent_saved": saved})
        print(rows[-1], flush=True)
    return rows


def _saved(runner: ReplayRunner, work: Sequence[Share], total: int, weighed: bool) -> float:
    with tempfile.TemporaryDirectory() as folder, Store.open(f"sqlite:///{folder}/t.db") as store:
        run = CampaignRun(store, lambda: runner, 1, work, Plan("bayesian", worth=0))
        campaign = run.campaign
        if not weighed:
            campaign.rate = lambda one: 1 / (1 + one.trials) if one.next_trials() > one.trials else 0.0  # type: ignore[method-assign]
        while run.trials < total and run.step(runner):
            pass
        run.close()
        # What was not reached runs on the vendor's library; its time is recorded.
        before = now = 0.0
        for standing in campaign.standings:
            vendor = runner.finals(standing.share.workload, ()).vendor_us
            if vendor is not None:
                before += standing.share.calls * vendor
                now += standing.share.calls * min(vendor, standing.best_us or vendor)
    return round(100 * (1 - now / before), 3)


def database_costs(url: str) -> dict[str, float]:
    """Milliseconds of one transaction here: one trial, a page of PAGE, and claiming and ending a job."""
    trials = [trial for trial in recording() if _is_ours(trial)]
    with Store.open(url) as store:
        singles, pages = trials[:200], [trials[n : n + PAGE] for n in range(200, 200 + 8 * PAGE, PAGE)]
        store.add_trial(trials[-1])
        one = _median_ms([lambda t=t: store.add_trial(t) for t in singles])
        page = _median_ms([lambda p=p: store.add_trials(p) for p in pages])
        for number in range(20):
            store.submit(JobRequest(trials[0].workload, SPEC, seed=number))
        job = _median_ms([lambda: _claim_and_end(store) for _ in range(20)])
    return {"trial_ms": one, "page_ms": page, "job_ms": job}


def _claim_and_end(store: Store) -> None:
    job = store.claim("one")
    assert job is not None
    store.fail(job.id, "one", "")


def _median_ms(calls: Sequence[Callable[[], Any]]) -> float:
    spent = []
    for call in calls:
        began = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(spent), 3)


def simulation(databases: dict[str, dict[str, float]], driver_ms: float) -> list[dict[str, Any]]:
    """The installation with each database, trials written one by one and in pages, with few drivers and many."""
    times = [seconds_of(t.measurement) for t in recording() if _is_ours(t)]
    rows = []
    for name, cost in databases.items():
        # SQLite writes one transaction at a time; that a server does 16 at once as fast as one is only assumed.
        for page, drivers, connections in ((1, 64, 1), (PAGE, 16, 1), (PAGE, 64, 1), (PAGE, 64, 16)):
            if connections > 1 and name == "sqlite":
                continue
            write = cost["trial_ms"] if page == 1 else cost["page_ms"]
            costs = Costs(times, FINALS_S, driver_ms / 1e3, write / 1e3, page, cost["job_ms"] / 1e3)
            plan = Installation(DEVICES, KINDS, WORKLOADS, drivers, connections, mtbf_s=4 * 3600, straggler=1e-4)
            rows.append({"database": name, "page": page, **simulate(plan, costs)})
            print(rows[-1], flush=True)
    return rows


def keep(out: Path, part: str, value: Any) -> None:
    """Write what a part has so far over what was written of it before; `runs` tells when and where each part ran."""
    run = {
        "command": report.command(sys.argv),
        "commit": report.commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: _version(name) for name in ("ray", "sqlalchemy", "psycopg", "numpy")},
    }
    result = json.loads(out.read_text()) if out.exists() else {}
    runs = {**result.get("runs", {}), part: run}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**result, **run, part: value, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Run the parts; each row is written when it is done."""
    parser = argparse.ArgumentParser(description="Measure a fleet of recorded devices.")
    parser.add_argument("parts", nargs="*", default=["scaling", "machine", "list", "budget", "simulation"])
    parser.add_argument("--most", type=int, default=16, help="most devices of scaling and machine")
    parser.add_argument("--strategies", default="random,model", help="of the scaling part, by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    counts, save = [count for count in COUNTS if count <= args.most], functools.partial(keep, args.out)
    if "scaling" in args.parts:
        chosen = args.strategies.split(",")
        before = json.loads(args.out.read_text()).get("scaling", []) if args.out.exists() else []
        others = [row for row in before if row["strategy"] not in chosen]
        for rows in scaling(counts, chosen):
            save("scaling", others + rows)
    if "machine" in args.parts:
        for rows in machine(counts, Plan("model", trials=TRIALS, seconds=MACHINE_S, worth=0)):
            save("machine", rows)
    if "list" in args.parts:
        for rows in machine(counts[:2], Plan("model", trials=16, worth=0), LISTED):
            save("list", rows)
    if "budget" in args.parts:
        save("budget", budget())
    if "simulation" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            databases = {"sqlite": database_costs(f"sqlite:///{folder}/t.db")}
        with new_postgresql() as url:
            databases["postgresql"] = database_costs(url)
        driver_ms = max(row["driver_cpu_ms_a_trial"] for row in json.loads(args.out.read_text())["scaling"])
        save("costs", {"driver_ms_a_trial": driver_ms, **databases})
        save("simulation", simulation(databases, driver_ms))


if __name__ == "__main__":
    main()
