"""Matmul of two quantised operands with scales for few neighbours along K, by numbers on the CPU."""

from __future__ import annotations

import importlib
import random

import pytest
import torch

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.microscaling import MICROSCALING
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Workload

H100 = named_device("h100")

FORMATS = [
    ("fp8e4m3", "fp8e4m3", "mx"),
    ("fp8e5m2", "fp8e4m3", "mx"),
    ("fp8e4m3", "fp4", "mx"),
    ("fp4", "fp8e5m2", "mx"),
    ("fp4", "fp4", "mx"),
    ("fp4", "fp4", "nvfp4"),
]


def check(workload: Workload, count: int) -> None:
    schedules = MICROSCALING.space(workload, H100).sample(random.Random(3), count)
    assert schedules
    kernel_file = importlib.import_module(MICROSCALING.kernel_module)
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    expected = MATMUL.reference(workload, inputs)
    for schedule in schedules:
        out = MATMUL.empty_output(workload, "cpu")
        launch_all(kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
        verdict = verify(out, expected, 1e-3)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize(("m", "n", "k"), [(5, 72, 256), (70, 136, 96), (1, 1, 32)])
@pytest.mark.parametrize(("a", "b", "scaling"), FORMATS)
def test_formats(a: str, b: str, scaling: str, m: int, n: int, k: int) -> None:
    check(matmul_workload(m, n, k, a, b_dtype=b, scaling=scaling, epilogue=("bias",), out_dtype="fp32"), 2)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("a", "b", "scaling"), [FORMATS[0], FORMATS[5]])
def test_gated_units(a: str, b: str, scaling: str) -> None:
    check(matmul_workload(5, 144, 64, a, b_dtype=b, scaling=scaling, epilogue=("swiglu",), out_dtype="fp32"), 2)


@pytest.mark.parametrize(("a", "b"), [("fp8e4m3", "fp8e4m3"), ("fp4", "fp8e5m2")])
def test_the_greatest_scale_byte_is_nan_and_spoils_its_row_alone(a: str, b: str) -> None:
    workload = matmul_workload(5, 40, 96, a, b_dtype=b, scaling="mx", out_dtype="fp32")
    inputs, out = MATMUL.make_inputs(workload, 1, "cpu"), MATMUL.empty_output(workload, "cpu")
    inputs["a_scale"][3, 1] = 255
    inputs["b_scale"][7, 2] = 255
    expected = MATMUL.reference(workload, inputs)
    schedule = MICROSCALING.space(workload, H100).sample(random.Random(3), 1)[0]
    kernel_file = importlib.import_module(MICROSCALING.kernel_module)
    launch_all(kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
    spoilt = torch.zeros(5, 40, dtype=torch.bool)
    spoilt[3], spoilt[:, 7] = True, True
    assert torch.equal(out.isnan(), spoilt)
    assert torch.equal(expected.isnan(), spoilt)


def test_nothing_to_sum_gives_the_epilogue() -> None:
    check(matmul_workload(5, 40, 0, "fp4", scaling="nvfp4", epilogue=("bias",), out_dtype="fp32"), 1)


@pytest.mark.parametrize(("kind", "group"), [(torch.uint8, 32), (torch.float8_e4m3fn, 16)])
def test_every_code_of_fp4(kind: torch.dtype, group: int) -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    # row i of a holds code i at k = i, and b is twice the unit matrix
    a = torch.zeros((16, 32), dtype=torch.uint8)
    for i in range(16):
        a[i, i // 2] = i << 4 if i % 2 else i
    weight = torch.zeros((16, 32), dtype=torch.uint8)
    for i in range(16):
        weight[i, i // 2] = 4 << 4 if i % 2 else 4
    scale = torch.full((16, 64 // group), 128, dtype=torch.uint8)
    scale = scale if kind == torch.uint8 else torch.full((16, 64 // group), 2.0).to(kind)
    out = torch.empty((16, 16))
    knobs = {"block_m": 16, "block_n": 32, "block_k": 64, "group_m": 1, "num_warps": 4, "num_stages": 2}
    inputs = {"a": a, "b": weight.T, "a_scale": scale, "b_scale": scale}
    launch_all(importlib.import_module(MICROSCALING.kernel_module).plan(inputs, out, knobs, ()))
    assert torch.equal(out.double(), torch.diag(values * 8))
