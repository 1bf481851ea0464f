"""The matmul operator without a GPU: spaces, work, references, operands."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.errors import IllegalSchedule
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import NAMED_DEVICES, named_device
from kernelwright.kernels.matmul.reference import product_check
from kernelwright.kernels.matmul.workload import LAYOUTS, matmul_workload
from kernelwright.kernels.operator import roofline_us
from kernelwright.types import Schedule, Workload

MATMUL = get_operator("matmul")


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 5000),
    st.integers(0, 60000),
    st.integers(0, 60000),
    st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(sorted(NAMED_DEVICES)),
)
def test_every_device_has_a_schedule_for_every_shape(
    m: int, n: int, k: int, dtype: str, layout: str, slug: str
) -> None:
    device = named_device(slug)
    if dtype not in device.peak_tflops and dtype == "bf16":
        return
    workload = matmul_workload(m, n, k, dtype, layout)
    space = MATMUL.space(workload, device)
    assert space.contains(MATMUL.default_schedule(workload, device))
    for schedule in space.sample(random.Random(0), 5):
        assert MATMUL.templates[schedule.template].shared_bytes(workload, schedule) <= device.shared_memory_bytes
        assert space.why_illegal(schedule) == ()


def test_spaces_stay_small_enough_to_rank_whole() -> None:
    for m, n, k in [(4096, 4096, 4096), (1, 14336, 4096), (256, 256, 65536), (8192, 50257, 768)]:
        assert 200 < len(MATMUL.space(matmul_workload(m, n, k), named_device("h100"))) < 25_000


def test_bulk_copies_are_only_offered_where_they_exist() -> None:
    workload = matmul_workload(4096, 4096, 4096)
    assert len(MATMUL.space(workload, named_device("h100")).parts["persistent_tma"])
    for slug in ("a100", "rtx4090", "mi300x"):
        assert not len(MATMUL.space(workload, named_device(slug)).parts["persistent_tma"])


def test_unaligned_operands_must_be_repacked() -> None:
    workload = matmul_workload(4095, 4097, 4093)
    space = MATMUL.templates["persistent_tma"].space(workload, named_device("h100"))
    schedule = next(iter(space))
    assert schedule.knobs["repack"] == 1
    bad = Schedule(schedule.template, {**schedule.knobs, "repack": 0})  # type: ignore[arg-type]
    assert any("repack" in why for why in space.why_illegal(bad))


def test_skinny_reads_each_weight_once() -> None:
    space = MATMUL.templates["skinny"].space(matmul_workload(100, 4096, 4096), named_device("h100"))
    assert {s.knobs["block_m"] for s in space} <= {64, 128}


def test_work_counts_each_operand_once() -> None:
    work = MATMUL.work(matmul_workload(10, 20, 30, "bf16", epilogue=("bias",)))
    assert (work.flops, work.bytes) == (12000.0, 2 * (300 + 600 + 200 + 20))


@pytest.mark.parametrize(
    ("workload", "least"),
    [
        (matmul_workload(10, 20, 30, epilogue=("bias", "swiglu", "residual")), 2 * (300 + 600 + 100 + 20 + 100)),
        (matmul_workload(10, 20, 30, batch=3), 3 * 2 * (300 + 600 + 200)),
        (matmul_workload(10, 20, 30, groups=4), 2 * (300 + 4 * 600 + 200)),
        (matmul_workload(10, 20, 256, b_dtype="int4", scaling="group:128"), 2 * 2560 + 2560 + 2 * 40 + 2 * 200),
    ],
)
def test_work_counts_batches_groups_gates_and_scales(workload: Workload, least: int) -> None:
    assert MATMUL.work(workload).bytes == least


def test_a_workspace_limit_forbids_splits_that_exceed_it() -> None:
    base = matmul_workload(64, 64, 8192)
    limited = matmul_workload(64, 64, 8192, attributes={"workspace_bytes": 4 * 2 * 64 * 64})
    device = named_device("h100")
    splits = {int(s.knobs["split_k"]) for s in MATMUL.space(limited, device) if s.knobs.get("combine") != "add"}
    assert splits == {1, 2} and len(MATMUL.space(limited, device)) < len(MATMUL.space(base, device))


def test_a_fixed_order_of_sums_forbids_adding_parts_as_they_arrive() -> None:
    device = named_device("h100")
    free = MATMUL.space(matmul_workload(256, 256, 65536), device)
    fixed = MATMUL.space(matmul_workload(256, 256, 65536, attributes={"deterministic": True}), device)
    assert {s.knobs.get("combine") for s in free} == {None, "parts", "add"}
    assert {s.knobs.get("combine") for s in fixed} == {None, "parts"}


def test_fp8_is_offered_only_where_it_can_be_multiplied() -> None:
    workload = matmul_workload(256, 256, 256, "fp8e4m3", scaling="tensor")
    assert len(MATMUL.space(workload, named_device("h100")))
    assert not len(MATMUL.space(workload, named_device("a100")))


def test_roofline_of_a_large_square_is_compute_time() -> None:
    device = named_device("h100")
    least = roofline_us(MATMUL, matmul_workload(8192, 8192, 8192), device)
    assert least == pytest.approx(2 * 8192**3 / (device.peak_tflops["bf16"] * 1e6))


def test_a_budget_admits_tf32() -> None:
    strict, loose = matmul_workload(64, 64, 64, "fp32"), matmul_workload(64, 64, 64, "fp32", error_budget=3e-3)
    assert MATMUL.compute_precisions(strict) == ("tf32x3", "bf16x6", "ieee")
    assert MATMUL.compute_precisions(loose)[:2] == ("bf16", "tf32")
    assert MATMUL.tolerance(loose) > MATMUL.tolerance(strict)


def test_the_reference_is_probed_for_dropped_products() -> None:
    a, b = torch.randn(50, 70, dtype=torch.float64), torch.randn(70, 30, dtype=torch.float64)
    assert product_check(a, b, a @ b) < 1e-12
    assert product_check(a, b, a[:, :-1] @ b[:-1]) > 1e-3


def test_operands_have_the_strides_asked_for() -> None:
    inputs = MATMUL.make_inputs(matmul_workload(6, 10, 8, "fp16", "tn", ("bias",)), 0, "cpu")
    assert inputs["a"].shape == (6, 8) and inputs["a"].stride() == (1, 6)
    assert inputs["b"].stride() == (10, 1) and inputs["bias"].shape == (10,)


def test_unknown_templates_are_refused() -> None:
    workload = matmul_workload(4, 4, 4, "fp16")
    with pytest.raises(IllegalSchedule, match="pointer"):
        MATMUL.plan(workload, Schedule("nonsense"), {}, torch.empty(0))
