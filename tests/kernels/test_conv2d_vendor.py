"""The rival of a convolution computes the same as the reference (here on the CPU, where torch has one way only)."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.search.verification import verify

CASES: list[dict[str, Any]] = [
    {"epilogue": ("scale_vec", "bias", "residual", "relu")},
    {"epilogue": ("bias", "scale_vec", "bias", "gelu_tanh", "multiply", "hardswish")},
    {"epilogue": ("bias", "relu6", "sigmoid"), "transposed": True, "stride": 2, "output_padding": 1},
    {"epilogue": ("scale_vec", "silu", "tanh"), "groups": 2, "stride": 2, "dilation": 2},
    {"direction": "input_gradient", "stride": 2},
    {"direction": "input_gradient", "layouts": {"x": "strided:2000,1,200,20"}},
    {"direction": "weight_gradient", "groups": 2},
]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("case", CASES)
def test_vendor_call_is_the_same_computation(case: dict[str, Any], layout: str) -> None:
    workload = conv2d_workload((2, 8, 9, 9), 6, 3, "fp32", layout, padding=2, **case)
    inputs = CONV2D.make_inputs(workload, 2, "cpu")
    found = CONV2D.vendor(workload, inputs)
    assert found is not None
    name, call = found
    assert name.startswith("conv")
    reference = CONV2D.reference(workload, inputs)
    # in-place activations must not spoil what a second call reads
    for _ in range(2):
        verdict = verify(call(), reference, CONV2D.tolerance(workload))
        assert verdict.right, (name, verdict)


def test_narrow_operands_are_compared_in_16_bits_and_odd_results_not_at_all() -> None:
    narrow = conv2d_workload((1, 16, 5, 5), 8, 3, "int8", dtypes={"out": "fp16"})
    found = CONV2D.vendor(narrow, CONV2D.make_inputs(narrow, 0, "cpu"))
    assert found is not None and found[0] == "conv2d (16 bits)"
    mixed = conv2d_workload((1, 16, 5, 5), 8, 3, "bf16", dtypes={"out": "fp32"})
    assert CONV2D.vendor(mixed, CONV2D.make_inputs(mixed, 0, "cpu")) is None
