"""A large installation, event by event: devices that tune, drivers that search for them, one database, and faults.

Nothing is measured here: what a trial, a call and a transaction cost comes in from outside.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. trial_s: what trials take on a device, drawn from. final_s: a final round. driver_s: a driver's work for
    one trial (search, dispatch, result). write_s: a transaction that stores `page` trials. job_s: one that claims or
    ends a job."""

    trial_s: Sequence[float]
    final_s: float
    driver_s: float
    write_s: float
    page: int
    job_s: float


@dataclasses.dataclass(frozen=True)
class Installation:
    """devices are shared evenly by kinds and drivers. connections: transactions that the database does at once.
    trials: of each workload. mtbf_s: mean seconds between two losses of one device, repair_s: until it is back.
    straggler: share of trials that hang until timeout_s."""

    devices: int
    kinds: int
    workloads: int
    drivers: int
    connections: int = 1
    trials: int = 64
    mtbf_s: float = float("inf")
    repair_s: float = 60.0
    straggler: float = 0.0
    timeout_s: float = 120.0


class _Server:
    """Serves requests in order with so many hands; remembers how long it worked and how long they waited."""

    def __init__(self, hands: int) -> None:
        self._free = [0.0] * hands
        self.worked, self.requests, self.waits = 0.0, 0, [0.0]

    def serve(self, now: float, seconds: float) -> float:
        """When a request that comes now is done."""
        begin = max(now, heapq.heappop(self._free))
        heapq.heappush(self._free, begin + seconds)
        self.worked += seconds
        self.requests += 1
        self.waits.append(begin - now)
        return begin + seconds

    def wait_ms(self, share: float) -> float:
        ordered = sorted(self.waits)
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)


@dataclasses.dataclass
class _Device:
    kind: int
    driver: int
    left: int = 0
    unstored: int = 0
    worked: float = 0.0
    finished: float = 0.0
    fails_at: float = float("inf")


class _Run:
    """Devices in stages: claim a job, go (ask the driver for a trial), end of a trial. Every server is asked at the
    moment at which the request comes, so that they are served in order."""

    def __init__(self, plan: Installation, costs: Costs, seed: int) -> None:
        self.plan, self.costs, self.rng = plan, costs, random.Random(seed)
        self.queues = [
            plan.workloads // plan.kinds + (kind < plan.workloads % plan.kinds) for kind in range(plan.kinds)
        ]
        self.devices = [_Device(number % plan.kinds, number % plan.drivers) for number in range(plan.devices)]
        self.drivers, self.database = [_Server(1) for _ in range(plan.drivers)], _Server(plan.connections)
        self.trials = self.again = 0
        self.end = 0.0
        for device in self.devices:
            device.fails_at = self.next_loss(0.0)
        self.events: list[tuple[float, int, str, bool]] = [
            (0.0, number, "claim", True) for number in range(plan.devices)
        ]

    def next_loss(self, now: float) -> float:
        return now + self.rng.expovariate(1 / self.plan.mtbf_s) if self.plan.mtbf_s < float("inf") else float("inf")

    def work(self) -> None:
        while self.events:
            now, number, stage, good = heapq.heappop(self.events)
            device = self.devices[number]
            if stage == "claim":
                self._claim(now, number, device)
            elif stage == "go":
                ready = self.drivers[device.driver].serve(now, self.costs.driver_s)
                spent, good = self._trial(ready, device)
                heapq.heappush(self.events, (ready + spent, number, "end", good))
            else:
                self._ended(now, number, device, good)

    def _claim(self, now: float, number: int, device: _Device) -> None:
        if self.queues[device.kind] == 0:
            device.finished, self.end = now, max(self.end, now)
            return
        self.queues[device.kind] -= 1
        device.left = self.plan.trials
        heapq.heappush(self.events, (self.database.serve(now, self.costs.job_s), number, "go", True))

    def _trial(self, begin: float, device: _Device) -> tuple[float, bool]:
        """(seconds, whether it came to a result)."""
        spent = self.rng.choice(self.costs.trial_s) + (self.costs.final_s if device.left == 1 else 0.0)
        if self.rng.random() < self.plan.straggler:
            return self.plan.timeout_s, False
        if begin + spent > device.fails_at:
            device.fails_at = self.next_loss(begin + self.plan.repair_s)
            return self.plan.repair_s, False
        device.worked += spent
        return spent, True

    def _ended(self, now: float, number: int, device: _Device, good: bool) -> None:
        self.trials += good
        self.again += not good
        device.left -= good
        device.unstored += good
        stored = now
        if device.unstored and (device.unstored >= self.costs.page or device.left == 0):
            device.unstored = 0
            stored = self.database.serve(now, self.costs.write_s)
        # The driver stores while the device goes on; only the end of a job waits for it.
        stage = ("claim", stored) if device.left == 0 else ("go", now)
        heapq.heappush(self.events, (stage[1], number, stage[0], True))


def simulate(plan: Installation, costs: Costs, seed: int = 0) -> dict[str, Any]:
    """Run the installation until every kind's queue of workloads is tuned; what it took and where it waited."""
    run = _Run(plan, costs, seed)
    run.work()
    return _figures(run)


def _figures(run: _Run) -> dict[str, Any]:
    plan, end, database = run.plan, run.end, run.database
    worked = sum(device.worked for device in run.devices)
    present = sum(device.finished for device in run.devices)
    return {
        **{name: value for name, value in vars(plan).items() if value != float("inf")},
        "seconds": round(end, 1),
        "trials_done": run.trials,
        "trials_again": run.again,
        "trials_per_s": round(run.trials / end, 1),
        "devices_busy": round(worked / present, 4),
        "drivers_busy": round(max(driver.worked for driver in run.drivers) / end, 4),
        "driver_wait_p99_ms": max(driver.wait_ms(0.99) for driver in run.drivers),
        "database_busy": round(database.worked / plan.connections / end, 4),
        "database_per_s": round(database.requests / end, 1),
        "database_wait_p99_ms": database.wait_ms(0.99),
    }
