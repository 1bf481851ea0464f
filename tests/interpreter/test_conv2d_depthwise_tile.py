"""Depthwise kernels with tiles in registers by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d import depthwise_tile
from kernelwright.kernels.conv2d.depthwise_tile import DEPTHWISE_TILE
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

CASES: list[dict[str, Any]] = [
    {"image": (2, 5, 7, 5), "k": 5, "kernel": 3, "padding": 1},
    {"image": (1, 3, 9, 8), "k": 3, "kernel": (3, 5), "stride": 2, "padding": (1, 2)},
    {"image": (1, 3, 11, 10), "k": 3, "kernel": (2, 3), "stride": (2, 4), "padding": (3, 0), "dilation": (1, 2)},
    {"image": (1, 2, 12, 13), "k": 2, "kernel": 3, "stride": (3, 2), "padding": (2, 4), "dilation": (2, 3)},
    {"image": (2, 4, 1, 23), "k": 4, "kernel": (1, 7), "padding": (0, 3)},
]


@pytest.fixture(autouse=True)
def every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that should be slow, too: they must be right all the same."""
    monkeypatch.setattr(depthwise_tile, "SLOWEST", math.inf)


def size_of(schedule: Schedule) -> int:
    """How much a program does for its code."""
    return int(schedule.knobs["block_v"]) * int(schedule.knobs["block_c"])


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def check(workload: Workload, count: int = 1, **wanted: Any) -> None:
    found = [s for s in DEPTHWISE_TILE.space(workload, H100) if all(s.knobs[name] == x for name, x in wanted.items())]
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
    check(conv2d_workload(**given, dtype="fp16"))


@pytest.mark.parametrize("direction", ["forward", "input_gradient"])
@pytest.mark.parametrize(("rows", "tile"), [(4, 7), (4, 2)])
def test_tiles_that_cover_whole_images(rows: int, tile: int, direction: str) -> None:
    workload = conv2d_workload((2, 20, 4, 7), 20, (3, 5), "fp16", padding=(1, 2), groups=20, direction=direction)
    check(workload, 1, rows=rows, tile=tile, block_v=1)


def test_epilogue_and_several_results_a_channel() -> None:
    chain = ("scale_vec", "bias", "residual", "hardswish")
    workload = conv2d_workload((1, 20, 4, 5), 40, 3, "fp16", epilogue=chain, padding=1, groups=20)
    check(workload, 1, rows=2, tile=4)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp8e4m3"])
def test_other_types(dtype: str) -> None:
    check(conv2d_workload((1, 8, 4, 6), 8, 3, dtype, padding=1, groups=8, dtypes={"out": "fp32"}), rows=2, tile=4)


def test_gradient_of_a_weight_in_parts() -> None:
    given: dict[str, Any] = {"padding": 2, "groups": 24, "direction": "weight_gradient"}
    check(conv2d_workload((3, 24, 12, 9), 48, (5, 3), "fp16", **given), 1, parts=16, rows=2)
