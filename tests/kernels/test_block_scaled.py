"""Spaces and builds of the templates for block scales and for two operands with scales for few neighbours, without a
GPU."""

from __future__ import annotations

import importlib

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.block_scaled import BLOCK_SCALED
from kernelwright.kernels.matmul.microscaling import MICROSCALING
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.template import MatmulTemplate
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import Scalar, Workload

H100 = named_device("h100")

BLOCKS = matmul_workload(256, 256, 256, "fp8e4m3", scaling="block128")
MX = matmul_workload(256, 256, 256, "fp8e4m3", b_dtype="fp4", scaling="mx")
NVFP4 = matmul_workload(256, 256, 256, "fp4", scaling="nvfp4")


def test_spaces_are_empty_for_other_workloads() -> None:
    plain = [matmul_workload(256, 256, 256), matmul_workload(256, 256, 256, "fp8e4m3", scaling="row")]
    weights = matmul_workload(256, 256, 256, b_dtype="fp4", scaling="mx")
    for workload in (*plain, weights, MX, NVFP4):
        assert not BLOCK_SCALED.space(workload, H100).members
    for workload in (*plain, weights, BLOCKS):
        assert not MICROSCALING.space(workload, H100).members
    assert BLOCK_SCALED.space(BLOCKS, H100).members
    assert all(MICROSCALING.space(w, H100).members for w in (MX, NVFP4))


def test_what_devices_lack() -> None:
    assert not BLOCK_SCALED.space(BLOCKS, named_device("a100")).members
    assert not MICROSCALING.space(MX, named_device("a100")).members
    assert not MICROSCALING.space(NVFP4, named_device("a100")).members
    fp4 = matmul_workload(256, 256, 256, "fp4", scaling="mx")
    assert MICROSCALING.space(fp4, named_device("a100")).members


def test_tiles_of_a_gated_unit_do_not_meet_two_blocks_of_scales() -> None:
    uneven = matmul_workload(256, 2 * 160, 256, "fp8e4m3", scaling="block128", epilogue=("swiglu",))
    assert {s.knobs["block_n"] for s in BLOCK_SCALED.space(uneven, H100)} == {32}


def test_swapped_operands_are_for_few_rows() -> None:
    few = matmul_workload(16, 4096, 4096, "fp8e4m3", scaling="block128")
    assert {s.knobs["swap"] for s in BLOCK_SCALED.space(few, H100)} == {1}
    assert {s.knobs["swap"] for s in BLOCK_SCALED.space(BLOCKS, H100)} == {0}


def build(template: MatmulTemplate, workload: Workload, **knobs: Scalar) -> None:
    knobs = {"split_k": 1, "group_m": 1, "precision": "fp8", **knobs}
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    launches = importlib.import_module(template.kernel_module).plan(inputs, out, knobs, workload.epilogue)
    with triton_adapter.targeting(H100):
        compiled = triton_adapter.compile_launch(launches[0])
    _, spilled = triton_adapter.registers_and_spills(compiled)
    shared = triton_adapter.shared_bytes(compiled)
    estimate = template.shared(problem_of(workload), knobs)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert spilled == 0
    assert shared <= min(estimate + 4096, H100.shared_memory_bytes)


@pytest.mark.parametrize(
    ("m", "epilogue", "knobs"),
    [
        (4096, (), {"swap": 0, "block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 4}),
        (4096, ("swiglu",), {"swap": 0, "block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 4}),
        (16, ("bias",), {"swap": 1, "block_m": 16, "block_n": 128, "num_warps": 4, "num_stages": 5, "split_k": 4}),
    ],
)
def test_block_scaled_builds(m: int, epilogue: tuple[str, ...], knobs: dict[str, Scalar]) -> None:
    workload = matmul_workload(m, 4096, 4096, "fp8e4m3", scaling="block128", epilogue=epilogue)
    build(BLOCK_SCALED, workload, block_k=128, **knobs)


@pytest.mark.parametrize(
    ("a", "b", "scaling"), [("fp8e4m3", "fp8e5m2", "mx"), ("fp8e4m3", "fp4", "mx"), ("fp4", "fp4", "nvfp4")]
)
def test_microscaling_builds(a: str, b: str, scaling: str) -> None:
    workload = matmul_workload(4096, 4096, 4096, a, b_dtype=b, scaling=scaling)
    build(MICROSCALING, workload, block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
