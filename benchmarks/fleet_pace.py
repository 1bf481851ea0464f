"""A machine with GPUs that is not there: devices and compilers that take as long as those of an H200's machine did."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from kernelwright.search import ReplayRunner, load_recorded, recorded_path
from kernelwright.search.fleet_batch import Built
from kernelwright.search.measure_job import KEPT_WORKLOADS
from kernelwright.search.runner import Finals
from kernelwright.types import DeviceSpec, Measurement, Schedule, Workload

TRIAL_S, LOAD_S, FINALS_S = 0.018, 0.3, 0.3
"""Seconds of a trial, of loading operands and a reference, and of a final round on an H200, from its timeline."""


class Compilers:
    """Implements `Builders`: `workers` at a time, each schedule as long as one of its template took beside an H200."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers)
        self._times: dict[str, list[float]] = {}
        for trial in load_recorded(recorded_path("h200")):
            if trial.measurement.compile_s:
                self._times.setdefault(trial.schedule.template, []).append(trial.measurement.compile_s)
        self._any = [seconds for times in self._times.values() for seconds in times]
        self.seconds = 0.0
        self._adding = threading.Lock()

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec, deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Built | Exception]]:
        """See `Builders`."""
        futures: dict[Future[None], Schedule] = {self._pool.submit(self._compile, one): one for one in schedules}
        try:
            for future in as_completed(futures, None if deadline is None else max(0.0, deadline - time.monotonic())):
                yield futures[future], Built(())
        except TimeoutError:
            return
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, schedule: Schedule) -> None:
        times = self._times.get(schedule.template, self._any)
        seconds = times[int(schedule.key[:8], 16) % len(times)]
        time.sleep(seconds)
        with self._adding:
            self.seconds += seconds


class Device(ReplayRunner):
    """A recorded device that takes its time, and as many workloads' operands as the measuring process keeps."""

    kept: tuple[Workload, ...] = ()

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """What was recorded, each after the time of a trial."""
        self._load(workload)
        for pair in super().measure(workload, schedules, deadline):
            time.sleep(TRIAL_S)
            yield pair

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """What was recorded, after the time of a final round."""
        self._load(workload)
        time.sleep(FINALS_S)
        return super().finals(workload, schedules)

    def _load(self, workload: Workload) -> None:
        if workload not in self.kept:
            time.sleep(LOAD_S)
        self.kept = (*[one for one in self.kept if one != workload][1 - KEPT_WORKLOADS :], workload)
