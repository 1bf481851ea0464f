"""Bad matmul schedules for tests of the measuring runner: how each fault looks without a GPU, and with one.

The schedules belong to the template "planted"; their knob `fault` says what goes wrong. `plan` builds them,
`start_fake` measures without a GPU, and `start_real` runs kernels that fault, hang and lie on a real one.
"""

import os
import signal
import time

import triton
import triton.language as tl

from kernelwright.kernels.build import builder, plan_on_meta
from kernelwright.kernels.matmul.operator import TEMPLATES
from kernelwright.kernels.matmul.template import MatmulTemplate
from kernelwright.kernels.space import Knob
from kernelwright.search import measure_job
from kernelwright.search.measure_job import FinalsJob, LoadJob, Reply, WarmUpJob
from kernelwright.types import Measurement, Status

FAULTS = ("none", "abort_in_compiler", "no_such_syntax", "wrong", "unwritten", "raise", "crash", "hang")
SEED_THAT_HANGS = 600


def _knobs(problem, device, precisions):
    values = {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2, "group_m": 1, "split_k": 1}
    fixed = [Knob(name, (value,)) for name, value in values.items()]
    return [*fixed, Knob("precision", precisions, "category"), Knob("fault", FAULTS, "category")]


def plant():
    """Add the template to the matmul operator of this process."""
    TEMPLATES["planted"] = MatmulTemplate("planted", __name__, _knobs, lambda problem, device: [], lambda p, k: 0)


def preload():
    """What a nursery of both kinds of children calls: all that they import."""
    builder()


def plan_in_compiler(workload, schedule):
    """What the build children call."""
    plant()
    if schedule.knobs["fault"] == "abort_in_compiler":
        os.abort()
    return plan_on_meta(workload, schedule)


@triton.jit
def fill(out_ptr, SIZE: tl.constexpr, VALUE: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.full((SIZE,), VALUE, tl.float32))


@triton.jit
def write_far_away(out_ptr, FAR: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * FAR, 1.0)


@triton.jit
def spin(out_ptr):
    while tl.load(out_ptr, volatile=True) != 12345.0:
        tl.store(out_ptr + 1, 0.0)


@triton.jit
def no_such_syntax(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr + tl.arange(0, 3)))


def plan(inputs, out, knobs, epilogue):
    """A kernel file's `plan`."""
    fault = knobs["fault"]
    if fault == "none":
        from kernelwright.kernels.matmul import pointer_kernel

        return pointer_kernel.plan(inputs, out, knobs, epilogue)
    if fault == "raise":
        if out.device.type == "meta":
            return []
        raise RuntimeError("planted")
    table = {
        "wrong": (fill, (out.numel() // 64,), (out, 64, 1.0), {}),
        "unwritten": (fill, (1,), (out, 64, 1.0), {}),
        "crash": (write_far_away, (4096,), (out, 1 << 40), {}),
        "hang": (spin, (1,), (out,), {}),
        "no_such_syntax": (no_such_syntax, (1,), (out,), {}),
        "abort_in_compiler": (fill, (1,), (out, 64, 1.0), {}),
    }
    return [table[fault]]


def start_real(device_index):
    """What the measuring child calls on a GPU."""
    plant()
    return measure_job.start(device_index)


def start_fake(device_index):
    """What the measuring child calls without a GPU: the same faults, by the means that a CPU has."""
    return _fake


def _fake(job):
    if isinstance(job, WarmUpJob):
        return Reply(())
    if isinstance(job, LoadJob):
        time.sleep(600 if job.seed == SEED_THAT_HANGS else 0)
        return Reply(())
    if isinstance(job, FinalsJob):
        return Reply(tuple(_answer(schedule) for schedule in job.schedules), False, "torch.mm", 12.0, 0.01, 1.0)
    return Reply((_answer(job.schedule),), job.schedule.knobs["fault"] == "crash")


def _answer(schedule):
    fault = schedule.knobs.get("fault", "none")
    if fault == "hang":
        time.sleep(600)
    if fault == "raise":
        raise RuntimeError("planted")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault in ("wrong", "unwritten"):
        return Measurement(Status.WRONG_RESULT, message="planted")
    return Measurement(Status.OK, 10.0, (10.0,), 1e-3)


__all__ = ["FAULTS", "SEED_THAT_HANGS", "plan", "plan_in_compiler", "plant", "preload", "start_fake", "start_real"]
