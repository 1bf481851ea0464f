"""Compute precisions: which ones an operand type and an error budget allow, and the error that each one makes.

A compute precision is the format in which a kernel multiplies; sums are kept in fp32 (integers: int32, fp64: fp64).
Errors are relative, in the Frobenius norm, against an fp64 result from the same operands, for random normal data and
sums of up to about 16 thousand products. They were found by simulating each rounding in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kernelwright.errors import UnsupportedDtype
from kernelwright.types import DTYPES, DeviceSpec

PRODUCT_ERROR: Mapping[str, float] = {
    "fp64": 4e-15,
    "ieee": 4e-6,
    "tf32x3": 4e-6,
    "bf16x6": 4e-6,
    "bf16x3": 3e-5,
    "tf32": 7.8e-4,
    "fp16": 2e-4,
    "bf16": 2e-4,
    "fp8": 5e-3,
    "int8": 0.0,
}
"""Typical error of products and sums, before the result is rounded to its own type.

ieee: fp32 fused multiply-adds one after the other (2e-6 at K=16384), with room for K=131072.
tf32x3, bf16x6: operands as sums of two or three narrow numbers, products of all parts but the smallest, sums in fp32.
bf16x3: two parts of 8 bits each; the product of the small parts is left out.
tf32: operands cut to 10 bits of mantissa, as Hopper's tensor cores do; rounded ones make 3e-4.
fp16, bf16: products are exact; tensor cores truncate each partial sum, which pulls long sums towards zero.
fp8: sums are kept in about 14 bits on Hopper.
"""

ROUNDING_ERROR: Mapping[str, float] = {
    "fp64": 0.0,
    "fp32": 3e-8,
    "fp16": 2.1e-4,
    "bf16": 1.7e-3,
    "fp8e4m3": 2.7e-2,
    "fp8e5m2": 5.4e-2,
    "int8": 0.0,
    "int32": 0.0,
}
"""Typical error of rounding the result to its type."""

SAFETY = 2.5
"""A result passes up to this many times the typical error: seeds and shapes move it by a few per cent, epilogues by
less than twice, while one product left out of 16384 makes 8e-3."""

_OWN: Mapping[str, str] = {
    "fp64": "fp64",
    "fp32": "ieee",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8e4m3": "fp8",
    "fp8e5m2": "fp8",
    "int8": "int8",
}
_FASTER: Mapping[str, tuple[str, ...]] = {"ieee": ("bf16", "tf32", "bf16x3", "tf32x3", "bf16x6")}
_PACKED = ("int4", "fp4")

NARROWING_ERROR = 2.4e-3
"""Typical error of rounding both fp32 operands to bf16."""

PARTS: Mapping[str, tuple[str, int]] = {"tf32x3": ("tf32", 3), "bf16x3": ("bf16", 3), "bf16x6": ("bf16", 6)}
"""Precisions made of several products of a narrower one, and how many."""


def typical_error(precision: str, out_dtype: str, own: str | None = None) -> float:
    """The error to expect from computing in `precision` and writing `out_dtype`.

    own: what loses nothing of the operands; "ieee" adds the rounding of fp32 operands to bf16.
    """
    narrowed = NARROWING_ERROR if own == "ieee" and precision == "bf16" else 0.0
    return math.hypot(PRODUCT_ERROR[precision], ROUNDING_ERROR[out_dtype], narrowed)


def rate_tflops(precision: str, peak_tflops: Mapping[str, float]) -> float | None:
    """A device's rate of useful operations in a compute precision, in 10^12 a second; None when it is not known."""
    base, parts = PARTS.get(precision, (precision, 1))
    return peak_tflops[base] / parts if base in peak_tflops else None


def own_precision(a_dtype: str, b_dtype: str) -> str:
    """The compute precision that loses nothing of either operand; UnsupportedDtype for a mix that has none.

    4-bit weights are widened to the other operand's type, and to bf16 where that is no 16-bit type.
    """
    if b_dtype in _PACKED or a_dtype in _PACKED:
        return a_dtype if a_dtype in ("fp16", "bf16") else "bf16"
    for dtype in (a_dtype, b_dtype):
        if dtype not in _OWN:
            raise UnsupportedDtype(f"operands must be one of {', '.join(_OWN)}, got {dtype!r}")
    if _OWN[a_dtype] != _OWN[b_dtype]:
        raise UnsupportedDtype(
            f"both operands must have one type (the two fp8 types may be mixed), got {a_dtype} and {b_dtype}; "
            "convert one of them first"
        )
    return _OWN[a_dtype]


def allowed(a_dtype: str, b_dtype: str, out_dtype: str, error_budget: float | None) -> tuple[str, ...]:
    """Compute precisions that may be used, fastest first.

    Without a budget those whose typical error is no larger than that of the operands' own precision: for fp32, products
    of several narrower parts too. With one, every precision whose typical error, with that of rounding to `out_dtype`,
    fits; empty when none does. UnsupportedDtype for operands that cannot be multiplied.
    """
    own = own_precision(a_dtype, b_dtype)
    if out_dtype not in DTYPES:
        raise UnsupportedDtype(f"the result must be one of {', '.join(DTYPES)}, got {out_dtype!r}")
    budget = typical_error(own, out_dtype) if error_budget is None else error_budget
    return tuple(p for p in (*_FASTER.get(own, ()), own) if typical_error(p, out_dtype, own) <= budget)


def tolerance(out_dtype: str, precision: str, error_budget: float | None, own: str | None = None) -> float:
    """The largest error with which a result counts as right: SAFETY times the typical one, and never over the budget.

    0.0 for integers, which must be exact.
    """
    limit = SAFETY * typical_error(precision, out_dtype, own)
    return limit if error_budget is None else min(limit, error_budget)


def on_device(precisions: Iterable[str], device: DeviceSpec) -> tuple[str, ...]:
    """Those of the precisions that templates offer on a device: products in several parts only where it has a rate for
    them."""
    nvidia = device.vendor == "nvidia"
    return tuple(p for p in precisions if p not in PARTS or (nvidia and rate_tflops(p, device.peak_tflops) is not None))
