"""Measures on a GPU of this machine: compiles in parallel child processes, verifies and times in one more."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kernelwright.errors import DeviceLost
from kernelwright.kernels import get_operator
from kernelwright.kernels.build import BuildPool, BuildReport
from kernelwright.kernels.child_process import ChildDied, ChildError, ChildProcess, ChildRaised, ChildTimeout
from kernelwright.kernels.cores import compilers
from kernelwright.kernels.device import gpu_uuid, present_device
from kernelwright.kernels.space import Space
from kernelwright.kernels.steps import step
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.device_guard import DeviceLock, Probe, read_clocks
from kernelwright.search.failures import failed, failure_of
from kernelwright.search.measure_job import FinalsJob, LoadJob, Reply, TrialJob, WarmUpJob
from kernelwright.search.probe_job import ProbeJob
from kernelwright.search.runner import Feed, Finals
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Toolchain, Workload

FINALS_TIMEOUT_S = 60.0

WARM_UP_S = 120.0
ENOUGH = 8
"""Compilers that a search can begin with."""

JOBS_A_CHILD = 1500
"""A child is replaced after so many jobs: compiled kernels stay loaded on the GPU as long as their process lives."""


@dataclasses.dataclass(frozen=True)
class Jobs:
    """What the child processes run, as "module:function"; how long a trial, and loading its operands, may take."""

    plan: str = "kernelwright.kernels.build:plan_on_meta"
    start: str = "kernelwright.search.measure_job:start"
    trial_timeout_s: float = 20.0
    load_timeout_s: float = 60.0


class ChildRunner:
    """Implements `Runner` on a CUDA device of this machine.

    seed: what operands are drawn from; None draws a fresh one. compile_workers: child compilers; None takes one for
    each core that may be used but one. jobs: for tests, which plant bad ones. visible: the UUID of the GPU, where the
    measuring process is to see no other.

    While one process of a machine measures on a GPU, all others wait: they take turns.
    """

    def __init__(
        self,
        device_index: int = 0,
        *,
        seed: int | None = None,
        compile_workers: int | None = None,
        jobs: Jobs | None = None,
        visible: str = "",
    ) -> None:
        self._jobs = jobs or Jobs()
        self._seed = secrets.randbits(31) if seed is None else seed
        self._child = ChildProcess(
            self._jobs.start,
            init={"device_index": 0 if visible else device_index},
            env={"CUDA_VISIBLE_DEVICES": visible} if visible else {},
        )
        self._current: Workload | None = None
        self._calls = 0
        self._lock: DeviceLock | None = None
        # Looking at the GPU imports torch, and so do the children: all at the same time.
        self._pool = BuildPool(compile_workers or compilers(), planner=self._jobs.plan)
        self._busy: threading.Thread | None = self._in_background(self._child.start)
        try:
            with step("look at the GPU"):
                self.device: DeviceSpec = present_device(device_index)
                uuid = gpu_uuid(device_index)
                self._lock = DeviceLock(uuid or f"gpu{device_index}")
                # numbers here need not be nvidia-smi's, which knows all GPUs of the machine
                self._clocks_of = visible or uuid or str(device_index)
            with step("look at the toolchain"):
                self.toolchain: Toolchain = current_toolchain(TIMER_VERSION)
        except BaseException:
            self.close()
            raise
        self._busy = self._in_background(self._take_gpu, self._busy)

    def warm_up(self) -> None:
        """Wait until the measuring process and the first compilers are up, so that no search pays for that."""
        self._wait_for_child()
        if self._child.pid is None:
            self._busy = self._in_background(self._take_gpu, None)
        self._pool.wait_until_up(WARM_UP_S, ENOUGH)
        self._wait_for_child()

    def space(self, workload: Workload) -> Space:
        """Every legal schedule of the operator on this device."""
        return get_operator(workload.operator).space(workload, self.device)

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """Measurements as they come: each is timed as soon as it is built, while others still compile. Operands and
        reference are made while the first ones compile."""
        return self.measure_fed(workload, schedules, deadline, lambda: ())

    def measure_fed(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None, feed: Feed
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """As `measure`; what `feed` gives goes to the compilers at once."""
        builds = self._pool.build_all(workload, schedules, self.device, deadline, feed)
        self._busy = self._in_background(self._load_ahead, workload, self._busy)
        try:
            for schedule, outcome in builds:
                if deadline is not None and time.monotonic() >= deadline:
                    return
                yield schedule, self._one(workload, schedule, outcome)
        finally:
            builds.close()

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """The schedules and the vendor call, verified again and timed in turns."""
        with step(f"final round of {len(schedules)}"):
            reply = self._call(FinalsJob(workload, tuple(schedules), self._seed), FINALS_TIMEOUT_S)
        measurements = reply.measurements
        if len(measurements) != len(schedules):
            measurements = measurements[:1] * len(schedules)
        pairs = tuple(zip(schedules, measurements, strict=True))
        return Finals(pairs, reply.vendor, reply.vendor_us, reply.noise, reply.aa_ratio)

    def close(self) -> None:
        """End the child processes; closing twice is harmless."""
        self._pool.close()
        self._child.abandon()
        if self._lock is not None:
            # whoever waits for another process's trial goes on, and finds the child gone
            self._lock.close()
        self._wait_for_child()
        self._child.close()

    def measure_built(self, workload: Workload, schedule: Schedule, built: BuildReport) -> Measurement:
        """The measurement of a schedule that was compiled by somebody else into Triton's cache of this machine."""
        return self._one(workload, schedule, built)

    def probe(self) -> Probe:
        """How the GPU is doing; DeviceLost when it does not run the probe."""
        self._wait_for_child()
        try:
            with self._held():
                reply: Reply = self._child.call(ProbeJob(), self._jobs.load_timeout_s)
                clocks = read_clocks(self._clocks_of)
        except ChildError as error:
            self._child.kill()
            raise DeviceLost(f"it does not run its probe: {error}") from error
        return Probe(*reply.probe_us, clocks)

    def _one(self, workload: Workload, schedule: Schedule, outcome: BuildReport | Exception) -> Measurement:
        if isinstance(outcome, Exception):
            return failure_of(outcome)
        with step(f"trial of {schedule.template}"):
            reply = self._call(TrialJob(workload, schedule, self._seed), self._jobs.trial_timeout_s)
        measurement = reply.measurements[0]
        return dataclasses.replace(measurement, compile_s=round(outcome.seconds, 3))

    def _in_background(self, do: Callable[..., object], *args: object) -> threading.Thread:
        """Have something done with the child, whatever comes of it: what goes wrong goes wrong again with the first
        trial, which tells it."""

        def run() -> None:
            with contextlib.suppress(Exception):
                do(*args)

        thread = threading.Thread(target=run, name="kernelwright-child", daemon=True)
        thread.start()
        return thread

    def _wait_for_child(self) -> None:
        """The child does one thing at a time."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.join()

    def _take_gpu(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with self._held():
            self._child.call(WarmUpJob(), self._jobs.load_timeout_s)

    def _load_ahead(self, workload: Workload, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        with self._held():
            self._load(workload)

    def _held(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._lock is None else self._lock.held()

    def _load(self, workload: Workload) -> None:
        """Have the child hold the workload's operands and reference."""
        if workload != self._current or self._child.pid is None:
            self._current = None
            try:
                self._child.call(LoadJob(workload, self._seed), self._jobs.load_timeout_s)
            except ChildRaised:
                self._child.kill()
                raise
            self._current = workload

    def _call(self, job: TrialJob | FinalsJob, timeout_s: float) -> Reply:
        """The child's reply; a child that died, hung or lost its GPU is replaced and the job counts as failed."""
        self._wait_for_child()
        with self._held():
            return self._call_alone(job, timeout_s)

    def _call_alone(self, job: TrialJob | FinalsJob, timeout_s: float) -> Reply:
        self._calls += 1
        if self._calls % JOBS_A_CHILD == 0:
            self._child.kill()
        try:
            self._load(job.workload)
            reply: Reply = self._child.call(job, timeout_s)
        except ChildTimeout as error:
            return Reply((failed(Status.TIMEOUT, f"no result after {error.timeout_s:g} s"),))
        except (ChildDied, ChildRaised) as error:
            self._child.kill()
            return Reply((failed(Status.CRASHED, str(error)),))
        if reply.poisoned:
            self._child.kill()
        return reply
