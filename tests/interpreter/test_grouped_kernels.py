"""Grouped matmul by numbers on the CPU: uneven and empty experts, layouts, epilogues, rows that belong to nobody."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence

import pytest
import torch

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.grouped import GROUPED, GROUPED_POINTER
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.own_limits import OwnLimits
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import Inputs, launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

both = pytest.mark.parametrize("template", [GROUPED, GROUPED_POINTER], ids=lambda t: t.name)


def some(template: OwnLimits, workload: Workload, count: int) -> list[Schedule]:
    return template.space(workload, H100).sample(random.Random(11), count)


def run(template: OwnLimits, workload: Workload, schedule: Schedule, inputs: Inputs) -> torch.Tensor:
    out = MATMUL.empty_output(workload, "cpu")
    kernel_file = importlib.import_module(template.kernel_module)
    launch_all(kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue))
    return out


def check(template: OwnLimits, workload: Workload, ends: Sequence[int] | None = None, count: int = 2) -> None:
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    if ends is not None:
        inputs["offsets"] = torch.tensor(ends, dtype=torch.int32)
    expected = MATMUL.reference(workload, inputs)
    schedules = some(template, workload, count)
    assert schedules
    for schedule in schedules:
        verdict = verify(run(template, workload, schedule, inputs), expected, MATMUL.tolerance(workload))
        assert verdict.right, (schedule, verdict)


@both
@pytest.mark.parametrize(
    "ends",
    [(70, 70, 71, 120), (0, 0, 0, 120), (120, 120, 120, 120), (1, 2, 3, 120), (30, 60, 90, 120)],
)
def test_uneven_and_empty_experts(template: OwnLimits, ends: tuple[int, ...]) -> None:
    check(template, matmul_workload(120, 72, 72, "fp16", groups=4), ends)


@both
@pytest.mark.parametrize(
    ("m", "n", "k", "groups", "layout", "dtype"),
    [
        (17, 40, 72, 1, "nt", "fp16"),
        (23, 136, 40, 7, "nn", "fp16"),
        (64, 64, 24, 3, "nn", "fp16"),
        (104, 72, 136, 5, "nt", "fp16"),
        (40, 36, 20, 3, "nt", "fp32"),
        (3, 64, 64, 40, "nt", "fp16"),
    ],
)
def test_sizes_layouts_and_types(
    template: OwnLimits, m: int, n: int, k: int, groups: int, layout: str, dtype: str
) -> None:
    check(template, matmul_workload(m, n, k, dtype, layout, groups=groups))


def test_tiles_of_few_rows_stand_on_the_narrow_side() -> None:
    workload = matmul_workload(50, 128, 64, "fp16", groups=10)
    inputs = MATMUL.make_inputs(workload, 3, "cpu")
    for tma_store in (0, 1):
        members = [s for s in GROUPED.space(workload, H100) if s.knobs["swap"] and s.knobs["tma_store"] == tma_store]
        out = run(GROUPED, workload, members[0], inputs)
        assert verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)).right


@both
@pytest.mark.parametrize(
    "epilogue", [("bias", "silu"), ("residual", "scale_m"), ("swiglu",), ("bias", "geglu", "multiply")]
)
def test_epilogues(template: OwnLimits, epilogue: tuple[str, ...]) -> None:
    check(template, matmul_workload(45, 96, 40, "fp16", "nt", epilogue, groups=3), (13, 13, 45))


@both
def test_a_bias_for_each_expert(template: OwnLimits) -> None:
    workload = matmul_workload(45, 64, 40, "fp16", epilogue=("bias",), groups=3)
    inputs = MATMUL.make_inputs(workload, 4, "cpu")
    bias, ends = torch.randn(3, 64, dtype=torch.float16), (20, 21, 45)
    plain = dict(inputs) | {"bias": torch.zeros(64, dtype=torch.float16)}
    plain["offsets"] = inputs["offsets"] = torch.tensor(ends, dtype=torch.int32)
    inputs["bias"] = bias
    expected = MATMUL.reference(workload, plain)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        expected[start:end] += bias[group].double()
    for schedule in some(template, workload, 2):
        assert verify(run(template, workload, schedule, inputs), expected, MATMUL.tolerance(workload)).right


@both
def test_rows_after_the_last_expert_are_left_alone(template: OwnLimits) -> None:
    workload = matmul_workload(64, 64, 64, "fp16", groups=2)
    inputs = MATMUL.make_inputs(workload, 5, "cpu")
    inputs["offsets"] = torch.tensor((10, 37), dtype=torch.int32)
    for schedule in some(template, workload, 3):
        out = run(template, workload, schedule, inputs)
        assert out[:37].isfinite().all()
        assert out[37:].isnan().all()


@both
def test_no_rows_at_all(template: OwnLimits) -> None:
    workload = matmul_workload(64, 64, 64, "fp16", groups=3)
    inputs = MATMUL.make_inputs(workload, 6, "cpu")
    inputs["offsets"] = torch.zeros(3, dtype=torch.int32)
    assert run(template, workload, some(template, workload, 1)[0], inputs).isnan().all()


@pytest.mark.parametrize(
    "layouts", [("row:70", "col:48", "row:100"), ("col", "col", "row"), ("strided:90,2", "row:80", "col:41")]
)
def test_any_strides_by_pointers(layouts: tuple[str, str, str]) -> None:
    base = matmul_workload(33, 65, 45, "fp16", groups=2)
    workload = Workload("matmul", base.dims, base.dtypes, dict(zip(("a", "b", "out"), layouts, strict=True)))  # type: ignore[arg-type]
    assert not len(GROUPED.space(workload, H100))
    check(GROUPED_POINTER, workload, (20, 33))


def test_no_products_give_zeros_and_the_bias() -> None:
    check(GROUPED_POINTER, matmul_workload(20, 48, 0, "fp16", epilogue=("bias",), groups=3), (5, 5, 20))


def test_nothing_to_write_launches_nothing() -> None:
    workload = matmul_workload(0, 64, 64, "fp16", groups=3)
    inputs, out = MATMUL.make_inputs(workload, 0, "cpu"), MATMUL.empty_output(workload, "cpu")
    kernel_file = importlib.import_module(GROUPED_POINTER.kernel_module)
    schedule = some(GROUPED_POINTER, workload, 1)[0]
    assert kernel_file.plan(inputs, out, dict(schedule.knobs), ()) == []
