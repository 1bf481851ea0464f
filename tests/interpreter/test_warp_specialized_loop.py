"""The loop that triton divides among warps, by numbers on the CPU, where one program runs it undivided."""

from __future__ import annotations

import pytest

from kernelwright.kernels.matmul import warp_specialized_loop_kernel
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Workload

KNOBS = {"block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 8, "num_stages": 2, "group_m": 4, "split_k": 1}


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(200, 136, 72, "fp16", "nt", ("bias", "gelu", "residual")),
        matmul_workload(264, 72, 40, "fp16", "tn", ("bias_m",)),
        matmul_workload(136, 200, 72, "fp16", "nn"),
        matmul_workload(130, 61, 48, "fp32", "nt", ("relu",)),
    ],
)
def test_products_are_right(programs: int, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warp_specialized_loop_kernel, "multiprocessors", lambda tensor: programs)
    knobs = {**KNOBS, "precision": "ieee" if workload.dtypes["a"] == "fp32" else "fp16"}
    inputs, out = MATMUL.make_inputs(workload, 1, "cpu"), MATMUL.empty_output(workload, "cpu")
    launch_all(warp_specialized_loop_kernel.plan(inputs, out, knobs, workload.epilogue))
    assert verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)).right
