"""Kernels for small groups by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d.grouped_direct import GROUPED_DIRECT
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

CASES: list[dict[str, Any]] = [
    {"image": (2, 32, 5, 7), "k": 32, "kernel": 3, "padding": 1, "groups": 8},
    {"image": (1, 30, 8, 9), "k": 20, "kernel": (3, 2), "stride": 2, "padding": (2, 1), "groups": 10},
    {"image": (1, 21, 9, 8), "k": 35, "kernel": 3, "stride": (2, 3), "padding": 1, "dilation": (2, 1), "groups": 7},
    {"image": (1, 64, 6, 6), "k": 64, "kernel": 3, "padding": 1, "groups": 2},
    {"image": (2, 6, 7, 4), "k": 12, "kernel": 1, "groups": 3},
]


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def check(workload: Workload, count: int = 1, **wanted: Any) -> None:
    found = [s for s in GROUPED_DIRECT.space(workload, H100) if all(s.knobs[name] == x for name, x in wanted.items())]
    assert found
    for schedule in random.Random(7).sample(found, min(count, len(found))):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("kind", ["forward", "transposed", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_odd_groups_in_every_direction(case: dict[str, Any], kind: str) -> None:
    direction = {"direction": "forward", "transposed": True} if kind == "transposed" else {"direction": kind}
    layout = ("nhwc", "nchw")[(CASES.index(case) + len(kind)) % 2]
    check(conv2d_workload(**{**case, **direction}, dtype="fp16", layout=layout), 2)


def test_the_epilogue_and_wider_types() -> None:
    chain = ("scale_vec", "bias", "residual", "relu6")
    check(conv2d_workload((2, 16, 5, 5), 24, 3, "fp32", epilogue=chain, padding=1, groups=4), 2)


@pytest.mark.parametrize("split_k", [1, 8])
def test_weight_gradients_in_parts(split_k: int) -> None:
    given: dict[str, Any] = {"padding": 1, "groups": 4, "direction": "weight_gradient"}
    check(conv2d_workload((5, 16, 8, 8), 16, 3, "fp16", **given), split_k=split_k)


def test_gaps_hold_nan_that_is_not_read() -> None:
    layouts = {"x": "strided:3200,1,400,40+3", "out": "strided:1400,1,200,33"}
    check(conv2d_workload((2, 32, 7, 6), 32, 3, "fp16", padding=1, groups=8, layouts=layouts))


@pytest.mark.parametrize(
    ("channels", "groups", "words"),
    [(8, 1, "grouped convolutions"), (8, 8, "by themselves"), (128, 2, "at most 32 channels, got 64 and 64")],
)
def test_what_it_is_not_for_is_refused_in_words(channels: int, groups: int, words: str) -> None:
    space = GROUPED_DIRECT.space(conv2d_workload((1, channels, 6, 6), channels, 3, groups=groups), H100)
    other = GROUPED_DIRECT.space(conv2d_workload((1, 16, 6, 6), 16, 3, groups=4), H100)
    assert len(space) == 0
    assert any(words in why for why in space.why_illegal(other.members[0]))
