"""Gradients of the input of patch embeddings, by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.patch_gradient import PATCH_GRADIENT
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify

H100 = named_device("h100")

CASES: list[dict[str, Any]] = [
    {"image": (2, 3, 16, 20), "k": 40, "kernel": 4, "stride": 4},
    {"image": (1, 3, 28, 28), "k": 24, "kernel": 14, "stride": 14},
    {"image": (2, 5, 17, 11), "k": 16, "kernel": 4, "stride": 4},
    {"image": (2, 3, 13, 13), "k": 33, "kernel": (2, 3), "stride": (2, 4), "padding": (1, 2)},
    {"image": (1, 7, 1, 19), "k": 16, "kernel": (1, 2), "stride": (1, 2), "padding": (0, 1)},
    {"image": (2, 1, 9, 9), "k": 16, "kernel": 3, "stride": 3, "padding": 4},
]


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "strided:40000,4000,80,2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_every_pixel_is_written(case: dict[str, Any], layout: str) -> None:
    plain = "nhwc" if layout == "nhwc" else "nchw"
    workload = conv2d_workload(**case, dtype="fp16", layout=plain, layouts={"x": layout}, direction="input_gradient")
    members = PATCH_GRADIENT.space(workload, H100).members
    for schedule in random.Random(5).sample(members, 2):
        inputs, out = CONV2D.make_inputs(workload, 1, "cpu"), CONV2D.empty_output(workload, "cpu")
        launch_all(CONV2D.plan(workload, schedule, inputs, out))
        verdict = verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))
        assert verdict.right, (schedule, verdict)


def test_fp32() -> None:
    workload = conv2d_workload((2, 3, 8, 8), 24, 4, "fp32", stride=4, direction="input_gradient")
    schedule = PATCH_GRADIENT.space(workload, H100).members[0]
    inputs, out = CONV2D.make_inputs(workload, 1, "cpu"), CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    assert verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload)).right


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kernel": 3}, "needs a kernel no larger than the stride"),
        ({"kernel": 1}, "most of the columns would be zero"),
        ({"groups": 2, "image": (1, 4, 8, 8)}, "one group"),
        ({"direction": "forward"}, "computes input_gradient, not forward"),
    ],
)
def test_others_are_refused_in_words(given: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"image": (1, 3, 8, 8), "k": 16, "kernel": 2, "stride": 2, "direction": "input_gradient"}
    able = PATCH_GRADIENT.space(conv2d_workload(**base), H100).members[0]
    space = PATCH_GRADIENT.space(conv2d_workload(**{**base, **given}), H100)
    assert len(space) == 0 and any(words in why for why in space.why_illegal(able))
