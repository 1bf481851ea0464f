"""What the measuring child process does: check schedules against the reference and time them on one GPU.

Runs in a process of its own (`child_runner` starts it): a kernel that faults, hangs or aborts takes only that down.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

from kernelwright.kernels import get_operator, triton_adapter
from kernelwright.kernels.device import present_device
from kernelwright.kernels.operator import Inputs, Launch, Operator
from kernelwright.kernels.steps import step
from kernelwright.search.failures import classify, failed, failure_of, poisons_process
from kernelwright.search.probe_job import ProbeJob, probe_times
from kernelwright.search.timing import FINAL, SCREEN, Effort, Timer, median, noise_band
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Measurement, Schedule, Status, Workload

KEPT_SAMPLES = 25

KEPT_WORKLOADS = 4
"""Of so many workloads the operands stay loaded, so that searches can take turns on one GPU."""

KEPT_SHARE = 1 / 8
"""Where they take more than this share of the GPU's memory together, only those used last stay."""


@dataclasses.dataclass(frozen=True)
class WarmUpJob:
    """Take the GPU: everything that the first job would have to wait for."""


@dataclasses.dataclass(frozen=True)
class LoadJob:
    """Draw the operands of a workload and compute its reference."""

    workload: Workload
    seed: int


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """Verify and time one schedule."""

    workload: Workload
    schedule: Schedule
    seed: int


@dataclasses.dataclass(frozen=True)
class FinalsJob:
    """Verify and time schedules and the vendor call in turns."""

    workload: Workload
    schedules: tuple[Schedule, ...]
    seed: int


@dataclasses.dataclass(frozen=True)
class Reply:
    """measurements: one a schedule. poisoned: the process must not be used again. probe_us: for a
    probe. The rest is for finals."""

    measurements: tuple[Measurement, ...]
    poisoned: bool = False
    vendor: str = ""
    vendor_us: float | None = None
    noise: float = 0.0
    aa_ratio: float | None = None
    probe_us: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass
class _Loaded:
    """A workload's operands, reference and output on the GPU, with the seed that they were drawn from."""

    workload: Workload
    seed: int
    operator: Operator
    inputs: Inputs
    reference: Any
    out: Any


def start(device_index: int) -> Callable[[Any], Reply]:
    """Called once in the child: imports what it takes and returns the function that does the jobs.

    The GPU is taken with the first job, so that starting up is no trouble to whoever measures there.
    """
    with step("import the compiler"):
        triton_adapter.import_compiler()
        # vendor calls may be compiled by Inductor
        triton_adapter.settle_compiler()
    return _Worker(device_index).do


class Operands:
    """Operands and references of the workloads used last; a workload that is not among them is loaded.

    allocated: tells how many bytes of the GPU's memory are in use. limit_bytes: of what is kept together.
    """

    def __init__(self, allocated: Callable[[], int], limit_bytes: int) -> None:
        self._allocated = allocated
        self._limit = limit_bytes
        self._kept: dict[tuple[Workload, int], tuple[_Loaded, int]] = {}

    def of(self, workload: Workload, seed: int) -> _Loaded:
        """The workload's operands drawn from that seed."""
        key = (workload, seed)
        found = self._kept.pop(key, None)
        if found is None:
            while len(self._kept) >= KEPT_WORKLOADS:
                self._drop_oldest()
            found = self._load(workload, seed)
        while self._kept and found[1] + sum(size for _, size in self._kept.values()) > self._limit:
            self._drop_oldest()
        self._kept[key] = found
        return found[0]

    def _load(self, workload: Workload, seed: int) -> tuple[_Loaded, int]:
        """A workload for which there is no room beside others has the memory to itself."""
        before = self._allocated()
        try:
            loaded = _load(workload, seed)
        except Exception as error:
            if not self._kept or classify(error) != Status.OUT_OF_RESOURCES:
                raise
        else:
            return loaded, self._allocated() - before
        self._kept.clear()
        before = self._allocated()
        loaded = _load(workload, seed)
        return loaded, self._allocated() - before

    def _drop_oldest(self) -> None:
        del self._kept[next(iter(self._kept))]


def _load(workload: Workload, seed: int) -> _Loaded:
    operator = get_operator(workload.operator)
    with step("operands"):
        inputs = operator.make_inputs(workload, seed, "cuda")
        out = operator.empty_output(workload, "cuda")
    with step("reference"):
        reference = operator.reference(workload, inputs)
    return _Loaded(workload, seed, operator, inputs, reference, out)


class _Worker:
    def __init__(self, device_index: int) -> None:
        self._device_index = device_index

    @functools.cached_property
    def _timer(self) -> Timer:
        """Made by the first job: this is what takes the GPU."""
        import torch

        with step("CUDA context and timer"):
            torch.cuda.set_device(self._device_index)
            return Timer(present_device(self._device_index).l2_bytes)

    @functools.cached_property
    def _operands(self) -> Operands:
        import torch

        memory = torch.cuda.get_device_properties(self._device_index).total_memory
        return Operands(torch.cuda.memory_allocated, int(memory * KEPT_SHARE))

    def do(self, job: WarmUpJob | LoadJob | TrialJob | FinalsJob | ProbeJob) -> Reply:
        timer = self._timer
        if isinstance(job, WarmUpJob):
            with step("launcher"):
                triton_adapter.ready_to_launch()
            return Reply(())
        if isinstance(job, ProbeJob):
            return Reply((), probe_us=probe_times(timer))
        loaded = self._operands.of(job.workload, job.seed)
        if isinstance(job, LoadJob):
            return Reply(())
        if isinstance(job, TrialJob):
            return self._trial(loaded, job.schedule)
        return self._finals(loaded, job.schedules)

    def _trial(self, loaded: _Loaded, schedule: Schedule) -> Reply:
        """One schedule, checked before it is timed and again after: a result that changes is a race."""
        try:
            with step("first run"):
                call, verdict, resources = _prepare(loaded, schedule)
            if not verdict.right:
                return Reply((failed(Status.WRONG_RESULT, verdict.reason),))
            with step("time one"):
                samples = self._timer.samples([call], SCREEN)[0]
            again = _check(loaded)
            if not again.right:
                return Reply((failed(Status.WRONG_RESULT, f"right at first, then not: {again.reason}"),))
            return Reply((_measured(samples, verdict, resources),))
        except Exception as error:
            return Reply((failure_of(error),), poisons_process(error))

    def _finals(self, loaded: _Loaded, schedules: tuple[Schedule, ...]) -> Reply:
        contenders: list[tuple[int, Callable[[], Any], Verdict, dict[str, int]]] = []
        results: list[Measurement] = [failed(Status.CRASHED, "not run")] * len(schedules)
        for place, schedule in enumerate(schedules):
            try:
                call, verdict, resources = _prepare(loaded, schedule)
            except Exception as error:
                results[place] = failure_of(error)
                if poisons_process(error):
                    return Reply(tuple(results), True)
                continue
            if verdict.right:
                contenders.append((place, call, verdict, resources))
            else:
                results[place] = failed(Status.WRONG_RESULT, verdict.reason)
        with step("vendor call"):
            vendor = self._vendor(loaded)
        calls = [call for _, call, _, _ in contenders] + ([vendor[1], vendor[1]] if vendor else [])
        with step("time finalists"):
            readings = self._timer.samples(calls, _final_effort(len(calls)))
        for (place, _, verdict, resources), samples in zip(contenders, readings, strict=False):
            results[place] = _measured(samples, verdict, resources)
        if vendor is None:
            return Reply(tuple(results), noise=noise_band([1.0], [1.0]))
        control, again = readings[-2:]
        ratio = median([x / y for x, y in zip(control, again, strict=True) if y > 0] or [1.0])
        merged = median(list(itertools.chain(control, again)))
        return Reply(tuple(results), False, vendor[0], merged, noise_band(control, again), ratio)

    def _vendor(self, loaded: _Loaded) -> tuple[str, Callable[[], Any]] | None:
        """The vendor's call where there is one that can be timed; one that cannot must not take schedules with it."""
        vendor = loaded.operator.vendor(loaded.workload, loaded.inputs)
        if vendor is not None:
            try:
                self._timer.samples([vendor[1]], dataclasses.replace(SCREEN, rounds=1))
            except Exception as error:
                if poisons_process(error):
                    raise
                warnings.warn(f"the vendor call {vendor[0]} cannot be timed: {error}", stacklevel=2)
                return None
        return vendor


def _final_effort(contenders: int) -> Effort:
    """The final effort, with fewer rounds when many take part."""
    return dataclasses.replace(FINAL, rounds=max(9, FINAL.rounds - 2 * max(0, contenders - 5)))


def _prepare(loaded: _Loaded, schedule: Schedule) -> tuple[Callable[[], Any], Verdict, dict[str, Any]]:
    """(a call that runs the schedule, how its result compares, registers and so on) after building and one run."""
    import torch

    _poison(loaded.out)
    launches = loaded.operator.plan(loaded.workload, schedule, loaded.inputs, loaded.out)
    compiled = [kernel[grid](*args, **options) for kernel, grid, args, options in launches]
    torch.cuda.synchronize()
    verdict = _check(loaded)

    def call() -> None:
        _launch(launches)

    return call, verdict, _resources(compiled)


def _launch(launches: list[Launch]) -> None:
    for kernel, grid, args, options in launches:
        kernel[grid](*args, **options)


def _poison(out: Any) -> None:
    for tensor in out if isinstance(out, tuple) else (out,):
        tensor.fill_(float("nan"))


def _check(loaded: _Loaded) -> Verdict:
    return verify(loaded.out, loaded.reference, loaded.operator.tolerance(loaded.workload))


def _resources(compiled: list[Any]) -> dict[str, Any]:
    """Most registers and shared bytes of the launches, and all their spills, as the driver tells them."""
    loaded = [kernel for kernel in compiled if kernel is not None]
    if not loaded:
        return {}
    return {
        "registers": max(int(kernel.n_regs) for kernel in loaded),
        # the driver's figure is divided into 4-byte words by triton
        "spills": sum(4 * int(kernel.n_spills) for kernel in loaded),
        "shared_bytes": max(int(kernel.metadata.shared) for kernel in loaded),
    }


def _measured(samples: list[float], verdict: Verdict, resources: dict[str, Any]) -> Measurement:
    rounded = tuple(round(sample, 3) for sample in samples[:KEPT_SAMPLES])
    return Measurement(Status.OK, round(median(samples), 3), rounded, float(f"{verdict.error:.3g}"), **resources)
