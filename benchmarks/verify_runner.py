"""Many schedules of many cases on one GPU: built ahead by child compilers, run in a child that may die.

A template that keeps killing or hanging the child is given up, so that it cannot eat the time of the others.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from verify_job import Case, CheckJob, LoadJob

from kernelwright.errors import KernelwrightError
from kernelwright.kernels import get_operator
from kernelwright.kernels.child_process import ChildProcess, ChildTimeout
from kernelwright.search.failures import failed, failure_of
from kernelwright.search.measure_job import Reply
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Workload

LOAD_TIMEOUT_S = 120.0
TRIAL_TIMEOUT_S = 30.0

GRACE_S = 10.0
"""How far past the deadline a job may run."""

MOST_DEATHS = 4
"""A template is given up once it has killed or hung the child so often."""

Results = list[tuple[Schedule, Measurement]]


class Builds(Protocol):
    """What `BuildPool` offers here."""

    def build(self, workload: Workload, schedule: Schedule, device: DeviceSpec) -> Any:
        """Compile, or raise why not."""
        ...

    def close(self) -> None:
        """End the compilers."""
        ...


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which schedules to try. templates: all when empty. knobs: only schedules with these values, as text."""

    per_template: int = 3
    seed: int = 0
    templates: Sequence[str] = ()
    knobs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, workload: Workload, device: DeviceSpec) -> dict[str, list[Schedule]]:
        """By template, the schedules to try; an empty list where the template's space is empty."""
        chosen = {}
        for name, template in get_operator(workload.operator).templates.items():
            if self.templates and name not in self.templates:
                continue
            space: Any = template.space(workload, device)
            if self.knobs:
                members = [s for s in space if all(str(s.knobs.get(k)) == v for k, v in self.knobs.items())]
                sizes = random.Random(self.seed)
                chosen[name] = sizes.sample(members, min(self.per_template, len(members)))
            else:
                chosen[name] = space.sample(random.Random(self.seed), self.per_template)
        return chosen


@dataclasses.dataclass
class Checked:
    """What came of a case. results: by template, empty where its space is. error: why nothing could be run.

    left_out: schedules that time, or a template given up, did not allow.
    """

    case: Case
    results: dict[str, Results] = dataclasses.field(default_factory=dict)
    vendor: str = ""
    vendor_us: float | None = None
    error: str = ""
    left_out: int = 0

    def ratio(self, template: str) -> float | None:
        """Vendor time over the template's best; None where either is unknown."""
        best = self.best(template)
        return None if best is None or self.vendor_us is None else self.vendor_us / best[1]

    def best(self, template: str) -> tuple[Schedule, float] | None:
        """The template's fastest schedule that was right, and its time in microseconds."""
        timed = [(s, m.median_us) for s, m in self.results[template] if m.median_us]
        return min(timed, key=lambda pair: pair[1], default=None)


Waiting = tuple[Case, dict[str, list[tuple[Schedule, "Future[Any]"]]]]


class Checker:
    """Checks cases one by one. builds and child are closed with it; workers: how many builds run at once."""

    def __init__(
        self, device: DeviceSpec, builds: Builds, child: ChildProcess, *, workers: int, timed: bool = False
    ) -> None:
        self._device, self._builds, self._child, self._timed = device, builds, child, timed
        self._threads = ThreadPoolExecutor(workers)
        self._stopped = threading.Event()
        self._deaths: Counter[str] = Counter()
        self._loaded: Case | None = None
        self._seed = 0

    @property
    def given_up(self) -> list[str]:
        """Templates that killed or hung too often."""
        return [name for name, count in self._deaths.items() if count >= MOST_DEATHS]

    def check(self, cases: Sequence[Case], choice: Choice, deadline: float) -> Iterator[Checked]:
        """The cases as they are done, up to the deadline (a reading of `time.monotonic`)."""
        self._seed = choice.seed
        waiting: queue.SimpleQueue[Waiting | Exception | None] = queue.SimpleQueue()
        feeder = threading.Thread(target=self._feed, args=(cases, choice, waiting.put), daemon=True)
        feeder.start()
        while time.monotonic() < deadline:
            try:
                item = waiting.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                break
            if item is None:
                break
            if isinstance(item, Exception):
                raise item
            yield self._one(*item, deadline)
        self._stopped.set()
        feeder.join()

    def close(self) -> None:
        """End everything that was started; closing twice is harmless."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._builds.close()
        self._child.close()

    def _feed(self, cases: Sequence[Case], choice: Choice, put: Callable[[Waiting | Exception | None], None]) -> None:
        """Choose the schedules of each case and start their builds, ahead of the GPU."""
        try:
            for case in cases:
                if self._stopped.is_set():
                    return
                chosen = choice.of(case.workload, self._device)
                put((case, {name: [(s, self._build(case, s)) for s in found] for name, found in chosen.items()}))
            put(None)
        except Exception as error:
            put(error)

    def _build(self, case: Case, schedule: Schedule) -> Future[Any]:
        return self._threads.submit(self._builds.build, case.workload, schedule, self._device)

    def _one(self, case: Case, found: dict[str, list[tuple[Schedule, Future[Any]]]], deadline: float) -> Checked:
        checked = Checked(case, {name: [] for name in found})
        if not any(found.values()):
            return checked
        try:
            reply = self._load(case, deadline)
        except KernelwrightError as error:
            self._child.kill()
            checked.error = _words(error)
            return checked
        checked.vendor, checked.vendor_us = reply.vendor, reply.vendor_us
        for name, schedules in found.items():
            for schedule, built in schedules:
                measurement = None if name in self.given_up else self._measured(case, schedule, built, deadline)
                if measurement is None:
                    checked.left_out += 1
                else:
                    checked.results[name].append((schedule, measurement))
        return checked

    def _load(self, case: Case, deadline: float) -> Reply:
        self._loaded = None
        reply = self._ask(LoadJob(case, self._seed, self._timed), LOAD_TIMEOUT_S, deadline)
        self._loaded = case
        return reply

    def _ask(self, job: LoadJob | CheckJob, timeout_s: float, deadline: float) -> Reply:
        reply: Reply = self._child.call(job, min(timeout_s, max(0.0, deadline - time.monotonic()) + GRACE_S))
        return reply

    def _measured(self, case: Case, schedule: Schedule, built: Future[Any], deadline: float) -> Measurement | None:
        """None when the deadline came first."""
        if time.monotonic() >= deadline:
            return None
        try:
            built.result(deadline - time.monotonic())
        except TimeoutError:
            return None
        except Exception as error:
            return failure_of(error)
        try:
            if self._loaded is not case or self._child.pid is None:
                self._load(case, deadline)
            reply = self._ask(CheckJob(case, schedule, self._seed, self._timed), TRIAL_TIMEOUT_S, deadline)
        except KernelwrightError as error:
            if isinstance(error, ChildTimeout) and time.monotonic() >= deadline:
                return None
            self._died(schedule)
            status = Status.TIMEOUT if isinstance(error, ChildTimeout) else Status.CRASHED
            return failed(status, _words(error))
        if reply.poisoned:
            self._died(schedule)
        return reply.measurements[0]

    def _died(self, schedule: Schedule) -> None:
        self._deaths[schedule.template] += 1
        self._child.kill()


def _words(error: KernelwrightError) -> str:
    return f"{type(error).__name__}: {error}"
