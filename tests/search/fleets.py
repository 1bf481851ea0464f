"""Fleets of made-up devices: each measures by formula, and does on command what real ones do by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kernelwright.errors import DeviceLost
from kernelwright.kernels.space import FiniteSpace
from kernelwright.search.device_guard import Probe
from kernelwright.search.fleet import Fleet, Rules
from kernelwright.search.station import Station
from kernelwright.types import Measurement, Schedule, Workload
from tests.search.fakes import FakeRunner, fake_space

FAST = Rules(retry_s=0.01, losses=3, hedge_s=0.2, hedge=2.0)

Hook = Callable[["FaultyLink", str, tuple[Any, ...]], None]


class RecordedRunner(FakeRunner):
    """A fake replay: its space and its kernel sources are its own."""

    def __init__(self, seconds_each: float = 0.0) -> None:
        super().__init__(FiniteSpace(list(fake_space())), seconds_each=seconds_each)

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        return {"pointer": "f" * 20, "skinny": "f" * 20}


class ProbedRunner(RecordedRunner):
    """A fake GPU that has been given a probe."""

    def __init__(self, probe: Probe | Exception) -> None:
        super().__init__()
        self.told = probe

    def probe(self) -> Probe:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


class FaultyLink:
    """A link to a fake runner that calls `hook` before each call, which may raise, wait or change the runner."""

    def __init__(self, runner: FakeRunner | None = None, hook: Hook | None = None) -> None:
        self.runner = runner or RecordedRunner()
        self.hook = hook
        self.calls: list[str] = []
        self.revived, self.closed = 0, False
        self.dead = False
        self._one = threading.Lock()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert self._one.acquire(blocking=False), "two callers at once on one device"
        try:
            self.calls.append(method)
            if self.hook is not None:
                self.hook(self, method, args)
            if self.dead:
                raise DeviceLost("the process ended")
            ok, value = Station(self.runner).answer(method, *args)
        finally:
            self._one.release()
        if not ok:
            raise value
        return value

    def revive(self) -> None:
        self.revived += 1

    def close(self) -> None:
        self.closed = True


class Slow(RecordedRunner):
    """Every trial takes so long."""

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        time.sleep(self.seconds_each)
        yield from super().measure(workload, schedules, deadline)


def fleet_of(*links: FaultyLink, rules: Rules = FAST) -> Fleet:
    """A fleet of these, called gpu0, gpu1, ..."""
    return Fleet({f"gpu{number}": link for number, link in enumerate(links)}, rules)


def measured(*links: FaultyLink) -> list[Schedule]:
    """What all of them measured."""
    return [schedule for link in links for schedule in link.runner.measured]
