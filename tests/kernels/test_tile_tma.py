"""The template of a program for each tile: its space and builds, without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import triton

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.tile_tma import TILE_TMA
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Scalar, Workload

H100 = named_device("h100")
THOUSAND = matmul_workload(1000, 1000, 1000)


def members(workload: Workload, slug: str = "h100") -> tuple[Any, ...]:
    return TILE_TMA.space(workload, named_device(slug)).members


def test_it_is_offered_for_few_tiles_on_hopper_and_later() -> None:
    assert {(64, 128), (128, 128)} <= {(s.knobs["block_m"], s.knobs["block_n"]) for s in members(THOUSAND)}
    assert members(THOUSAND, "b200")
    assert not members(THOUSAND, "a100")
    assert not members(matmul_workload(8192, 8192, 8192))
    assert all(TILE_TMA.shared_bytes(THOUSAND, s) <= H100.shared_memory_bytes for s in members(THOUSAND))


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(1000, 1000, 1000, batch=4),
        matmul_workload(1000, 1000, 1000, groups=4),
        matmul_workload(1000, 1000, 1000, epilogue=("swiglu",)),
        matmul_workload(1000, 1000, 1000, "int8", scaling="row"),
        matmul_workload(1000, 0, 512),
        matmul_workload(1000, 512, 0),
    ],
    ids=str,
)
def test_no_schedules_for_what_the_kernel_cannot_do(workload: Workload) -> None:
    assert not members(workload)


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        (THOUSAND, {"block_m": 64, "block_n": 128, "num_stages": 4}),
        (THOUSAND, {"block_m": 64, "block_n": 128, "num_stages": 8}),
        (
            matmul_workload(1000, 3072, 768, "bf16", "nn", ("bias", "gelu_tanh")),
            {"block_m": 128, "block_n": 128, "num_stages": 3},
        ),
        (
            matmul_workload(729, 4304, 1152, "fp16", epilogue=("bias", "gelu")),
            {"block_m": 64, "block_n": 256, "num_stages": 4},
        ),
    ],
    ids=str,
)
def test_builds_without_spills_and_with_overlapping_products(workload: Workload, knobs: dict[str, Scalar]) -> None:
    found = [s for s in members(workload) if s.knobs["block_k"] == 64 and all(s.knobs[x] == knobs[x] for x in knobs)]
    assert found
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    with triton_adapter.targeting(H100):
        compiled = triton_adapter.compile_launch(MATMUL.plan(workload, found[0], inputs, out)[-1])
    code = compiled.asm["ptx"]
    assert "cp.async.bulk.tensor.2d.shared" in code and "wgmma.mma_async" in code
    # the activation takes two of the slow instructions an element
    elements = int(knobs["block_m"]) * int(knobs["block_n"]) // 128 if workload.epilogue else 0
    assert code.count("ex2.approx.ftz.f32") == code.count("rcp.approx.ftz.f32") == elements
    assert triton_adapter.registers_and_spills(compiled)[1] == 0
    assert triton_adapter.shared_bytes(compiled) <= TILE_TMA.shared_bytes(workload, found[0])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(code)
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            "--gpu-name=sm_90a",
            source,
            "-o",
            source.with_suffix(".cubin"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "serialized" not in said.stdout + said.stderr
