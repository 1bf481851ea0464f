"""The loop that triton divides among warps: where it is offered, that the division really happens, and rightly."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import warp_specialized_loop_kernel
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.warp_specialized_loop import WARP_SPECIALIZED_LOOP
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")


def schedule(workload: Workload, **wanted: object) -> Schedule:
    """A schedule of the space with the wanted knobs."""
    members = WARP_SPECIALIZED_LOOP.space(workload, H100)
    return next(s for s in members if all(s.knobs[name] == value for name, value in wanted.items()))


def compiled(workload: Workload, chosen: Schedule) -> Any:
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    with triton_adapter.targeting(H100):
        (launch,) = warp_specialized_loop_kernel.plan(inputs, out, dict(chosen.knobs), workload.epilogue)
        return triton_adapter.compile_launch(launch)


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(1024, 1024, 1024, batch=4),
        matmul_workload(1024, 1024, 1024, groups=4),
        matmul_workload(1024, 1024, 1023),
        matmul_workload(1024, 1024, 1024, epilogue=("swiglu",)),
        matmul_workload(1024, 1024, 1024, "fp8e4m3", "nn", scaling="tensor"),
        matmul_workload(1024, 1024, 1024, "fp8e4m3", scaling="block128"),
        matmul_workload(16, 1024, 1024),
        matmul_workload(1024, 1024, 0),
    ],
)
def test_what_it_cannot_run_has_no_schedules(workload: Workload) -> None:
    assert not len(WARP_SPECIALIZED_LOOP.space(workload, H100))


@pytest.mark.parametrize("name", ["a100", "b200", "mi300x"])
def test_only_hopper_divides_such_loops(name: str) -> None:
    assert not len(WARP_SPECIALIZED_LOOP.space(matmul_workload(4096, 4096, 4096), named_device(name)))


def test_fp32_is_offered_in_precisions_of_the_matrix_units() -> None:
    members = WARP_SPECIALIZED_LOOP.space(matmul_workload(1024, 1024, 1024, "fp32", error_budget=1e-3), H100)
    assert "tf32" in {s.knobs["precision"] for s in members}
    assert "ieee" not in {s.knobs["precision"] for s in members}


DIVIDED = [
    (matmul_workload(4096, 4096, 4096), {"block_n": 256, "num_stages": 3}),
    (matmul_workload(4096, 4096, 4096, layout="tn"), {"block_n": 128, "num_stages": 5}),
    (matmul_workload(4096, 4096, 4096, epilogue=("bias", "residual", "relu")), {"block_n": 128, "num_stages": 4}),
    (matmul_workload(4096, 4093, 4096), {"block_n": 128, "num_stages": 4}),
    (matmul_workload(4096, 4096, 4096, "fp8e4m3", scaling="row"), {"block_n": 256, "block_k": 128, "num_stages": 3}),
]


@pytest.mark.parametrize(("workload", "knobs"), DIVIDED)
def test_the_loop_is_divided_among_warps(workload: Workload, knobs: dict[str, object]) -> None:
    chosen = schedule(workload, block_m=128, **knobs)
    kernel = compiled(workload, chosen)
    code = kernel.asm["ttgir"]
    assert "ttg.warp_specialize" in code
    assert kernel.metadata.num_warps == 12
    assert "wgmma" in kernel.asm["ptx"]
    assert triton_adapter.registers_and_spills(kernel)[1] == 0
    assert triton_adapter.shared_bytes(kernel) <= WARP_SPECIALIZED_LOOP.shared_bytes(workload, chosen)
    _rows_are_moved_once(code)


def _rows_are_moved_once(code: str) -> None:
    """The second group's range of rows begins at 64; the tile's first row must not have been moved by 64 too."""
    second = code.partition("partition1(")[2]
    ranges = re.findall(r"make_range \{.*?end = 128 : i32, start = 64 : i32\}", second)
    moved = re.findall(r"(%\w+) = arith\.addi %\w+, %c64_i32\w* ", second)
    splat = re.findall(r"tt\.splat (%\w+)", second)
    if ranges:
        assert not set(moved) & set(splat)
