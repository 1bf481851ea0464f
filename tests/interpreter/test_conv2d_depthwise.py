"""Depthwise kernels by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d.depthwise import DEPTHWISE
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

CASES: list[dict[str, Any]] = [
    {"image": (2, 5, 7, 5), "k": 5, "kernel": 3, "padding": 1},
    {"image": (1, 3, 9, 8), "k": 6, "kernel": (3, 5), "stride": 2, "padding": (1, 2)},
    {"image": (1, 3, 11, 10), "k": 3, "kernel": (2, 3), "stride": (2, 4), "padding": (3, 0), "dilation": (1, 2)},
    {"image": (1, 2, 12, 13), "k": 6, "kernel": 3, "stride": (3, 2), "padding": (2, 4), "dilation": (2, 3)},
    {"image": (2, 4, 1, 23), "k": 4, "kernel": (1, 7), "padding": (0, 3)},
    {"image": (1, 1, 5, 6), "k": 3, "kernel": 2},
    {"image": (1, 4, 6, 4), "k": 4, "kernel": (1, 1), "stride": 2},
]


def size_of(schedule: Schedule) -> int:
    """How much a program does."""
    return int(schedule.knobs["tile"]) * int(schedule.knobs["block_v"]) * int(schedule.knobs["block_c"])


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def check(workload: Workload, count: int = 1, **wanted: Any) -> None:
    found = [s for s in DEPTHWISE.space(workload, H100) if all(s.knobs[name] == x for name, x in wanted.items())]
    assert found
    # few programs: the interpreter runs them one by one
    found = sorted(found, key=size_of, reverse=True)[: max(count, len(found) // 3)]
    for schedule in random.Random(7).sample(found, min(count, len(found))):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("kind", ["forward", "transposed", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_odd_sizes_in_every_direction(case: dict[str, Any], kind: str) -> None:
    # padding may take all of a transposed result
    padding = case.get("padding", 0) if kind != "transposed" else (0, 1 if case["image"][3] > 9 else 0)
    direction = {"direction": "forward", "transposed": True} if kind == "transposed" else {"direction": kind}
    given = {**case, "padding": padding, "groups": case["image"][1], **direction}
    # each case in one layout, each layout in every direction
    layout = ("nhwc", "nchw")[(CASES.index(case) + len(kind)) % 2]
    check(conv2d_workload(**given, dtype="fp16", layout=layout))


@pytest.mark.parametrize("unroll", [0, 1])
@pytest.mark.parametrize("pack", [0, 1])
@pytest.mark.parametrize("along", ["w", "h"])
def test_every_way_to_walk(unroll: int, pack: int, along: str) -> None:
    chain = ("scale_vec", "bias", "residual", "hardswish")
    workload = conv2d_workload((1, 40, 4, 5), 40, 3, "fp16", epilogue=chain, padding=1, groups=40)
    check(workload, unroll=unroll, pack=pack, along=along)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp8e4m3"])
def test_other_types(dtype: str) -> None:
    check(conv2d_workload((1, 8, 4, 6), 8, 3, dtype, padding=1, groups=8, dtypes={"out": "fp32"}))


def test_large_kernels_and_output_padding() -> None:
    check(conv2d_workload((1, 4, 8, 8), 4, (31, 5), "fp16", padding=(15, 2), groups=4), tile=2)
    given: dict[str, Any] = {"transposed": True, "stride": 2, "padding": 1, "output_padding": 1, "groups": 4}
    check(conv2d_workload((1, 4, 4, 5), 8, 3, "fp32", **given))


@pytest.mark.parametrize("parts", [1, 8])
def test_weight_gradients_in_parts_are_the_same_bits_twice(parts: int) -> None:
    workload = conv2d_workload((parts, 6, 3, 3), 6, 3, "fp16", padding=1, groups=6, direction="weight_gradient")
    members = [s for s in DEPTHWISE.space(workload, H100) if s.knobs["parts"] == parts]
    schedule = random.Random(2).choice(members)
    inputs, outs = CONV2D.make_inputs(workload, 1, "cpu"), [CONV2D.empty_output(workload, "cpu") for _ in range(2)]
    for out in outs:
        launch_all(CONV2D.plan(workload, schedule, inputs, out))
    assert outs[0].equal(outs[1])
    assert verify(outs[0], CONV2D.reference(workload, inputs), CONV2D.tolerance(workload)).right


@pytest.mark.parametrize("layouts", [{"x": "strided:3200,1,400,40+3"}, {"x": "nchw", "out": "nhwc"}, {"w": "nchw"}])
def test_gaps_hold_nan_that_is_not_read(layouts: dict[str, str]) -> None:
    check(conv2d_workload((2, 32, 7, 6), 32, 3, "fp16", padding=1, groups=32, layouts=layouts))


@pytest.mark.parametrize("direction", ["forward", "weight_gradient"])
def test_no_images(direction: str) -> None:
    workload = conv2d_workload((0, 8, 6, 6), 8, 3, "fp16", groups=8, direction=direction)
    verdict = run(workload, DEPTHWISE.space(workload, H100).members[0])
    assert verdict.right, verdict


def test_channels_that_mix_are_refused_in_words() -> None:
    space = DEPTHWISE.space(conv2d_workload((1, 8, 6, 6), 8, 3, groups=4), H100)
    other = DEPTHWISE.space(conv2d_workload((1, 8, 6, 6), 8, 3, groups=8), H100)
    assert len(space) == 0
    assert any("groups must be C" in why for why in space.why_illegal(other.members[0]))
