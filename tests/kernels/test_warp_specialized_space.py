"""The warp-specialised template's space and builds, without a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.warp_specialized import WARP_SPECIALIZED
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import Scalar, Workload

H100 = named_device("h100")
KNOBS: dict[str, Scalar] = {
    "mode": "cooperative",
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "num_warps": 8,
    "num_stages": 3,
    "group_m": 8,
    "split_k": 1,
    "subtile": 1,
    "repack": 0,
    "precision": "bf16",
}


def members(workload: Workload, slug: str = "h100") -> tuple[Any, ...]:
    return WARP_SPECIALIZED.space(workload, named_device(slug)).members


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(512, 512, 512, "fp32"),
        matmul_workload(512, 512, 512, batch=4),
        matmul_workload(512, 512, 512, groups=4),
        matmul_workload(512, 512, 512, "fp8e4m3", scaling="block128"),
        matmul_workload(512, 512, 512, b_dtype="int4", scaling="group:64"),
        matmul_workload(512, 512, 512, "int8", scaling="row"),
        matmul_workload(512, 512, 512, "fp8e4m3", "nn", scaling="tensor"),
        matmul_workload(512, 0, 512),
        matmul_workload(512, 512, 0),
    ],
    ids=str,
)
def test_no_schedules_for_what_the_kernel_cannot_do(workload: Workload) -> None:
    assert not members(workload)


def test_schedules_are_for_hopper_and_fit_there() -> None:
    workload = matmul_workload(4096, 4096, 4096)
    for slug in ("a100", "b200", "rtx5090", "mi300x"):
        assert not members(workload, slug)
    found = members(workload)
    assert {s.knobs["mode"] for s in found} == {"cooperative", "pingpong"}
    assert all(WARP_SPECIALIZED.shared_bytes(workload, s) <= H100.shared_memory_bytes for s in found)


def test_unaligned_operands_are_repacked() -> None:
    assert {s.knobs["repack"] for s in members(matmul_workload(4096, 4096, 4095))} == {1}
    assert {s.knobs["repack"] for s in members(matmul_workload(4096, 4095, 4096))} == {0}


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        (matmul_workload(4096, 4096, 4096), {"block_n": 256}),
        (matmul_workload(4096, 4095, 4096, epilogue=("bias", "relu")), {"mode": "pingpong", "num_stages": 4}),
        (matmul_workload(4096, 4096, 4096, "fp16", "tn", ("swiglu",)), {"num_stages": 3}),
        (matmul_workload(4096, 4096, 4096, "fp8e4m3", scaling="row"), {"block_k": 128, "subtile": 2, "block_n": 256}),
    ],
    ids=str,
)
def test_builds_without_spills_and_as_large_as_estimated(workload: Workload, knobs: dict[str, Scalar]) -> None:
    chosen = {**KNOBS, **knobs, "precision": MATMUL.compute_precisions(workload)[0]}
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    launches = importlib.import_module(WARP_SPECIALIZED.kernel_module).plan(inputs, out, chosen, workload.epilogue)
    with triton_adapter.targeting(H100):
        compiled = triton_adapter.compile_launch(launches[-1])
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert triton_adapter.threads(compiled) == 12 * 32
    assert triton_adapter.registers_and_spills(compiled) == (168, 0)
    assert triton_adapter.shared_bytes(compiled) <= WARP_SPECIALIZED.shared(problem_of(workload), chosen)
