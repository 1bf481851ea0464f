"""Space of the template "batched_small": where it must be empty, huge batches, and that members build."""

from __future__ import annotations

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import batched_small_kernel
from kernelwright.kernels.matmul.batched_small import BATCHED_SMALL
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import Workload, matmul_workload
from kernelwright.types import DeviceSpec

H100, A100, MI300X = (named_device(name) for name in ("h100", "a100", "mi300x"))
HUGE_BATCH = matmul_workload(16, 16, 16, "fp16", batch=65537)


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(64, 64, 64),
        matmul_workload(64, 64, 64, groups=4),
        matmul_workload(256, 256, 64, batch=8),
        matmul_workload(64, 64, 4096, batch=8),
        matmul_workload(64, 64, 64, epilogue=("swiglu",), batch=8),
    ],
)
def test_only_batches_of_small_matrices_are_served(workload: Workload) -> None:
    assert not len(BATCHED_SMALL.space(workload, H100))


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(27, 27, 128, "fp16", batch=2048),
        matmul_workload(49, 49, 32, "fp16", "nn", batch=8192),
        matmul_workload(8, 512, 128, "bf16", "nn", batch=128),
        matmul_workload(77, 64, 80, "fp16", batch=12),
        matmul_workload(16, 16, 16, "fp32", batch=1),
        HUGE_BATCH,
    ],
)
def test_small_matrices_have_schedules(workload: Workload) -> None:
    assert len(BATCHED_SMALL.space(workload, H100))


def test_a_batch_of_any_size_stands_in_the_first_dimension_of_the_grid() -> None:
    schedule = BATCHED_SMALL.space(HUGE_BATCH, H100).members[0]
    inputs, out = MATMUL.make_inputs(HUGE_BATCH, 0, "meta"), MATMUL.empty_output(HUGE_BATCH, "meta")
    ((_, grid, _, _),) = batched_small_kernel.plan(inputs, out, dict(schedule.knobs), ())
    assert grid == (65537,)


@pytest.mark.parametrize("device", [H100, A100, MI300X], ids=lambda d: d.slug)
def test_members_build(device: DeviceSpec) -> None:
    workload = matmul_workload(27, 27, 128, "fp16", epilogue=("bias",), batch=2048)
    schedule = next(s for s in BATCHED_SMALL.space(workload, device) if s.knobs["batches"] == 4)
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    with triton_adapter.targeting(device):
        (launch,) = batched_small_kernel.plan(inputs, out, dict(schedule.knobs), workload.epilogue)
        compiled = triton_adapter.compile_launch(launch)
    assert triton_adapter.registers_and_spills(compiled)[1] == 0
