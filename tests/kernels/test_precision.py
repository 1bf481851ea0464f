"""Precisions: what a budget admits, and that tolerances accept honest rounding and refuse a lost K tail."""

from __future__ import annotations

import pytest
import torch

from kernelwright.errors import UnsupportedDtype
from kernelwright.kernels import precision
from kernelwright.kernels.precision import ROUNDING_ERROR, allowed, rate_tflops, tolerance, typical_error
from kernelwright.types import DTYPES

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("dtype", "own"),
    [("fp64", "fp64"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp8e4m3", "fp8"), ("int8", "int8")],
)
def test_no_budget_keeps_the_operands_precision(dtype: str, own: str) -> None:
    assert allowed(dtype, dtype, "fp32", None) == (own,)


def test_fp32_may_be_made_of_narrow_products_as_exact_as_itself() -> None:
    assert allowed("fp32", "fp32", "fp32", None) == ("tf32x3", "bf16x6", "ieee")


@pytest.mark.parametrize(
    ("a", "b", "own"),
    [("bf16", "int4", "bf16"), ("fp16", "fp4", "fp16"), ("fp4", "fp4", "bf16"), ("fp8e4m3", "fp4", "bf16")],
)
def test_packed_operands_are_widened(a: str, b: str, own: str) -> None:
    assert allowed(a, b, "bf16", None) == (own,)


def test_a_budget_admits_faster_precisions_first_when_their_error_fits() -> None:
    assert allowed("fp32", "fp32", "fp32", 5e-3) == ("bf16", "tf32", "bf16x3", "tf32x3", "bf16x6", "ieee")
    assert allowed("fp32", "fp32", "fp32", 1e-3) == ("tf32", "bf16x3", "tf32x3", "bf16x6", "ieee")
    assert allowed("fp32", "fp32", "fp32", 1e-4) == ("bf16x3", "tf32x3", "bf16x6", "ieee")
    assert allowed("fp32", "fp32", "fp32", 1e-7) == ()


def test_rounding_of_the_result_counts_against_the_budget() -> None:
    assert allowed("bf16", "bf16", "bf16", 1e-3) == ()
    assert allowed("bf16", "bf16", "fp32", 1e-3) == ("bf16",)


def test_fp8_types_may_be_mixed_and_others_not() -> None:
    assert allowed("fp8e4m3", "fp8e5m2", "bf16", None) == ("fp8",)
    with pytest.raises(UnsupportedDtype, match=r"one type.*got bf16 and fp16.*convert"):
        allowed("bf16", "fp16", "fp32", None)
    with pytest.raises(UnsupportedDtype, match=r"must be one of.*got 'int32'"):
        allowed("int32", "int32", "int32", None)
    with pytest.raises(UnsupportedDtype, match="result must be one of"):
        allowed("fp16", "fp16", "fp17", None)


def test_every_result_type_has_a_rounding_error() -> None:
    assert set(ROUNDING_ERROR) == set(DTYPES) - {"int4", "fp4"}


def test_precisions_of_several_products_have_a_share_of_the_rate() -> None:
    assert rate_tflops("tf32x3", {"tf32": 300.0}) == 100.0
    assert rate_tflops("bf16x6", {"bf16": 600.0}) == 100.0
    assert rate_tflops("tf32x3", {"ieee": 1.0}) is None


def test_tolerance_of_fp32_rounded_to_bf16_covers_that_rounding() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 1024), torch.randn(1024, 64)
    error = relative_error(a.bfloat16().double() @ b.bfloat16().double(), a.double() @ b.double())
    assert tolerance("fp32", "bf16", None) < error < tolerance("fp32", "bf16", None, "ieee")
    assert error == pytest.approx(precision.NARROWING_ERROR, rel=0.1)


def test_tolerance_never_exceeds_the_budget_and_is_exact_for_integers() -> None:
    assert tolerance("fp32", "tf32", 1e-3) == 1e-3
    assert tolerance("fp32", "tf32", None) == precision.SAFETY * typical_error("tf32", "fp32")
    assert tolerance("bf16", "bf16", 0.5) == tolerance("bf16", "bf16", None)
    assert tolerance("int32", "int8", None) == 0.0


@pytest.mark.parametrize(("dtype", "compute"), [("fp32", "ieee"), ("fp16", "fp16"), ("bf16", "bf16")])
@pytest.mark.parametrize("depth", [64, 4096])
def test_tolerance_accepts_rounding_and_refuses_one_lost_product(dtype: str, compute: str, depth: int) -> None:
    torch.manual_seed(depth)
    a = torch.randn(64, depth).to(TORCH_DTYPES[dtype])
    b = torch.randn(depth, 64).to(TORCH_DTYPES[dtype])
    wanted = a.double() @ b.double()
    limit = tolerance(dtype, compute, None)
    honest = (a.float() @ b.float()).to(TORCH_DTYPES[dtype])
    lost = (a[:, :-1].float() @ b[:-1].float()).to(TORCH_DTYPES[dtype])
    assert relative_error(honest, wanted) < limit
    assert relative_error(lost, wanted) > limit


def test_tolerance_accepts_tf32_truncation() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 1024), torch.randn(1024, 64)
    cut_a, cut_b = ((x.view(torch.int32) >> 13 << 13).view(torch.float32) for x in (a, b))
    error = relative_error(cut_a.double() @ cut_b.double(), a.double() @ b.double())
    assert tolerance("fp32", "ieee", None) < error < tolerance("fp32", "tf32", None)
    assert error == pytest.approx(precision.PRODUCT_ERROR["tf32"], rel=0.1)
