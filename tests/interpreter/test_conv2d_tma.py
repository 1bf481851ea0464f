"""Convolutions by TMA boxes, by numbers, run on the CPU by triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.conv2d.implicit_gemm_tma import IMPLICIT_GEMM_TMA
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.tma_view_kernel import class_of_unit
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

FORWARD: list[dict[str, Any]] = [
    {"image": (2, 24, 9, 11), "k": 40, "kernel": 3, "padding": 1},
    {"image": (3, 16, 8, 8), "k": 32, "kernel": 3, "stride": 2, "padding": 1},
    {"image": (3, 32, 8, 12), "k": 29, "kernel": (3, 5), "stride": (2, 3), "padding": (1, 2)},
    {"image": (2, 16, 7, 9), "k": 32, "kernel": 1, "stride": 2},
    {"image": (1, 16, 9, 9), "k": 32, "kernel": 3, "padding": (3, 2), "dilation": (3, 2)},
    {"image": (5, 32, 1, 16), "k": 16, "kernel": (1, 3), "stride": (1, 2), "padding": (0, 1)},
    {"image": (2, 16, 9, 11), "k": 24, "kernel": 3, "stride": 2, "padding": 1, "dilation": 2},
    {"image": (1, 32, 8, 8), "k": 16, "kernel": 2, "stride": 2, "padding": (5, 4)},
    {"image": (1, 32, 6, 12), "k": 16, "kernel": (2, 3), "stride": (1, 3), "padding": (2, 1), "dilation": (1, 2)},
    {"image": (1, 64, 7, 7), "k": 64, "kernel": 3, "padding": 1, "groups": 2},
    {"image": (4, 32, 9, 7), "k": 16, "kernel": 3, "stride": 2, "padding": 1},
]

SCATTERING: list[dict[str, Any]] = [
    {"image": (2, 24, 9, 11), "k": 40, "kernel": 3, "padding": 1},
    {"image": (3, 16, 8, 8), "k": 32, "kernel": 3, "stride": 2, "padding": 1},
    {"image": (3, 16, 7, 9), "k": 32, "kernel": 1, "stride": 2},
    {"image": (3, 16, 9, 13), "k": 32, "kernel": 3, "stride": (2, 3), "padding": (3, 2), "dilation": 2},
    {"image": (2, 64, 5, 5), "k": 64, "kernel": 3, "padding": 1, "groups": 2},
]


def size_of(schedule: Schedule) -> int:
    """How much a program does."""
    return int(schedule.knobs["block_m"]) * int(schedule.knobs["block_n"]) * int(schedule.knobs["block_k"])


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = CONV2D.make_inputs(workload, 1, "cpu")
    out = CONV2D.empty_output(workload, "cpu")
    launch_all(CONV2D.plan(workload, schedule, inputs, out))
    return verify(out, CONV2D.reference(workload, inputs), CONV2D.tolerance(workload))


def check(workload: Workload, count: int = 1, **wanted: Any) -> None:
    space = IMPLICIT_GEMM_TMA.space(workload, H100)
    found = [s for s in space if all(s.knobs[name] == x for name, x in wanted.items())]
    assert found
    # few programs: the interpreter runs them one by one
    found = sorted(found, key=size_of, reverse=True)[: max(count, len(found) // 3)]
    for schedule in random.Random(7).sample(found, min(count, len(found))):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_padding_strides_and_dilation(case: dict[str, Any]) -> None:
    check(conv2d_workload(**case, dtype="fp16", epilogue=("bias", "relu")))


@pytest.mark.parametrize("kind", ["transposed", "input_gradient"])
@pytest.mark.parametrize("case", SCATTERING, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_scattering_results(case: dict[str, Any], kind: str) -> None:
    direction = {"transposed": True} if kind == "transposed" else {"direction": kind}
    check(conv2d_workload(**case, dtype="fp16", **direction))


@pytest.mark.parametrize("split_k", [2, 4])
def test_sums_in_parts(split_k: int) -> None:
    workload = conv2d_workload((2, 64, 4, 6), 40, 3, "fp16", epilogue=("bias", "residual", "silu"), padding=1)
    check(workload, split_k=split_k)


@pytest.mark.parametrize(
    "layouts", [{"x": "strided:6400,1,640,64"}, {"out": "strided:2800,1,280,28"}, {"out": "nchw"}, {"out": "nhwc+1"}]
)
def test_gaps_and_results_that_the_engine_cannot_write(layouts: dict[str, str]) -> None:
    check(conv2d_workload((2, 32, 10, 10), 20, 3, "fp16", padding=1, layouts=layouts))


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_other_types(dtype: str) -> None:
    check(conv2d_workload((1, 32, 5, 9), 24, 3, dtype, padding=1, dtypes={"out": "fp32"}))


@pytest.mark.parametrize("direction", ["forward", "transposed", "input_gradient"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_nchw(direction: str, dtype: str) -> None:
    kind = {"transposed": True} if direction == "transposed" else {"direction": direction}
    workload = conv2d_workload((2, 32, 7, 9), 24, 3, dtype, "nchw", padding=1, stride=2, groups=1, **kind)  # type: ignore[arg-type]
    assert {s.knobs["repack"] for s in IMPLICIT_GEMM_TMA.space(workload, H100)} == {1}
    check(workload)


@pytest.mark.parametrize("layouts", [{"x": "nchw"}, {"w": "nchw"}, {"x": "nhwc+1"}, {"x": "strided:0,1,128,16"}])
def test_operands_that_are_copied(layouts: dict[str, str]) -> None:
    check(conv2d_workload((2, 16, 8, 8), 24, 3, "fp16", padding=1, layouts=layouts))


def test_channels_that_fill_no_whole_pieces_are_copied() -> None:
    workload = conv2d_workload((2, 32, 6, 6), 20, 3, "fp16", padding=1, direction="input_gradient")
    check(workload)


def test_classes_take_turns_in_every_program() -> None:
    class_of = class_of_unit.fn
    for share, programs, classes in ((1, 132, 4), (2, 132, 4), (1, 132, 2), (1, 4, 9), (3, 7, 4), (5, 4, 4)):
        units = [class_of(unit, share, programs, classes) for unit in range(classes * 60)]
        for tile in range(60):
            assert sorted(units[tile * classes :][:classes]) == list(range(classes))
    # the classes of one program of 132
    assert {class_of(5 + 132 * turn, 1, 132, 4) for turn in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"image": (1, 12, 8, 8)}, "weight with rows of whole 16 bytes, 12 channels are none"),
        ({"layouts": {"x": "nchw"}, "attributes": {"workspace_bytes": 2047}}, "2048 bytes of workspace"),
        ({"direction": "weight_gradient"}, "computes forward, transposed, input_gradient"),
        ({"image": (0, 16, 8, 8)}, "at least one image"),
        ({"image": (4, 16, 1, 64), "kernel": 1, "stride": 2}, "no pixel of the image is met"),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(given: dict[str, Any], words: str) -> None:
    workload = conv2d_workload(**{"image": (1, 16, 8, 8), "k": 16, "kernel": 3, "padding": 1, **given})
    space = IMPLICIT_GEMM_TMA.space(workload, H100)
    able = IMPLICIT_GEMM_TMA.space(conv2d_workload((1, 16, 8, 8), 16, 3, padding=1), H100)
    assert len(space) == 0
    repack = space.knobs["repack"].values[0]
    schedule = Schedule("implicit_gemm_tma", {**able.members[0].knobs, "repack": repack})  # type: ignore[arg-type]
    assert any(words in why for why in space.why_illegal(schedule)), space.why_illegal(schedule)
    assert len(IMPLICIT_GEMM_TMA.space(conv2d_workload((1, 16, 8, 8), 16, 3, padding=1), named_device("a100"))) == 0
