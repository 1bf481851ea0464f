"""One batch of trials on the devices of a fleet: dispatched, done again where a device was lost, each told once."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

from kernelwright.errors import DeviceLost
from kernelwright.search.failures import failed, failure_of
from kernelwright.search.fleet import Fleet, Member
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Workload


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled schedule. args: what `Station.measure` is given along with it."""

    args: tuple[Any, ...]


class Builders(Protocol):
    """Compilers that work for all devices of a fleet; `kernels.build.BuildPool` behind a thin coat is one."""

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec, deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Built | Exception]]:
        """Each schedule compiled, or the error that came of it, as they finish; those unfinished at the deadline are
        left out. Closing the iterator drops what was not started."""
        ...

    def close(self) -> None:
        """End the compilers; closing twice is harmless."""
        ...


@dataclasses.dataclass(eq=False)
class _Task:
    schedule: Schedule
    args: tuple[Any, ...] = ()
    losses: int = 0
    done: bool = False
    running: int = 0
    began: float = 0.0


class Batch:
    """Schedules of one workload on up to `width` devices of one kind. Iterate once over `results`.

    A device is held only while something is there to be measured: while compilers work, it is free for other batches.
    prefer: name of the device to begin with; a batch on one device waits for it while others use it.
    """

    def __init__(
        self,
        fleet: Fleet,
        slug: str,
        workload: Workload,
        schedules: Sequence[Schedule],
        *,
        builders: Builders | None = None,
        width: int = 1,
        prefer: str = "",
        deadline: float | None = None,
    ) -> None:
        self._fleet, self._slug, self._workload = fleet, slug, workload
        self._builders, self._width, self._deadline = builders, width, deadline
        self.used = prefer
        self._open = {schedule: _Task(schedule) for schedule in schedules}
        self._ready: deque[_Task] = deque()
        self._fed = False
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._results: queue.SimpleQueue[tuple[Schedule, Measurement] | BaseException | None] = queue.SimpleQueue()
        self._seconds: list[float] = []

    def results(self) -> Generator[tuple[Schedule, Measurement], None, None]:
        """Measurements as they come, each schedule once; without those that would come after the deadline.

        DeviceLost when no device of the kind is left; errors of ours that a station raised.
        """
        left = len(self._open)
        workers = min(self._width, left)
        for target in (self._feed, *[self._work] * workers):
            threading.Thread(target=self._guarded, args=(target,), name="kernelwright-batch", daemon=True).start()
        try:
            while left:
                result = self._results.get(timeout=self._time_left())
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    return
                left -= 1
                yield result
        except queue.Empty:
            return
        finally:
            with self._changed:
                self._over.set()
                self._changed.notify_all()

    def _time_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _guarded(self, target: Any) -> None:
        try:
            target()
        except BaseException as error:
            self._results.put(error)

    def _feed(self) -> None:
        """Hand on what is compiled; where nobody compiles for the fleet, everything at once."""
        if self._builders is None:
            with self._changed:
                self._ready.extend(self._open.values())
                self._fed = True
                self._changed.notify_all()
            return
        device = self._fleet.about(self._slug).device
        builds = self._builders.build_all(self._workload, list(self._open), device, self._deadline)
        unbuilt = dict(self._open)
        for schedule, outcome in builds:
            task = unbuilt.pop(schedule)
            if isinstance(outcome, Exception):
                self._tell(task, failure_of(outcome))
            else:
                task.args = outcome.args
                self._put(task)
            if self._over.is_set():
                break
        with self._changed:
            for schedule in unbuilt:
                self._open.pop(schedule, None)
            self._fed = True
            self._changed.notify_all()
            if not self._open:
                self._results.put(None)

    def _put(self, task: _Task, first: bool = False) -> None:
        with self._changed:
            (self._ready.appendleft if first else self._ready.append)(task)
            self._changed.notify_all()

    def _work(self) -> None:
        while self._wait_for_task():
            member = self._fleet.take(self._slug, self.used, self._over, stay=self._width == 1)
            if member is None:
                return
            self.used = member.name
            if not self._serve(member):
                self._fleet.give(member)

    def _wait_for_task(self) -> bool:
        """Wait without a device until there is something to do; False when there will be nothing more."""
        with self._changed:
            while not self._over.is_set() and self._open:
                if self._ready or self._straggler() is not None:
                    return True
                self._changed.wait(0.1)
        return False

    def _next(self) -> _Task | None:
        """The next task for a worker that holds a device; None when it had better give it back."""
        with self._changed:
            if not self._over.is_set() and self._open:
                task = self._ready.popleft() if self._ready else self._straggler()
                if task is not None:
                    task.running, task.began = task.running + 1, time.monotonic()
                return task
        return None

    def _straggler(self) -> _Task | None:
        """A task that takes much longer than the usual one, for an idle device to do as well."""
        if not self._fed or not self._seconds or self._width == 1:
            return None
        rules = self._fleet.rules
        limit = time.monotonic() - max(rules.hedge_s, rules.hedge * statistics.median(self._seconds))
        return next((task for task in self._open.values() if task.running == 1 and task.began < limit), None)

    def _serve(self, member: Member) -> bool:
        """Do tasks on a device until there are none; whether the device was given back or lost already."""
        while (task := self._next()) is not None:
            began = time.monotonic()
            try:
                measurement = self._fleet.ask(member, "measure", self._workload, task.schedule, *task.args)
                blame = self._fleet.judge(member, measurement)
                if blame:
                    raise DeviceLost(blame)
            except DeviceLost as error:
                self._fleet.lost(member, str(error))
                self._again(task, error)
                return True
            except BaseException:
                self._fleet.give(member)
                raise
            self._seconds.append(time.monotonic() - began)
            last = self._is_last(task)
            if last:
                # Given back first, so that whoever waits for the last result finds the device free.
                self._fleet.give(member)
            self._tell(task, measurement)
            if last:
                return True
        return False

    def _is_last(self, task: _Task) -> bool:
        with self._changed:
            return all(other is task for other in self._open.values())

    def _again(self, task: _Task, error: DeviceLost) -> None:
        with self._changed:
            task.losses += 1
            task.running -= 1
        if task.losses < self._fleet.rules.tries:
            if not task.done and not task.running:
                self._put(task, first=True)
        else:
            words = f"{task.losses} devices were lost while they measured it; the last: {error}"
            self._tell(task, failed(Status.CRASHED, words))

    def _tell(self, task: _Task, measurement: Measurement) -> None:
        """Hand a result to the caller, unless another device was faster."""
        with self._changed:
            if task.done:
                return
            task.done = True
            del self._open[task.schedule]
            self._changed.notify_all()
        self._results.put((task.schedule, measurement))
