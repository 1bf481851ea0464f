"""Products with a short side by numbers on the CPU: rows or columns, all layouts, unaligned sizes, parts, batches."""

from __future__ import annotations

import random

import pytest
import torch

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import gemv_kernel
from kernelwright.kernels.matmul.gemv import GEMV
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def run(workload: Workload, schedule: Schedule) -> torch.Tensor:
    inputs, out = MATMUL.make_inputs(workload, 1, "cpu"), MATMUL.empty_output(workload, "cpu")
    launch_all(gemv_kernel.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
    return out


def check(workload: Workload, count: int = 3, **knobs: int) -> None:
    members = [s for s in GEMV.space(workload, H100) if all(s.knobs[name] == knobs[name] for name in knobs)]
    # few programs: the interpreter runs them one after the other
    members.sort(key=lambda s: -int(s.knobs["block_m"]) * int(s.knobs["block_n"]))
    assert members
    expected = MATMUL.reference(workload, MATMUL.make_inputs(workload, 1, "cpu"))
    for schedule in random.Random(2).sample(members[: 3 * count], min(count, len(members))):
        verdict = verify(run(workload, schedule), expected, MATMUL.tolerance(workload))
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 96, 256), (1, 37, 131), (96, 1, 256), (41, 1, 77), (3, 50, 130), (45, 6, 64), (5, 3, 70)]
)
def test_either_side_may_be_short(m: int, n: int, k: int, layout: str) -> None:
    check(matmul_workload(m, n, k, "fp16", layout), 2)


@pytest.mark.parametrize("k", [1, 2, 1000, 4097])
def test_dot_products(k: int) -> None:
    check(matmul_workload(1, 1, k, "fp32"))


@pytest.mark.parametrize("split_k", [2, 8])
@pytest.mark.parametrize("epilogue", [("bias", "sigmoid"), ("swiglu",)])
@pytest.mark.parametrize(("m", "n"), [(1, 32), (32, 2)])
def test_parts_of_k_are_added(m: int, n: int, epilogue: tuple[str, ...], split_k: int) -> None:
    # K is no multiple of the parts, so the last one is ragged
    check(matmul_workload(m, n, 1028, "fp16", epilogue=epilogue), 2, split_k=split_k)


def test_parts_are_added_in_the_same_order_every_time() -> None:
    workload = matmul_workload(1, 8, 1024, "fp16")
    schedule = next(s for s in GEMV.space(workload, H100) if s.knobs["split_k"] == 8)
    assert torch.equal(run(workload, schedule), run(workload, schedule))


@pytest.mark.parametrize(
    "epilogue", [("bias", "residual", "gelu"), ("scale_m", "bias_m"), ("bias", "geglu"), ("swiglu", "multiply")]
)
@pytest.mark.parametrize(("m", "n"), [(2, 40), (40, 2)])
def test_epilogues(m: int, n: int, epilogue: tuple[str, ...]) -> None:
    check(matmul_workload(m, n, 96, "fp16", epilogue=epilogue), 2)


@pytest.mark.parametrize("dtype", ["int8", "fp8e4m3"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_scaled_operands(dtype: str, scaling: str) -> None:
    check(matmul_workload(2, 40, 160, dtype, scaling=scaling, out_dtype="fp32"), 2)


@pytest.mark.parametrize(("m", "n"), [(1, 24), (24, 1)])
@pytest.mark.parametrize("split_k", [1, 4])
def test_batches(m: int, n: int, split_k: int) -> None:
    check(matmul_workload(m, n, 512, "fp16", epilogue=("residual",), batch=3), 2, split_k=split_k)


@pytest.mark.parametrize(
    "layouts", [("row:150", "row:90", "row:100"), ("row", "col:140@0", "row"), ("strided:300,2", "col", "col:8")]
)
def test_any_strides(layouts: tuple[str, str, str]) -> None:
    base = matmul_workload(3, 65, 130, "fp16", batch=2 if "@" in layouts[1] else None)
    workload = Workload("matmul", base.dims, base.dtypes, dict(zip(("a", "b", "out"), layouts, strict=True)))  # type: ignore[arg-type]
    inputs, out = MATMUL.make_inputs(workload, 2, "cpu"), MATMUL.empty_output(workload, "cpu")
    gaps = torch.as_strided(out, (out.untyped_storage().nbytes() // 2,), (1,))
    schedule = GEMV.space(workload, H100).members[-1]
    launch_all(gemv_kernel.plan(inputs, out, dict(schedule.knobs), ()))
    assert verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)).right
    assert gaps.isnan().sum() == gaps.numel() - out.numel(), "a gap between rows was written"


def test_no_products_give_zeros_and_the_bias() -> None:
    check(matmul_workload(1, 48, 0, "fp16", epilogue=("bias", "relu")))


def test_nothing_to_write_launches_nothing() -> None:
    for workload in (matmul_workload(0, 64, 64, "fp16"), matmul_workload(1, 64, 64, "fp16", batch=0)):
        inputs, out = MATMUL.make_inputs(workload, 0, "cpu"), MATMUL.empty_output(workload, "cpu")
        schedule = next(iter(GEMV.space(matmul_workload(1, 64, 64, "fp16"), H100)))
        assert gemv_kernel.plan(inputs, out, dict(schedule.knobs), ()) == []
