"""Batches of small products by numbers on the CPU: odd sizes, all layouts, shared operands, ragged batches."""

from __future__ import annotations

import random

import pytest
import torch

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import batched_small_kernel
from kernelwright.kernels.matmul.batched_small import BATCHED_SMALL
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import FrozenMap, Workload

H100 = named_device("h100")

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def run(workload: Workload, knobs: dict[str, object]) -> torch.Tensor:
    inputs, out = MATMUL.make_inputs(workload, 1, "cpu"), MATMUL.empty_output(workload, "cpu")
    launch_all(batched_small_kernel.plan(inputs, out, knobs, workload.epilogue))
    return out


def check(workload: Workload, **knobs: int) -> None:
    expected = MATMUL.reference(workload, MATMUL.make_inputs(workload, 1, "cpu"))
    for schedule in BATCHED_SMALL.space(workload, H100).sample(random.Random(4), 2):
        verdict = verify(run(workload, {**schedule.knobs, **knobs}), expected, MATMUL.tolerance(workload))
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize(("batch", "m", "n", "k"), [(7, 27, 27, 128), (5, 49, 49, 32), (3, 1, 5, 3), (2, 8, 200, 70)])
def test_odd_sizes_and_layouts(batch: int, m: int, n: int, k: int, layout: str) -> None:
    check(matmul_workload(m, n, k, "fp16", layout, batch=batch))


@pytest.mark.parametrize("batches", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 4, 9])
def test_batches_that_the_programs_do_not_divide(batch: int, batches: int) -> None:
    check(matmul_workload(20, 33, 16, "fp32", batch=batch), batches=batches)


@pytest.mark.parametrize("epilogue", [("bias", "gelu"), ("residual", "scale_m"), ("scale", "multiply", "relu")])
def test_epilogues(epilogue: tuple[str, ...]) -> None:
    check(matmul_workload(17, 24, 40, "fp16", epilogue=epilogue, batch=5), batches=2)


@pytest.mark.parametrize("layouts", [("row", "col@0", "row"), ("row:70@0", "row:33@2000", "row:40@1400")])
def test_shared_operands_and_gaps(layouts: tuple[str, str, str]) -> None:
    base = matmul_workload(20, 33, 50, "fp16", batch=6)
    workload = Workload("matmul", base.dims, base.dtypes, FrozenMap(dict(zip(("a", "b", "out"), layouts, strict=True))))
    schedule = BATCHED_SMALL.space(workload, H100).members[0]
    inputs, out = MATMUL.make_inputs(workload, 2, "cpu"), MATMUL.empty_output(workload, "cpu")
    gaps = torch.as_strided(out, (out.untyped_storage().nbytes() // 2,), (1,))
    launch_all(batched_small_kernel.plan(inputs, out, dict(schedule.knobs), ()))
    assert verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)).right
    assert gaps.isnan().sum() == gaps.numel() - out.numel(), "a gap between rows was written"


def test_no_products_give_zeros_and_the_bias() -> None:
    check(matmul_workload(16, 20, 0, "fp16", epilogue=("bias",), batch=3))


def test_an_empty_batch_launches_nothing() -> None:
    workload = matmul_workload(16, 16, 16, "fp16", batch=0)
    inputs, out = MATMUL.make_inputs(workload, 0, "cpu"), MATMUL.empty_output(workload, "cpu")
    schedule = BATCHED_SMALL.space(matmul_workload(16, 16, 16, "fp16", batch=4), H100).members[0]
    assert batched_small_kernel.plan(inputs, out, dict(schedule.knobs), ()) == []
