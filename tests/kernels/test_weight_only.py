"""Space and builds of the template for 4-bit weights, without a GPU."""

from __future__ import annotations

import importlib

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.weight_only import WEIGHT_ONLY
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import Scalar, Workload

H100 = named_device("h100")


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(16, 256, 256),
        matmul_workload(16, 256, 256, "fp8e4m3", scaling="block128"),
        matmul_workload(16, 256, 256, "fp8e4m3", b_dtype="fp4", scaling="mx"),
        matmul_workload(16, 256, 256, "fp4", scaling="nvfp4"),
        matmul_workload(0, 256, 256, b_dtype="int4", scaling="group:64"),
    ],
    ids=str,
)
def test_no_schedules_for_other_workloads(workload: Workload) -> None:
    assert not WEIGHT_ONLY.space(workload, H100).members


def test_no_schedules_without_the_bulk_copy_engine() -> None:
    workload = matmul_workload(16, 256, 256, b_dtype="int4", scaling="group:64")
    assert WEIGHT_ONLY.space(workload, H100).members
    for device in ("a100", "mi300x"):
        assert not WEIGHT_ONLY.space(workload, named_device(device)).members


def test_bf16_weights_are_scaled_before_the_product_only_where_out_is_as_coarse() -> None:
    steps = {out: {s.knobs["block_k"] for s in WEIGHT_ONLY.space(_int4(out), H100)} for out in ("bf16", "fp32")}
    assert steps["fp32"] == {64}
    assert steps["bf16"] == {64, 128, 256}


def test_fp16_weights_are_scaled_in_fp32_under_mx() -> None:
    for out in ("fp16", "fp32"):
        workload = matmul_workload(16, 4096, 4096, "fp16", b_dtype="fp4", scaling="mx", out_dtype=out)
        assert {s.knobs["block_k"] for s in WEIGHT_ONLY.space(workload, H100)} == {32}


def _int4(out: str) -> Workload:
    return matmul_workload(16, 4096, 4096, "bf16", b_dtype="int4", scaling="group:64", out_dtype=out)


@pytest.mark.parametrize(
    ("m", "dtype", "b_dtype", "scaling", "block_k"),
    [(16, "bf16", "int4", "group:128", 128), (70, "fp16", "fp4", "mx", 32), (16, "bf16", "fp4", "nvfp4", 128)],
)
def test_products_are_made_by_warp_groups(m: int, dtype: str, b_dtype: str, scaling: str, block_k: int) -> None:
    workload = matmul_workload(m, 6144, 4096, dtype, b_dtype=b_dtype, scaling=scaling)
    knobs: dict[str, Scalar] = {"block_m": 16 if m == 16 else 64, "block_n": 128, "block_k": block_k, "num_warps": 4}
    knobs |= {"num_stages": 4, "split_k": 2, "precision": dtype}
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    launches = importlib.import_module(WEIGHT_ONLY.kernel_module).plan(inputs, out, knobs, workload.epilogue)
    with triton_adapter.targeting(H100):
        compiled = triton_adapter.compile_launch(launches[0])
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    registers, spilled = triton_adapter.registers_and_spills(compiled)
    assert (registers <= 255, spilled) == (True, 0)
    assert triton_adapter.shared_bytes(compiled) <= WEIGHT_ONLY.shared(problem_of(workload), knobs) + 4096
