"""Conv2d kernels by numbers, run on the CPU by triton's interpreter (fp16 and fp32: its bf16 products are wrong)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernelwright.kernels.conv2d import reference
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import ACTIVATIONS, conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    # the interpreter computes exp in numpy, which speaks up where a GPU gives infinity
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def some(workload: Workload, template: str, count: int, **wanted: Any) -> list[Schedule]:
    """Random schedules with the knobs `wanted`, no knob value twice where that can be."""
    members = [
        schedule
        for schedule in CONV2D.templates[template].space(workload, H100)
        if all(schedule.knobs[name] == value for name, value in wanted.items())
    ]
    return random.Random(7).sample(members, min(count, len(members)))


def check(workload: Workload, template: str, count: int = 1, **wanted: Any) -> None:
    schedules = some(workload, template, count, **wanted)
    assert schedules
    for schedule in schedules:
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


CASES: list[dict[str, Any]] = [
    {"image": (1, 1, 1, 1), "k": 1, "kernel": 1},
    {"image": (2, 17, 7, 5), "k": 29, "kernel": 1},
    {"image": (2, 8, 6, 6), "k": 8, "kernel": 3, "padding": 5},
    {"image": (3, 16, 1, 1), "k": 16, "kernel": 3, "padding": 1},
    {"image": (2, 20, 9, 11), "k": 35, "kernel": (2, 3), "stride": 2, "padding": (2, 1), "dilation": 3},
    {"image": (2, 32, 10, 10), "k": 48, "kernel": 1, "stride": 3},
    {"image": (1, 3, 6, 6), "k": 8, "kernel": (31, 1), "padding": (15, 0)},
    {"image": (2, 3, 5, 7), "k": 6, "kernel": 3, "padding": 1, "groups": 3},
    {"image": (2, 6, 4, 6), "k": 10, "kernel": (3, 2), "padding": 1, "groups": 2},
    {"image": (5, 9, 5, 5), "k": 13, "kernel": 5},
    {"image": (1, 33, 8, 8), "k": 1, "kernel": 3, "padding": 1},
    {"image": (1, 16, 1, 90), "k": 16, "kernel": (1, 9), "stride": (1, 2), "padding": (0, 3)},
    {"image": (2, 1, 7, 7), "k": 7, "kernel": 3},
]


def case_id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_implicit_gemm_at_odd_sizes(case: dict[str, Any]) -> None:
    dtype, layout = ("fp16", "nhwc") if CASES.index(case) % 2 else ("fp32", "nchw")
    check(conv2d_workload(**case, dtype=dtype, layout=layout, epilogue=("bias", "relu")), "implicit_gemm")


def test_sizes_at_which_another_templates_eight_warps_were_wrong() -> None:
    # pytorch/pytorch#173068: most elements wrong, and only with 8 warps
    workload = conv2d_workload((1, 33, 11, 15), 34, 3, "fp16", stride=(2, 3), padding=(4, 5))
    check(workload, "implicit_gemm", num_warps=8, block_m=128)


@pytest.mark.parametrize("reduction", ["taps", "channels", "flat", "flat_taps"])
@pytest.mark.parametrize("split_k", [1, 3])
def test_every_order_of_the_sum(reduction: str, split_k: int) -> None:
    layout = "nchw" if reduction == "flat_taps" else "nhwc"
    workload = conv2d_workload((2, 48, 4, 4), 20, 3, "fp16", layout, padding=1)
    check(workload, "implicit_gemm", reduction=reduction, split_k=split_k)


@pytest.mark.parametrize("combine", ["parts", "add"])
def test_sums_in_parts(combine: str) -> None:
    workload = conv2d_workload((1, 70, 4, 4), 35, 3, "fp16", "nchw", ("bias", "residual", "silu"), padding=1)
    check(workload, "implicit_gemm", 2, combine=combine, split_k=4)


@pytest.mark.parametrize(
    "epilogue",
    [
        *((name,) for name in ACTIVATIONS),
        ("scale_vec", "bias", "residual", "relu"),
        ("bias", "multiply", "hardswish", "bias"),
    ],
)
def test_every_epilogue(epilogue: tuple[str, ...]) -> None:
    check(conv2d_workload((1, 16, 5, 7), 20, 3, "fp32", epilogue=epilogue), "implicit_gemm", 1, split_k=1)


LAYOUTS: list[dict[str, str]] = [
    # a slice of a wider tensor, with gaps between its pixels
    {"x": "strided:5400,1,270,54"},
    {"x": "strided:0,1,192,16"},
    {"x": "nhwc+1", "w": "nchw", "out": "strided:2600,100,10,1+3"},
    {"x": "nchw", "w": "nhwc", "out": "nhwc"},
]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_strides_and_gaps(layouts: dict[str, str]) -> None:
    workload = conv2d_workload((3, 16, 8, 9), 20, 3, "fp16", padding=1, layouts=layouts)
    schedule = some(workload, "implicit_gemm", 1, block_m=128)[0]
    inputs, out = CONV2D.make_inputs(workload, 1, "cpu"), CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    verdict = verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))
    assert verdict.right, (schedule, verdict)
    gaps = out.untyped_storage().nbytes() // 2 - out.numel()
    everything = torch.tensor([], dtype=out.dtype).set_(out.untyped_storage())
    assert int(everything.isnan().sum()) == gaps, "something was written beside the result"


def test_int8_is_exact() -> None:
    workload = conv2d_workload((1, 32, 5, 5), 16, 3, "int8", padding=1, dtypes={"out": "int32"})
    check(workload, "implicit_gemm", 3)


def test_batch_of_none_launches_nothing() -> None:
    workload = conv2d_workload((0, 16, 8, 8), 16, 3, padding=1)
    assert CONV2D.empty_output(workload, "cpu").shape == (0, 16, 8, 8)
    schedule = CONV2D.default_schedule(workload, H100)
    inputs, out = CONV2D.make_inputs(workload, 1, "cpu"), CONV2D.empty_output(workload, "cpu")
    assert CONV2D.plan(workload, schedule, inputs, out) == []
    assert verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload)).right


@pytest.mark.parametrize("direction", ["input_gradient", "weight_gradient"])
@pytest.mark.parametrize("case", CASES[:10], ids=case_id)
def test_gradients_at_odd_sizes(case: dict[str, Any], direction: str) -> None:
    check(conv2d_workload(**case, dtype="fp16", direction=direction), f"implicit_gemm_{direction}")


TRANSPOSED: list[dict[str, Any]] = [
    {"image": (1, 8, 4, 5), "k": 12, "kernel": 3, "stride": 3, "padding": 2, "dilation": 2, "groups": 2},
    {"image": (1, 8, 5, 5), "k": 8, "kernel": 2, "stride": 4},
    {"image": (2, 20, 4, 4), "k": 12, "kernel": 4, "stride": 2, "padding": 1},
    {"image": (1, 8, 4, 5), "k": 8, "kernel": 3, "stride": (4, 6), "dilation": (2, 4)},
]


@pytest.mark.parametrize("case", TRANSPOSED, ids=case_id)
@pytest.mark.parametrize("output_padding", [0, (1, 2)])
def test_transposed_with_epilogue(case: dict[str, Any], output_padding: Any) -> None:
    if output_padding and max(case["stride"] if isinstance(case["stride"], tuple) else (case["stride"],)) < 3:
        output_padding = (1, 0)
    workload = conv2d_workload(
        **case,
        dtype="fp16",
        layout="nchw",
        transposed=True,
        output_padding=output_padding,
        epilogue=("bias", "relu", "residual"),
    )
    check(workload, "implicit_gemm_input_gradient")


@pytest.mark.parametrize("reduction", ["taps", "channels", "flat"])
def test_strided_gradient_in_every_order_of_the_sum(reduction: str) -> None:
    workload = conv2d_workload((2, 6, 9, 9), 40, 3, "fp32", padding=1, stride=2, direction="input_gradient")
    check(workload, "implicit_gemm_input_gradient", reduction=reduction)


@pytest.mark.parametrize("columns", ["tap", "flat"])
@pytest.mark.parametrize("combine", ["parts", "add"])
def test_weight_gradient_in_parts(columns: str, combine: str) -> None:
    layouts = {"x": "nhwc", "w": "strided:230,3,70,1", "out": "nchw"}
    workload = conv2d_workload(
        (9, 6, 9, 9), 10, (2, 1), "fp16", padding=1, direction="weight_gradient", layouts=layouts,
        dtypes={"w": "fp32"},
    )  # fmt: skip
    check(workload, "implicit_gemm_weight_gradient", columns=columns, combine=combine, split_k=4)


def test_gradients_of_an_empty_batch() -> None:
    workload = conv2d_workload((0, 8, 6, 6), 4, 3, "fp16", padding=1, direction="weight_gradient")
    verdict = run(workload, CONV2D.default_schedule(workload, H100))
    assert verdict.right and verdict.error == 0.0


POINTWISE: list[dict[str, Any]] = [
    {"layout": "nhwc", "epilogue": ("scale_vec", "bias", "residual", "relu")},
    {"layout": "nchw", "epilogue": ("bias", "residual", "gelu")},
    {"layouts": {"x": "nchw", "w": "nchw", "out": "nhwc"}},
    {"layout": "nhwc", "transposed": True, "epilogue": ("bias",)},
    {"layout": "nhwc", "direction": "input_gradient"},
    {"layout": "nchw", "direction": "input_gradient"},
    {"layout": "nhwc", "direction": "weight_gradient", "dtypes": {"w": "fp32"}},
]


@pytest.mark.parametrize("case", POINTWISE, ids=case_id)
def test_pointwise_is_a_matrix_product(case: dict[str, Any]) -> None:
    check(conv2d_workload((3, 24, 4, 10), 40, 1, "fp16", **case), "pointwise", 2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"kernel": 3}, "only convolutions with one tap"),
        ({"stride": 2}, "only convolutions with one tap"),
        ({"epilogue": ("hardswish",)}, "no epilogue step hardswish"),
        ({"layouts": {"x": "strided:4000,1,1000,24"}}, "not evenly spaced"),
        ({"layout": "nchw", "direction": "weight_gradient"}, "not evenly spaced"),
    ],
)
def test_pointwise_says_why_it_cannot(case: dict[str, Any], words: str) -> None:
    workload = conv2d_workload(**{"image": (3, 24, 4, 10), "k": 40, "kernel": 1, "dtype": "fp16", **case})
    space = CONV2D.templates["pointwise"].space(workload, H100)
    assert len(space) == 0
    assert any(words in (constraint.check({}) or "") for constraint in space.constraints[:1])


GRADIENTS: list[dict[str, Any]] = [
    {"image": (2, 6, 9, 8), "k": 4, "kernel": (3, 2), "stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)},
    {"image": (2, 6, 9, 8), "k": 4, "kernel": 3, "groups": 2, "padding": 1},
    {"image": (2, 6, 9, 8), "k": 4, "kernel": 3, "groups": 2, "padding": 1, "stride": 2, "transposed": True},
]


@pytest.mark.parametrize("case", GRADIENTS)
@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
def test_a_lying_library_is_seen(case: dict[str, Any], direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.get("transposed") and direction != "forward":
        return
    workload = conv2d_workload(**case, dtype="fp32", direction=direction)
    inputs = CONV2D.make_inputs(workload, 3, "cpu")
    honest = CONV2D.reference(workload, inputs)
    assert honest.isfinite().all()
    convolve = reference.convolve

    def shifted(*args: Any) -> torch.Tensor:
        return convolve(*args).roll(1, 3)

    monkeypatch.setattr(reference, "convolve", shifted)
    with pytest.raises(ArithmeticError, match="cannot judge kernels"):
        CONV2D.reference(workload, inputs)
