"""Matmul with 4-bit weights by numbers on the CPU."""

from __future__ import annotations

import importlib
import random

import pytest

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.weight_only import WEIGHT_ONLY
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import Inputs, launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

FORMATS = [("int4", "group:128"), ("int4", "group:32"), ("fp4", "mx"), ("fp4", "nvfp4")]


def check(workload: Workload, schedules: list[Schedule], inputs: Inputs | None = None) -> None:
    assert schedules
    kernel_file = importlib.import_module(WEIGHT_ONLY.kernel_module)
    inputs = inputs or MATMUL.make_inputs(workload, 1, "cpu")
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
    # fp16 under mx takes steps of 32, of which 8 parts are uneven
    ragged = {(2, 256), (8, 32)}
    members = [s for s in WEIGHT_ONLY.space(workload, H100) if (s.knobs["split_k"], s.knobs["block_k"]) in ragged]
    check(workload, members[:1])


def test_gated_units() -> None:
    workload = matmul_workload(5, 144, 256, "fp16", b_dtype="int4", scaling="group:64", epilogue=("swiglu",))
    check(workload, WEIGHT_ONLY.space(workload, H100).sample(random.Random(5), 3))


@pytest.mark.parametrize("byte", [90, 142, 160])
def test_powers_of_two_that_fp16_cannot_hold(byte: int) -> None:
    workload = matmul_workload(5, 72, 256, "fp16", b_dtype="fp4", scaling="mx", out_dtype="fp32")
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    inputs["b_scale"].fill_(byte)
    check(workload, WEIGHT_ONLY.space(workload, H100).sample(random.Random(2), 2), inputs)


@pytest.mark.parametrize(
    ("dtype", "scaling", "k"), [("int4", "group:128", 128), ("int4", "group:32", 32), ("fp4", "mx", 32)]
)
def test_a_single_scale_is_applied_once(dtype: str, scaling: str, k: int) -> None:
    workload = matmul_workload(5, 1, k, "fp16", b_dtype=dtype, scaling=scaling, epilogue=("bias",))
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    assert inputs["b_scale"].numel() == 1
    check(workload, list(WEIGHT_ONLY.space(workload, H100).members[:2]), inputs)


@pytest.mark.parametrize("n", [1, 2, 31, 32])
def test_few_columns(n: int) -> None:
    workload = matmul_workload(9, n, 256, "fp16", b_dtype="int4", scaling="group:64", epilogue=("bias",))
    check(workload, WEIGHT_ONLY.space(workload, H100).sample(random.Random(3), 2))
