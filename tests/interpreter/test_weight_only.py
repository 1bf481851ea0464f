"""Matmul with 4-bit weights by numbers on the CPU."""

from __future__ import annotations

import importlib
import random

import pytest

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.weight_only import WEIGHT_ONLY
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

FORMATS = [("int4", "group:128"), ("int4", "group:32"), ("fp4", "mx"), ("fp4", "nvfp4")]


def check(workload: Workload, schedules: list[Schedule]) -> None:
    assert schedules
    kernel_file = importlib.import_module(WEIGHT_ONLY.kernel_module)
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    expected = MATMUL.reference(workload, inputs)
    for schedule in schedules:
        out = MATMUL.empty_output(workload, "cpu")
        launch_all(kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
        verdict = verify(out, expected, MATMUL.tolerance(workload))
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("m", [5, 16, 70])
@pytest.mark.parametrize(("dtype", "scaling"), FORMATS)
def test_formats(dtype: str, scaling: str, m: int) -> None:
    workload = matmul_workload(m, 72, 256, "fp16", b_dtype=dtype, scaling=scaling, epilogue=("bias",))
    space = WEIGHT_ONLY.space(workload, H100)
    by_step = {s.knobs["block_k"]: s for s in space.sample(random.Random(3), 40)}
    check(workload, list(by_step.values()))


@pytest.mark.parametrize(("dtype", "scaling"), FORMATS)
def test_parts_along_k_and_a_ragged_end(dtype: str, scaling: str) -> None:
    workload = matmul_workload(7, 72, 1152, "fp16", b_dtype=dtype, scaling=scaling, epilogue=("bias", "relu"))
    members = [s for s in WEIGHT_ONLY.space(workload, H100) if s.knobs["split_k"] == 2 and s.knobs["block_k"] == 256]
    check(workload, members[:1])


def test_gated_units() -> None:
    workload = matmul_workload(5, 144, 256, "fp16", b_dtype="int4", scaling="group:64", epilogue=("swiglu",))
    check(workload, WEIGHT_ONLY.space(workload, H100).sample(random.Random(5), 3))
