"""Kernels for first layers by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.stem import STEM
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

CASES: list[dict[str, Any]] = [
    {"image": (2, 3, 13, 12), "k": 20, "kernel": 7, "stride": 2, "padding": 3},
    {"image": (1, 3, 12, 12), "k": 16, "kernel": 4, "stride": 4},
    {"image": (2, 1, 9, 7), "k": 17, "kernel": (5, 3), "padding": (1, 2)},
    {"image": (1, 4, 8, 11), "k": 8, "kernel": 3, "stride": (1, 3), "padding": 4},
    {"image": (1, 2, 1, 40), "k": 12, "kernel": (1, 10), "stride": (1, 5)},
]


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def check(workload: Workload, count: int = 1, **wanted: Any) -> None:
    found = [s for s in STEM.space(workload, H100) if all(s.knobs[name] == x for name, x in wanted.items())]
    assert found
    for schedule in random.Random(7).sample(found, min(count, len(found))):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("reduction", ["runs", "flat"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_odd_sizes(case: dict[str, Any], reduction: str, layout: str) -> None:
    workload = conv2d_workload(**case, dtype="fp16", layout=layout, epilogue=("scale_vec", "bias", "silu"))
    check(workload, 1, reduction=reduction)


@pytest.mark.parametrize("unroll", [0, 1])
@pytest.mark.parametrize("layouts", [{"x": "strided:1400,1,35,3+2"}, {"w": "nchw", "out": "nchw"}, {"x": "nchw+1"}])
def test_layouts_and_gaps(layouts: dict[str, str], unroll: int) -> None:
    given: dict[str, Any] = {"stride": 2, "padding": 1, "layouts": layouts}
    check(conv2d_workload((2, 3, 10, 9), 24, 3, "fp16", **given), 2, unroll=unroll)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_other_types_and_dilation(dtype: str) -> None:
    check(conv2d_workload((1, 3, 9, 9), 16, 3, dtype, padding=2, dilation=2, dtypes={"out": "fp32"}), reduction="flat")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image": (1, 5, 8, 8)}, "at most 4 channels"),
        ({"groups": 2, "image": (1, 4, 8, 8)}, "at most 4 channels in one group, got 4 in 2"),
        ({"direction": "weight_gradient"}, "computes forward"),
        ({"dilation": 2, "padding": 2}, "no neighbours in memory"),
        ({"layouts": {"x": "strided:512,1,64,8"}}, "no neighbours in memory"),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    space = STEM.space(conv2d_workload(**{"image": (1, 3, 8, 8), "k": 16, "kernel": 3, "padding": 1, **given}), H100)
    runs = next(
        s for s in STEM.space(conv2d_workload((1, 3, 8, 8), 16, 3, padding=1), H100) if s.knobs["block_k"] == 16
    )
    assert not space.contains(runs)
    assert any(words in why for why in space.why_illegal(runs)), space.why_illegal(runs)
