"""What the child process of the check_ scripts does: run schedules of a case and compare them with fp64.

Harder than a tuning trial: the launches run again, the gaps between an output's rows must stay untouched, results that
must overflow have to, and outputs too large for an fp64 copy are compared in some rows and scanned in all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import OPERANDS, Problem, problem_of
from kernelwright.kernels.operator import Inputs, Result, launch_all
from kernelwright.kernels.triton_adapter import settle_compiler
from kernelwright.search.failures import failed, failure_of, poisons_process
from kernelwright.search.measure_job import Reply
from kernelwright.search.timing import SCREEN, Timer, median
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, Workload

HUGE = 2**29
"""Results of more elements, and operands of four times as many, are compared in some rows only."""

EDGE = 128
"""Rows that are compared at each end, and on each side of an offset of 2^31 elements."""

CHUNK = 2**28

NOT_TIMED = 0.0
"""The time of a schedule that was only checked."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload to check. fills: what an operand holds in place of random numbers. ends: of the groups' rows."""

    id: str
    tag: str
    workload: Workload
    fills: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ends: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LoadJob:
    """Make a case's operands and reference; time the vendor call if asked."""

    case: Case
    seed: int
    timed: bool


@dataclasses.dataclass(frozen=True)
class CheckJob:
    """Run one schedule of a case; time it if asked."""

    case: Case
    schedule: Schedule
    seed: int
    timed: bool


@dataclasses.dataclass
class _Loaded:
    """rows: which of the result's rows the reference has; None for all."""

    case: Case
    inputs: Inputs
    out: Result
    rows: torch.Tensor | None
    reference: Result


def start(device_index: int, l2_bytes: int, device: str = "cuda") -> Callable[[LoadJob | CheckJob], Reply]:
    """Called once in the child. device: "cpu" for tests in Triton's interpreter, where nothing can be timed."""
    settle_compiler()
    if device == "cuda":
        torch.cuda.set_device(device_index)
    return _Worker(device, l2_bytes).do


class _Worker:
    def __init__(self, device: str, l2_bytes: int) -> None:
        self._device, self._l2_bytes = device, l2_bytes
        self._timer: Timer | None = None
        self._loaded: _Loaded | None = None

    def do(self, job: LoadJob | CheckJob) -> Reply:
        loaded = self._load(job.case, job.seed)
        if isinstance(job, LoadJob):
            return self._vendor(loaded) if job.timed else Reply(())
        try:
            return Reply((self._check(loaded, job.schedule, job.timed),))
        except Exception as error:
            return Reply((failure_of(error),), poisons_process(error))

    def _load(self, case: Case, seed: int) -> _Loaded:
        if self._loaded is None or self._loaded.case != case:
            self._loaded = None
            if self._device == "cuda":
                torch.cuda.empty_cache()
            inputs = case_inputs(case, seed, self._device)
            out = get_operator(case.workload.operator).empty_output(case.workload, self._device)
            rows = some_rows(problem_of(case.workload), self._device) if case.workload.operator == "matmul" else None
            self._loaded = _Loaded(case, inputs, out, rows, reference_of(case.workload, inputs, rows))
        return self._loaded

    def _vendor(self, loaded: _Loaded) -> Reply:
        found = get_operator(loaded.case.workload.operator).vendor(loaded.case.workload, loaded.inputs)
        if found is None:
            return Reply(())
        name, call = found
        return Reply((), vendor=name, vendor_us=self._time_us(call))

    def _check(self, loaded: _Loaded, schedule: Schedule, timed: bool) -> Measurement:
        blank(loaded.out)
        workload = loaded.case.workload
        launches = get_operator(workload.operator).plan(workload, schedule, loaded.inputs, loaded.out)
        launch_all(launches)
        verdict = judge(loaded)
        if not verdict.right:
            return wrong(verdict.reason, verdict.error)
        before = [x.clone() for x in tensors_of(loaded.out)] if workload.attributes.get("deterministic") else []
        blank(loaded.out)
        launch_all(launches)
        launch_all(launches)
        again = judge(loaded)
        if not again.right:
            return wrong(f"right at first, then not: {again.reason}", again.error)
        if not all(torch.equal(*pair) for pair in zip(before, tensors_of(loaded.out), strict=False)):
            return wrong("two runs differ, and the workload asks for a deterministic sum", again.error)
        spilled = sum(map(written_gaps, tensors_of(loaded.out)))
        if spilled:
            return wrong(f"{spilled} elements between the result's rows were written", again.error)
        time_us = self._time_us(lambda: launch_all(launches)) if timed else NOT_TIMED
        return Measurement(Status.OK, time_us, (), float(f"{max(verdict.error, again.error):.3g}"))

    def _time_us(self, call: Callable[[], Any]) -> float:
        self._timer = self._timer or Timer(self._l2_bytes)
        return round(median(self._timer.samples([call], SCREEN)[0]), 3)


def wrong(reason: str, error: float) -> Measurement:
    """The measurement of a wrong result."""
    found = failed(Status.WRONG_RESULT, reason)
    return dataclasses.replace(found, error=float(f"{error:.3g}") if math.isfinite(error) else None)


def case_inputs(case: Case, seed: int, device: str) -> Inputs:
    """The operands as for tuning, but for those that the case fills otherwise, and with its groups."""
    inputs = get_operator(case.workload.operator).make_inputs(case.workload, seed, device)
    for name, fill in case.fills.items():
        if name in inputs:
            inputs[name] = filled(inputs[name], fill, seed)
    if case.ends:
        inputs["offsets"] = torch.tensor(case.ends, dtype=torch.int32, device=device)
    return inputs


def filled(tensor: torch.Tensor, fill: str, seed: int) -> torch.Tensor:
    """The tensor filled as the awkward set names it; with "nan_outside" it lies between NaN on all sides."""
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    if fill == "randn":
        return tensor
    if fill == "nan":
        return tensor.fill_(math.nan)
    if fill == "large":
        return tensor.mul_(100)
    if fill == "large_positive":
        return tensor.copy_(torch.rand(tensor.shape, device=tensor.device, generator=generator) * 10000 + 50000)
    if fill == "nan_outside":
        margin = 4096
        storage = tensor.new_full((whole_storage(tensor).numel() + 2 * margin,), math.nan)
        inner = storage.as_strided(tensor.shape, tensor.stride(), margin + tensor.storage_offset())
        return inner.copy_(tensor)
    raise ValueError(f"fill must be randn, nan, large, large_positive or nan_outside, got {fill!r}")


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Everything that was allocated for the tensor, as one dimension."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def tensors_of(result: Result) -> tuple[torch.Tensor, ...]:
    """The tensors of a result, which may be one."""
    return result if isinstance(result, tuple) else (result,)


def blank(out: Result) -> None:
    """Fill a result, and the gaps between its rows, with what a kernel that writes nothing leaves."""
    for tensor in tensors_of(out):
        whole_storage(tensor).fill_(unwritten(tensor))


def unwritten(out: torch.Tensor) -> float:
    """What results are filled with beforehand: NaN, or the least whole number."""
    return math.nan if out.is_floating_point() else torch.iinfo(out.dtype).min


def written_gaps(out: torch.Tensor) -> int:
    """How many elements outside the result are no longer as they were filled; 0 where it has no gaps."""
    storage = whole_storage(out)
    if storage.numel() == out.numel():
        return 0
    lines = out.split(max(1, CHUNK // max(1, math.prod(out.shape[1:]))))
    blank = unwritten(out)

    def written_in(part: torch.Tensor) -> torch.Tensor:
        return ~part.isnan() if math.isnan(blank) else part != blank

    written, inside = (
        sum(int(written_in(part).sum().item()) for part in parts) for parts in (storage.split(CHUNK), lines)
    )
    return written - inside


def some_rows(problem: Problem, device: str) -> torch.Tensor | None:
    """Rows to compare of a case that is too large: both ends and where offsets pass 2^31; None to compare all."""
    size = max(problem.m * problem.out_n, problem.m * problem.k // 4)
    by_row = any(OPERANDS.get(step) in ("m", "mn") for step in problem.epilogue)
    if size < HUGE or problem.batched or problem.groups or problem.scaling or by_row:
        return None
    centres = [0, problem.m - 1]
    for layout in (problem.a, problem.out):
        if layout.order != "col":
            centres += [turn * 2**31 // layout.leading for turn in (1, 2)]
    near = {row for centre in centres for row in range(centre - EDGE, centre + EDGE) if 0 <= row < problem.m}
    return torch.tensor(sorted(near), device=device)


def reference_of(workload: Workload, inputs: Inputs, rows: torch.Tensor | None) -> Result:
    """The right answer in fp64, of some rows or all."""
    operator = get_operator(workload.operator)
    if rows is None:
        return operator.reference(workload, inputs)
    fewer = dataclasses.replace(workload, dims=FrozenMap({**workload.dims, "M": len(rows)}))
    return operator.reference(fewer, {**inputs, "a": inputs["a"][rows]})


def judge(loaded: _Loaded) -> Verdict:
    """How the output compares with the reference; errors of the GPU are raised here."""
    if tensors_of(loaded.out)[0].is_cuda:
        torch.cuda.synchronize()
    tolerance = get_operator(loaded.case.workload.operator).tolerance(loaded.case.workload)
    if loaded.rows is None:
        return compare_all(loaded.out, loaded.reference, tolerance)
    assert isinstance(loaded.out, torch.Tensor) and isinstance(loaded.reference, torch.Tensor)
    for part in loaded.out.split(max(1, CHUNK // max(1, loaded.out.shape[1]))):
        if bool(part.isnan().any()):
            return Verdict(math.inf, math.inf, "elements of a large result are NaN or not written")
    return compare(loaded.out[loaded.rows], loaded.reference, tolerance)


def compare_all(out: Result, reference: Result, tolerance: float) -> Verdict:
    """As `compare`, tensor by tensor, and a large one in parts of its first dimension; the first wrong or worst one."""
    verdicts = [Verdict(0.0, 0.0)]
    for ours, right in zip(tensors_of(out), tensors_of(reference), strict=True):
        step = max(1, HUGE // max(1, math.prod(right.shape[1:])))
        parts = zip(ours.split(step), right.split(step), strict=True) if right.dim() > 2 else [(ours, right)]
        verdicts += [compare(part, wanted, tolerance) for part, wanted in parts]
    wrong_ones = [verdict for verdict in verdicts if not verdict.right]
    return wrong_ones[0] if wrong_ones else max(verdicts, key=lambda verdict: verdict.error)


def compare(out: torch.Tensor, reference: torch.Tensor, tolerance: float) -> Verdict:
    """As `verify`, but what is not finite once the reference has out's type must be the same in out."""
    expected = reference.to(out.dtype)
    odd = ~expected.isfinite()
    count = int(odd.sum().item())
    if not count or out.shape != reference.shape:
        return verify(out, reference, tolerance)
    same = (out == expected) | (out.isnan() & expected.isnan())
    off = count - int((same & odd).sum().item())
    if off:
        return Verdict(math.inf, math.inf, f"{off} of {count} elements that must be inf or NaN are not the same")
    return verify(out.masked_fill(odd, 0), reference.masked_fill(odd, 0), tolerance)
