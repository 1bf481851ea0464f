"""Space of the template "gemv": where it must be empty, and that members build and load in wide pieces."""

from __future__ import annotations

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import gemv_kernel
from kernelwright.kernels.matmul.gemv import GEMV
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import DeviceSpec

H100, A100, MI300X = (named_device(name) for name in ("h100", "a100", "mi300x"))


def test_only_short_sides_are_served() -> None:
    for m, n in ((1, 4096), (4096, 1), (8, 512), (512, 8), (1, 1)):
        assert len(GEMV.space(matmul_workload(m, n, 1024), H100)), (m, n)
    assert not len(GEMV.space(matmul_workload(9, 512, 1024), H100))
    assert not len(GEMV.space(matmul_workload(8, 512, 1024, groups=4), H100))
    assert not len(GEMV.space(matmul_workload(8, 512, 1024, b_dtype="int4", scaling="group:128"), H100))


def test_parts_of_k_stay_within_the_workspace() -> None:
    free, tight = (
        matmul_workload(1, 64, 8192, attributes={"workspace_bytes": limit} if limit is not None else None)
        for limit in (None, 0)
    )
    assert {s.knobs["split_k"] for s in GEMV.space(free, H100)} > {1}
    assert {s.knobs["split_k"] for s in GEMV.space(tight, H100)} == {1}


@pytest.mark.parametrize("device", [H100, A100, MI300X], ids=lambda d: d.slug)
def test_members_build(device: DeviceSpec) -> None:
    workload = matmul_workload(1, 4096, 4096, epilogue=("bias", "silu"))
    schedule = next(
        s for s in GEMV.space(workload, device) if s.knobs["block_k"] == 1024 and s.knobs["num_stages"] == 1
    )
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    with triton_adapter.targeting(device):
        (launch,) = gemv_kernel.plan(inputs, out, dict(schedule.knobs), workload.epilogue)
        compiled = triton_adapter.compile_launch(launch)
    assert triton_adapter.registers_and_spills(compiled)[1] == 0
    if device.vendor == "nvidia":
        assert "ld.global.v4.b32" in str(triton_adapter.assembly_of(compiled)["ptx"])
