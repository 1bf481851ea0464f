"""Matmul of fp8 operands with scales for blocks of 128, by numbers on the CPU."""

from __future__ import annotations

import importlib

import pytest

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.block_scaled import BLOCK_SCALED
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Workload

H100 = named_device("h100")


def check(workload: Workload, swap: int, split_k: int = 1, turned: bool = False) -> None:
    members = (s for s in BLOCK_SCALED.space(workload, H100) if s.knobs["swap"] == swap)
    schedule = next(s for s in members if s.knobs["split_k"] == split_k)
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    expected = MATMUL.reference(workload, inputs)
    if turned:
        inputs |= {name: inputs[name].T.contiguous().T for name in ("a_scale", "b_scale")}
    out = MATMUL.empty_output(workload, "cpu")
    kernel_file = importlib.import_module(BLOCK_SCALED.kernel_module)
    launch_all(kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
    verdict = verify(out, expected, 1e-3)
    assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize(("m", "swap"), [(5, 1), (64, 1), (70, 0)])
@pytest.mark.parametrize(("n", "k", "turned"), [(72, 256, False), (136, 384, True), (144, 128, False)])
def test_sizes_and_strides_of_scales(m: int, swap: int, n: int, k: int, turned: bool) -> None:
    workload = matmul_workload(m, n, k, "fp8e4m3", scaling="block128", epilogue=("bias",), out_dtype="fp32")
    check(workload, swap, turned=turned)


def test_one_row_and_one_block() -> None:
    workload = matmul_workload(1, 136, 128, "fp8e4m3", scaling="block128", out_dtype="fp32")
    check(workload, 1)


def test_parts_along_k_and_a_ragged_end() -> None:
    workload = matmul_workload(7, 136, 1152, "fp8e4m3", scaling="block128", epilogue=("relu",), out_dtype="fp32")
    check(workload, 1, split_k=2)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("m", "swap"), [(70, 0), (5, 1)])
def test_gated_units(m: int, swap: int) -> None:
    workload = matmul_workload(m, 384, 256, "fp8e4m3", scaling="block128", epilogue=("swiglu",), out_dtype="fp32")
    check(workload, swap)
