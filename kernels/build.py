"""Compile schedules for any GPU with no GPU present, in child processes that a compiler abort cannot take along.

The machine code lands in Triton's own disk cache, so that a later launch on the same machine finds it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kernelwright.errors import BuildFailed, KernelwrightError, OutOfResources
from kernelwright.kernels import triton_adapter
from kernelwright.kernels.built import note_built
from kernelwright.kernels.child_process import ChildDied, ChildProcess, ChildRaised, ChildTimeout
from kernelwright.kernels.nursery import Nursery
from kernelwright.kernels.operator import Launch
from kernelwright.kernels.steps import step
from kernelwright.types import DeviceSpec, Schedule, Workload

BUILD_TIMEOUT_S = 60.0
MOST_THREADS = 1024

TENSOR_MEMORY_COLUMNS = 512

Planner = Callable[[Workload, Schedule], list[Launch]]

_CHILD_ENV = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Compilers must compile whatever the caller does, and have no business on a GPU."""


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What the compiler made of a schedule; a schedule of several kernels counts the largest, and adds up spills.

    registers: 32-bit registers of a thread. spills: bytes of local memory of a thread. shared_bytes: of a block.
    seconds: time in the compiler, next to nothing for what its cache holds.
    artifact: text or machine code by "<kernel>.<stage>", such as "matmul_pointer.ptx"; empty unless it was asked for.
    """

    registers: int
    spills: int
    shared_bytes: int
    seconds: float
    artifact: dict[str, str | bytes]


@dataclasses.dataclass(frozen=True)
class BuildJob:
    """What a child is asked to build; planner names a Planner as "module:function"."""

    workload: Workload
    schedule: Schedule
    device: DeviceSpec
    planner: str
    keep_artifact: bool


def build(workload: Workload, schedule: Schedule, device: DeviceSpec) -> BuildReport:
    """Compile one schedule, in a child process, and keep every stage as artifact.

    Raises OutOfResources when it needs more than the device has, BuildFailed when the compiler refuses it, dies on it
    or takes longer than BUILD_TIMEOUT_S, MissingDependency without torch and triton.
    """
    with BuildPool(1) as pool:
        return pool.build(workload, schedule, device, keep_artifact=True)


class BuildPool:
    """Child processes that compile in parallel. A child that dies or takes too long is replaced.

    They start in the background; those for which the machine has no room (processes, open files) are left out.
    Importing torch and triton takes each some seconds, many times that when all do it at once: so one process imports
    them, and the others are its forks.

    workers: how many. timeout_s: the most that one schedule may take. planner: for tests; what makes the launches.
    """

    def __init__(
        self,
        workers: int,
        *,
        timeout_s: float = BUILD_TIMEOUT_S,
        planner: str = "kernelwright.kernels.build:plan_on_meta",
    ) -> None:
        triton_adapter.require_triton()
        self._timeout_s, self._planner = timeout_s, planner
        target = f"{__name__}:builder"
        self._nursery = Nursery(target, _CHILD_ENV) if workers > 1 else None
        self._children = [ChildProcess(target, init={}, env=_CHILD_ENV, nursery=self._nursery) for _ in range(workers)]
        # the one that was used last comes first: it is sure to be up
        self._idle: queue.LifoQueue[ChildProcess] = queue.LifoQueue()
        self._left_out: list[ChildProcess] = []
        self._leaving = threading.Lock()
        self._threads = ThreadPoolExecutor(workers, "kernelwright-build")
        self._starters = ThreadPoolExecutor(workers, "kernelwright-start")
        self._starting = [self._starters.submit(self._begin, child) for child in self._children]

    def wait_until_up(self, timeout_s: float, count: int | None = None) -> bool:
        """Wait until so many children (None: all) are up, or could not be started; whether that came in time."""
        end, wanted = time.monotonic() + timeout_s, min(count or len(self._starting), len(self._starting))
        while sum(one.done() for one in self._starting) < wanted:
            left = [one for one in self._starting if not one.done()]
            if not wait(left, max(0.0, end - time.monotonic()), FIRST_COMPLETED).done:
                return False
        return True

    def build(
        self,
        workload: Workload,
        schedule: Schedule,
        device: DeviceSpec,
        *,
        keep_artifact: bool = False,
    ) -> BuildReport:
        """Compile one schedule and wait for it; the errors of the function `build`."""
        job = BuildJob(workload, schedule, device, self._planner, keep_artifact)
        return self._threads.submit(self._run, job).result()

    def build_all(
        self,
        workload: Workload,
        schedules: Sequence[Schedule],
        device: DeviceSpec,
        deadline: float | None = None,
        feed: Callable[[], Sequence[Schedule]] = lambda: (),
    ) -> Generator[tuple[Schedule, BuildReport | Exception], None, None]:
        """Each schedule with its report, or the error that `build` would raise, as they finish.

        Compiling goes on while the caller works; closing the iterator drops what has not been started. It ends at the
        deadline (a reading of `time.monotonic`) without those that are not finished by then. feed: asked after each
        one what else to build.
        """
        futures: dict[Future[BuildReport], Schedule] = {}

        def submit(added: Sequence[Schedule]) -> None:
            for schedule in added:
                job = BuildJob(workload, schedule, device, self._planner, False)
                futures[self._threads.submit(self._run, job)] = schedule

        submit(schedules)
        try:
            while futures:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                finished = wait(futures, left, FIRST_COMPLETED).done
                if not finished:
                    return
                for future in finished:
                    schedule, error = futures.pop(future), future.exception()
                    yield schedule, error if isinstance(error, Exception) else future.result()
                    submit(feed())
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Drop what is waiting and end the children; closing twice is harmless."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._starters.shutdown(wait=False, cancel_futures=True)
        if self._nursery is not None:
            self._nursery.close()
        for child in self._children:
            child.abandon()
            # whoever waits for a child that was not started gets one that refuses
            self._idle.put(child)
        self._starters.shutdown(wait=True)
        self._threads.shutdown(wait=True)
        for child in self._children:
            child.close()

    def __enter__(self) -> BuildPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, child: ChildProcess) -> None:
        # why a child does not start, whatever it is, is told by the first job that it gets
        with contextlib.suppress(Exception):
            try:
                child.start()
            except ChildDied as error:
                if error.exit_code is None and self._can_do_without(child):
                    return
                raise
        self._idle.put(child)

    def _can_do_without(self, child: ChildProcess) -> bool:
        """Whether others remain when a child is left out for which the machine has no room: no schedule is to blame."""
        with self._leaving:
            if len(self._children) == len(self._left_out) + 1:
                return False
            self._left_out.append(child)
        return True

    def _run(self, job: BuildJob) -> BuildReport:
        with step("wait for a compiler"):
            child = self._idle.get()
        try:
            report: BuildReport = child.call(job, self._timeout_s)
            note_built(job.workload, job.schedule, job.device)
            return report
        except ChildTimeout as error:
            raise BuildFailed(f"the compiler was stopped after {error.timeout_s:g} s on {job.schedule}") from None
        except ChildDied as error:
            raise BuildFailed(f"the compiler died on {job.schedule}: {error}") from None
        except ChildRaised as error:
            raise BuildFailed(f"{error}\n{error.stderr}".strip()) from None
        finally:
            self._idle.put(child)


def builder() -> Callable[[BuildJob], BuildReport]:
    """Called once in a child: imports what every build needs, and returns what builds."""
    with step("import the compiler"):
        triton_adapter.import_compiler()
    return build_here


def plan_on_meta(workload: Workload, schedule: Schedule) -> list[Launch]:
    """The launches of a schedule on tensors that have shapes and no data."""
    from kernelwright.kernels import get_operator

    operator = get_operator(workload.operator)
    operator.validate(workload)
    inputs = operator.make_inputs(workload, 0, "meta")
    return operator.plan(workload, schedule, inputs, operator.empty_output(workload, "meta"))


def build_here(job: BuildJob) -> BuildReport:
    """Build in this process, which must be a child: Triton's driver is replaced, and the compiler may abort."""
    module, _, name = job.planner.partition(":")
    planner: Planner = getattr(importlib.import_module(module), name)
    with triton_adapter.targeting(job.device):
        with step(f"plan {job.schedule.template}"):
            launches = planner(job.workload, job.schedule)
        started = time.monotonic()
        try:
            with step(f"compile {job.schedule.template}"):
                compiled = [triton_adapter.compile_launch(launch) for launch in launches]
        except KernelwrightError:
            raise
        except Exception as error:
            if type(error).__name__ == "OutOfResources":
                raise OutOfResources(f"{error} (building for {job.device.name})") from error
            raise
        seconds = time.monotonic() - started
    for kernel in compiled:
        _check_limits(kernel, job.device)
    with step("read registers"):
        usage = [triton_adapter.registers_and_spills(kernel) for kernel in compiled]
    artifact: dict[str, str | bytes] = {}
    for kernel in compiled if job.keep_artifact else ():
        artifact.update({f"{kernel.name}.{stage}": x for stage, x in triton_adapter.assembly_of(kernel).items()})
    return BuildReport(
        registers=max((registers for registers, _ in usage), default=0),
        spills=sum(spills for _, spills in usage),
        shared_bytes=max(map(triton_adapter.shared_bytes, compiled), default=0),
        seconds=seconds,
        artifact=artifact,
    )


def _check_limits(kernel: object, device: DeviceSpec) -> None:
    """OutOfResources, with what is needed and what there is."""
    for needed, limit, what in (
        (triton_adapter.shared_bytes(kernel), device.shared_memory_bytes, "bytes of shared memory"),
        (triton_adapter.threads(kernel), MOST_THREADS, "threads in a block"),
        (triton_adapter.tensor_memory_columns(kernel), TENSOR_MEMORY_COLUMNS, "columns of tensor memory"),
    ):
        if needed > limit:
            raise OutOfResources(
                f"the kernel needs {needed} {what}, {device.name} has {limit}; use smaller tiles or fewer stages"
            )
