"""Spaces of the grouped templates: where they must be empty, and that members build for Hopper and older GPUs."""

from __future__ import annotations

import pytest

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.grouped import GROUPED, GROUPED_POINTER
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import DeviceSpec, Workload

H100, A100, MI300X = (named_device(name) for name in ("h100", "a100", "mi300x"))
EXPERTS = matmul_workload(1024, 512, 256, groups=8)


def test_only_experts_are_served() -> None:
    for other in (matmul_workload(64, 64, 64), matmul_workload(64, 64, 64, batch=4)):
        assert not len(GROUPED.space(other, H100))
        assert not len(GROUPED_POINTER.space(other, H100))


def test_the_bulk_copy_engine_needs_hopper_and_alignment() -> None:
    assert len(GROUPED.space(EXPERTS, H100))
    assert not len(GROUPED.space(EXPERTS, A100))
    assert not len(GROUPED.space(EXPERTS, MI300X))
    assert not len(GROUPED.space(matmul_workload(1024, 512, 257, groups=8), H100))
    assert not len(GROUPED.space(matmul_workload(1024, 512, 256, layout="tn", groups=8), H100))
    for device in (H100, A100, MI300X):
        assert len(GROUPED_POINTER.space(matmul_workload(1024, 512, 257, groups=8), device))


def test_rows_that_are_no_whole_pieces_are_not_stored_by_the_bulk_copy_engine() -> None:
    base = matmul_workload(1024, 500, 256, groups=8)
    padded = Workload("matmul", base.dims, base.dtypes, {"a": "row", "b": "col", "out": "row:512"})  # type: ignore[arg-type]
    assert {s.knobs["tma_store"] for s in GROUPED.space(padded, H100)} == {0}
    assert {s.knobs["tma_store"] for s in GROUPED.space(EXPERTS, H100)} == {0, 1}


def test_few_rows_an_expert_turn_the_tile() -> None:
    decode = matmul_workload(1260, 4096, 7168, groups=252)
    assert {(s.knobs["swap"], s.knobs["block_m"]) for s in GROUPED.space(decode, H100)} >= {(1, 16)}


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        (EXPERTS, {"swap": 0, "tma_store": 1, "block_m": 128, "block_n": 256}),
        (matmul_workload(40, 512, 256, epilogue=("bias", "swiglu"), groups=8), {"swap": 1, "tma_store": 0}),
    ],
)
def test_members_build_for_hopper(pool: BuildPool, workload: Workload, knobs: dict[str, int]) -> None:
    schedule = next(s for s in GROUPED.space(workload, H100) if all(s.knobs[name] == knobs[name] for name in knobs))
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0
    assert "wgmma.mma_async" in str(report.artifact["matmul_grouped.ptx"])
    # both operands come from shared memory: no tile passes through registers on its way to the tensor cores
    assert "ttg.local_alloc %" not in str(report.artifact["matmul_grouped.ttgir"])


@pytest.mark.parametrize("device", [A100, MI300X], ids=lambda d: d.slug)
def test_pointers_build_for_other_gpus(pool: BuildPool, device: DeviceSpec) -> None:
    schedule = GROUPED_POINTER.space(EXPERTS, device).members[-1]
    assert pool.build(EXPERTS, schedule, device).registers > 0
