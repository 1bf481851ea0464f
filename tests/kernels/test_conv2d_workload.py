"""Conv2d workloads: what they may be, what follows from them, and what is said of those that may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.conv2d.layout import dense_strides, overlaps, parse_layout
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.template import gemm_of
from kernelwright.kernels.conv2d.workload import ACTIVATIONS, STEPS, complete_attributes, conv2d_workload, problem_of
from kernelwright.types import FrozenMap, Workload

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    transposed = draw(st.booleans())
    stride, dilation = draw(pairs), draw(pairs)
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    direction = "forward" if transposed else draw(st.sampled_from(["forward", "input_gradient", "weight_gradient"]))
    reach = [apart * (taps - 1) for apart, taps in zip(dilation, kernel, strict=True)]
    padding = tuple(draw(st.integers(0, most)) for most in reach)
    output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    return conv2d_workload(
        (draw(st.integers(0, 3)), groups * draw(st.integers(1, 4)), reach[0] + draw(st.integers(1, 5)), reach[1] + 4),
        groups * draw(st.integers(1, 4)),
        kernel,
        draw(st.sampled_from(["fp32", "fp16", "bf16"])),
        draw(st.sampled_from(["nhwc", "nchw"])),
        draw(st.lists(st.sampled_from(STEPS), max_size=4)) if direction == "forward" else (),
        stride=stride,
        padding=padding,  # type: ignore[arg-type]
        dilation=dilation,
        groups=groups,
        transposed=transposed,
        output_padding=output_padding if transposed else 0,  # type: ignore[arg-type]
        direction=direction,
    )


@settings(max_examples=40, deadline=None)
@given(workloads())
def test_workloads_survive_json_and_have_the_sizes_that_torch_computes(workload: Workload) -> None:
    again = Workload.from_json(json.loads(json.dumps(workload.to_json())))
    assert (again, again.key, problem_of(again)) == (workload, workload.key, problem_of(workload))
    p = problem_of(workload)
    x, w = (torch.empty(p.shapes[name], device="meta") for name in ("x", "w"))
    rest = (None, p.stride, p.padding)
    if p.transposed:
        out = torch.conv_transpose2d(x, w, *rest, p.output_padding, p.groups, p.dilation)  # type: ignore[call-overload]
    else:
        out = torch.conv2d(x, w, *rest, p.dilation, p.groups)  # type: ignore[call-overload]
    assert tuple(out.shape) == p.shapes["out"]
    gemm = gemm_of(p)
    if not p.scatters:
        assert CONV2D.work(workload).flops == 2 * gemm.m * gemm.n * gemm.k * gemm.batch


def test_defaults_are_left_out_and_filled_in() -> None:
    workload = conv2d_workload((2, 8, 9, 9), 4, 3, stride=(1, 2), groups=1)
    assert dict(workload.attributes) == {"stride_w": 2}
    complete = complete_attributes(workload)
    assert (complete["stride_h"], complete["stride_w"], complete["direction"]) == (1, 2, "forward")
    assert workload.key == conv2d_workload((2, 8, 9, 9), 4, (3, 3), stride=(1, 2), padding=0).key


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"kernel": 5}, r"no pixel along H: 5 taps with dilation 1 reach over 5 pixels, the input .* has 4; pad it"),
        ({"kernel": 3, "dilation": 3}, "reach over 7 pixels"),
        ({"transposed": True, "padding": 4, "kernel": 3}, "no pixel along H: padding 4 takes away all"),
        ({"image": (1, 0, 4, 4)}, "must be at least 1, got C=0"),
        ({"image": (1, 8, 4, -4)}, "dimension W must be a whole number"),
        ({"stride": (1, 0)}, "must be at least 1, got stride_w=0"),
        ({"dilation": (0, 1)}, "must be at least 1, got dilation_h=0"),
        ({"padding": -1}, "padding must be 0 or more"),
        ({"groups": 3}, "groups must divide C and K, got groups=3, C=8, K=16"),
        ({"output_padding": 1}, "belong to transposed convolutions"),
        ({"output_padding": 2, "stride": 2, "transposed": True}, "output padding must be smaller than stride"),
        ({"direction": "backward"}, "direction must be one of forward, input_gradient"),
        ({"direction": "weight_gradient", "transposed": True}, "x and d_out exchanged"),
        ({"direction": "input_gradient", "epilogue": ("bias",)}, "only direction forward has an epilogue"),
        ({"epilogue": ("softmax",)}, "epilogue steps must be among bias"),
        ({"layout": "row"}, "layout of x must be nhwc, nchw or strided"),
        ({"layouts": {"out": "strided:0,1,16,64"}}, "result out .* must have a place of its own"),
        ({"attributes": {"workspace_bytes": -1}}, "workspace_bytes must be a whole number"),
        ({"attributes": {"speed": 1}}, "attributes must be among stride_h"),
        ({"attributes": {"deterministic": 1}}, "deterministic must be true or false"),
        ({"error_budget": 1e-9}, "allow a larger error_budget or a wider result"),
        ({"dtype": "int8", "dtypes": {"out": "int32"}, "epilogue": ("relu",)}, "int32 result takes no epilogue"),
    ],
)
def test_misuse_is_told_plainly(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidWorkload, match=words):
        conv2d_workload(**{"image": (2, 8, 4, 4), "k": 16, "kernel": 1, **kwargs})


def test_an_attribute_that_says_its_default_is_refused() -> None:
    good = conv2d_workload((2, 8, 4, 4), 16, 1)
    bad = Workload(good.operator, good.dims, good.dtypes, good.layouts, (), FrozenMap({"stride_h": 1}))
    with pytest.raises(InvalidWorkload, match="stride_h is 1 by default; leave it out"):
        problem_of(bad)


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ({"x": "fp64"}, "dtype of x is 'fp64'"),
        ({"x": "fp16"}, "x and w must have one dtype, got fp16 and bf16"),
        ({"out": "int32"}, "conv2d of bf16 writes fp16, bf16, fp32; dtype of out is 'int32'"),
    ],
)
def test_unsupported_dtypes_are_named(dtypes: dict[str, str], words: str) -> None:
    with pytest.raises(UnsupportedDtype, match=words):
        conv2d_workload((2, 8, 4, 4), 16, 1, dtypes=dtypes)


def test_gradients_name_result_and_operands() -> None:
    forward = problem_of(conv2d_workload((2, 8, 4, 4), 16, 3))
    assert (forward.result, forward.operands) == ("out", ("x", "w"))
    of_input = problem_of(conv2d_workload((2, 8, 4, 4), 16, 3, direction="input_gradient"))
    assert (of_input.result, of_input.operands, of_input.scatters) == ("x", ("out", "w"), True)
    of_weight = problem_of(
        conv2d_workload((2, 8, 4, 4), 16, 3, direction="weight_gradient", dtypes={"w": "fp32"}),
    )
    assert (of_weight.result, of_weight.operands, of_weight.dtypes["w"]) == ("w", ("x", "out"), "fp32")


def test_layouts_are_torchs_memory_formats() -> None:
    sizes = (2, 3, 4, 5)
    assert dense_strides("nhwc", sizes) == torch.empty(sizes, memory_format=torch.channels_last).stride()
    assert dense_strides("nchw", sizes) == torch.empty(sizes).stride()
    assert parse_layout("x", "strided:960,1,240,48+3", sizes).offset == 3
    assert overlaps(sizes, (0, 1, 15, 3)) and not overlaps(sizes, dense_strides("nhwc", sizes))


@pytest.mark.parametrize(
    ("channels", "layout", "aligned"),
    [(8, "nhwc", True), (12, "nhwc", False), (8, "nchw", False), (8, "nhwc+1", False)],
)
def test_alignment_counts_bytes(channels: int, layout: str, aligned: bool) -> None:
    assert problem_of(conv2d_workload((2, channels, 4, 4), 8, 1, layouts={"x": layout})).aligned("x") is aligned


def test_work_counts_what_is_read() -> None:
    dense = conv2d_workload((2, 8, 6, 6), 16, 3, "fp16", padding=1, epilogue=("bias", "residual"))
    work = CONV2D.work(dense)
    assert work.flops == 2 * 2 * 36 * 8 * 16 * 9
    assert work.bytes == 2 * (2 * 8 * 36 + 16 * 8 * 9 + 2 * 16 * 36 * 2 + 16)
    # stride 3 of one tap never reads two thirds of the rows and columns; one image stands for all of a batch
    sparse = conv2d_workload((2, 8, 6, 6), 16, 1, "fp16", stride=3, layouts={"x": "strided:0,1,48,8"})
    assert CONV2D.work(sparse).bytes == 2 * (8 * 4 + 16 * 8 + 2 * 16 * 4)


def test_every_activation_is_a_step() -> None:
    assert set(ACTIVATIONS) < set(STEPS)
