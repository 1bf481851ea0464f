"""Convolutions and attentions as people type them: to a workload, back again, and through the API."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.errors import InvalidWorkload, KernelwrightError
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.service.workload_args import WorkloadArgs, args_of
from kernelwright.types import Scalar, Workload

ATTENTION = {"B": 2, "Hq": 8, "Sq": 64, "Skv": 96, "D": 64}
CONV2D = {"N": 2, "C": 8, "H": 14, "W": 14, "K": 16, "R": 3, "S": 3}

TYPED = [
    (WorkloadArgs("attention", ATTENTION), attention_workload(2, 8, 64, 96, 64)),
    (
        WorkloadArgs("attention", {**ATTENTION, "Hkv": 2, "Dv": 32}, "fp16", "bshd", attributes={"softcap": 50}),
        attention_workload(2, 8, 64, 96, 64, "fp16", kv_heads=2, v_dim=32, layout="bshd", softcap=50),
    ),
    (WorkloadArgs("attention", {**ATTENTION, "page": 16}), attention_workload(2, 8, 64, 96, 64, page=16)),
    (
        WorkloadArgs("attention", {**ATTENTION, "T": 100, "Tk": 150}, attributes={"causal": "bottom_right"}),
        attention_workload(2, 8, 64, 96, 64, packed=(100, 150), causal="bottom_right"),
    ),
    (
        WorkloadArgs("attention", ATTENTION, "fp8e4m3/tensor", out_dtype="fp16"),
        attention_workload(2, 8, 64, 96, 64, "fp8e4m3", out_dtype="fp16", scaling="tensor"),
    ),
    (WorkloadArgs("conv2d", CONV2D), conv2d_workload((2, 8, 14, 14), 16, 3)),
    (
        WorkloadArgs("conv2d", CONV2D, "fp16", "nchw", ("bias", "relu"), attributes={"pad": 1, "stride_h": 2}),
        conv2d_workload((2, 8, 14, 14), 16, 3, "fp16", "nchw", ("bias", "relu"), padding=1, stride=(2, 1)),
    ),
    (
        WorkloadArgs("conv2d", CONV2D, attributes={"groups": 4, "direction": "weight_gradient"}),
        conv2d_workload((2, 8, 14, 14), 16, 3, groups=4, direction="weight_gradient"),
    ),
    (
        WorkloadArgs("conv2d", CONV2D, attributes={"transposed": True, "stride": 2, "output_pad": 1}),
        conv2d_workload((2, 8, 14, 14), 16, 3, transposed=True, stride=2, output_padding=1),
    ),
]


@pytest.mark.parametrize(("typed", "workload"), TYPED, ids=lambda value: str(value)[:60])
def test_there_and_back(typed: WorkloadArgs, workload: Workload) -> None:
    assert typed.workload() == workload
    assert args_of(workload) == typed


@given(
    st.fixed_dictionaries({name: st.integers(1, 9) for name in ("N", "C", "H", "W", "K", "R", "S")}),
    st.dictionaries(
        st.sampled_from(["stride", "pad_h", "pad_w", "dilation", "dilation_w", "stride_h"]), st.integers(0, 3)
    ),
)
def test_a_convolution_that_can_be_typed_is_found_again(dims: dict[str, int], attributes: dict[str, Scalar]) -> None:
    try:
        workload = WorkloadArgs("conv2d", dims, attributes=attributes).workload()
    except KernelwrightError:
        return
    back = args_of(workload)
    assert back is not None and back.workload() == workload


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (WorkloadArgs("attention", {"B": 1}), "B, Hq, Sq, Skv, D"),
        (WorkloadArgs("attention", ATTENTION, epilogue=("relu",)), "takes no epilogue"),
        (WorkloadArgs("attention", ATTENTION, layout="nt"), "bhsd, bshd"),
        (WorkloadArgs("attention", {**ATTENTION, "T": 10}), "both T and Tk"),
        (WorkloadArgs("attention", ATTENTION, attributes={"causal": True}), "causal must be of type str"),
        (WorkloadArgs("attention", ATTENTION, attributes={"window": 0}), "window"),
        (WorkloadArgs("conv2d", CONV2D, layout="bshd"), "nhwc, nchw"),
        (WorkloadArgs("conv2d", CONV2D, attributes={"stride": 0}), "stride"),
        (WorkloadArgs("conv2d", CONV2D, attributes={"strides": 2}), "attribute of conv2d must be one of"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_misuse_is_told(typed: WorkloadArgs, words: str) -> None:
    with pytest.raises(InvalidWorkload, match=words):
        typed.workload()


@pytest.mark.parametrize(("typed", "workload"), TYPED[:8], ids=lambda value: str(value)[:60])
def test_the_api_answers_for_every_operator(http: httpx.Client, typed: WorkloadArgs, workload: Workload) -> None:
    answer = http.get("/v1/kernels/best", params={**typed.query(), "hardware": "h100"})
    assert answer.status_code == 200, answer.text
    best = answer.json()
    assert best["workload_key"] == workload.key and best["how"] in ("predicted", "vendor")
    # what a choice of the model may lose is told with every choice of the model, and only then
    assert (best["regret"] is not None) == (best["how"] == "predicted")
    assert best["how"] == "vendor" or 0 <= best["regret"] <= 1
