"""Our schedule, the vendor call and Inductor's max-autotune timed in turns: what a benchmark's child process does."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.reference import finished
from kernelwright.kernels.matmul.workload import problem_of
from kernelwright.kernels.operator import Inputs, launch_all
from kernelwright.search.timing import FINAL, Timer, median, paired_ratio
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

MODE = "max-autotune-no-cudagraphs"
"""Without graphs of its own: the timer puts every contender into one."""

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class CompareJob:
    """Time one schedule beside the vendor call and Inductor."""

    workload: Workload
    schedule: Schedule
    seed: int


@dataclasses.dataclass(frozen=True)
class Compared:
    """Medians of one round in microseconds. compile_s: Inductor's first call. inductor_error: relative, against fp64.

    aa_ratio: the vendor call against itself.
    """

    ours_us: float
    vendor_us: float
    inductor_us: float
    compile_s: float
    inductor_error: float
    aa_ratio: float


def comparable(workload: Workload) -> bool:
    """Whether plain torch code says the workload, so that Inductor can compile it."""
    problem = problem_of(workload)
    return not (problem.scaling or problem.groups) and problem.out_dtype == problem.a_dtype


def expression(workload: Workload) -> Callable[[Inputs], torch.Tensor]:
    """The workload as a user writes it in torch."""

    def run(inputs: Inputs) -> torch.Tensor:
        return finished(torch.matmul(inputs["a"], inputs["b"]), inputs, workload.epilogue)

    return run


def start(device_index: int, l2_bytes: int) -> Callable[[CompareJob], Compared]:
    """Called once in the child."""
    torch.cuda.set_device(device_index)
    timer = Timer(l2_bytes)
    return lambda job: compare(job, "cuda", lambda calls: timer.samples(calls, FINAL), inductor)


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Inductor compiles it when it may try everything; nothing is left from earlier compiles."""
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, mode=MODE, dynamic=False)
    return compiled


def compare(
    job: CompareJob, device: str, samples: Callable[[list[Callable[[], Any]]], list[list[float]]], compiler: Compiled
) -> Compared:
    """Compile, check Inductor's result, time all. samples: readings of each call, taken in turns."""
    operator = get_operator("matmul")
    inputs = operator.make_inputs(job.workload, job.seed, device)
    out = operator.empty_output(job.workload, device)
    vendor = operator.vendor(job.workload, inputs)
    if vendor is None:
        raise ValueError(f"no vendor call does {job.workload}")
    tf32 = "tf32" in operator.compute_precisions(job.workload)
    function = compiler(expression(job.workload))

    def theirs() -> torch.Tensor:
        # the vendor call sets it too, and Inductor compiles anew when it has changed
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return function(inputs)

    began = time.monotonic()
    with torch.no_grad():
        result = theirs()
        compile_s = time.monotonic() - began
        reference = operator.reference(job.workload, inputs)
        error = verify(result, reference, float("inf")).error
        del result, reference
        launches = operator.plan(job.workload, job.schedule, inputs, out)
        ours, one, other, inductors = samples([lambda: launch_all(launches), vendor[1], vendor[1], theirs])
    return Compared(
        round(median(ours), 3),
        round(median(list(itertools.chain(one, other))), 3),
        round(median(inductors), 3),
        round(compile_s, 2),
        float(f"{error:.3g}"),
        round(paired_ratio(one, other), 4),
    )
