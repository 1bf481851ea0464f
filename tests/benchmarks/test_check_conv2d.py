"""The check of all conv2d templates: its cases reach every kind of convolution, and its child judges them."""

from __future__ import annotations

from collections.abc import Iterator

import check_conv2d
import conv2d_cases
import conv2d_problems
import pytest
from check_matmul import rows_of
from verify_job import Case, CheckJob, LoadJob
from verify_runner import Checked

from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import DIRECTIONS, STEPS, conv2d_workload, problem_of
from kernelwright.kernels.device import named_device
from kernelwright.search.measure_job import Reply
from kernelwright.types import Status

H100 = named_device("h100")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ChildProcess]:
    init = {"device_index": 0, "l2_bytes": 0, "device": "cpu"}
    with ChildProcess("verify_job:start", init=init, env={"TRITON_INTERPRET": "1"}) as child:
        yield child


def test_coverage_reaches_every_step_type_direction_and_template() -> None:
    cases = conv2d_cases.coverage()
    problems = [problem_of(case.workload) for case in cases]
    assert len({case.id for case in cases}) == len(cases)
    assert {step for p in problems for step in p.epilogue} == set(STEPS)
    assert {p.direction for p in problems} == set(DIRECTIONS)
    assert {p.dtypes["x"] for p in problems} == {"bf16", "fp16", "fp32", "int8", "fp8e4m3"}
    missing = set(CONV2D.templates)
    for case in cases:
        missing -= {name for name in missing if len(CONV2D.templates[name].space(case.workload, H100))}
    assert not missing


def test_every_awkward_problem_has_a_schedule() -> None:
    assert len(check_conv2d.cases_of(check_conv2d.SETS, "")) > 250
    cases = check_conv2d.cases_of(["awkward", "awkward_gradients"], "")
    assert len({case.workload.key for case in cases}) == len(cases) > 50
    for case in cases:
        assert CONV2D.default_schedule(case.workload, H100), case.tag


def test_problem_sets_are_read_as_they_are_written() -> None:
    core = {entry.id: entry for entry in conv2d_problems.load_conv2d("core")}
    assert len(core) == 39 and not conv2d_problems.skipped_conv2d("core")
    stem = core["conv_n32_c3_224x224_k64_7x7_s2_fp16_e921e1"].workload
    wanted = conv2d_workload(
        (32, 3, 224, 224), 64, 7, "fp16", epilogue=("scale_vec", "bias", "relu"), stride=2, padding=3
    )
    assert stem == wanted
    assert (conv2d_problems.group(stem), conv2d_problems.kind(stem)) == ("epilogue", "stem")
    sliced = core["conv_n1_c32_160x160_k32_3x3_s1_fp16_4b0e78"].workload
    assert sliced.layouts["x"] == "strided:1638400,1,10240,64"
    assert conv2d_problems.group(core["wgrad_n64_c64_56x56_k64_3x3_s1_bf16_432845"].workload) == "wgrad"
    (skipped,) = conv2d_problems.skipped_conv2d("awkward")
    assert "no pixel along H" in skipped.reason


@pytest.mark.parametrize("number", ["27", "29", "39", "42", "46"])
def test_awkward_problems_are_right_in_the_interpreter(interpreter: ChildProcess, number: str) -> None:
    case = check_conv2d.cases_of(["awkward"], f"awk{number}")[0]
    assert interpreter.call(LoadJob(case, 0, False)) == Reply(())
    schedule = CONV2D.default_schedule(case.workload, H100)
    measurement = interpreter.call(CheckJob(case, schedule, 0, False)).measurements[0]
    assert measurement.status is Status.OK, measurement


def test_whole_numbers_and_gaps_are_judged(interpreter: ChildProcess) -> None:
    exact = conv2d_workload((1, 16, 4, 4), 16, 1, "int8", dtypes={"out": "int32"})
    gaps = conv2d_workload((1, 16, 4, 4), 16, 1, "fp16", layouts={"out": "strided:1000,1,160,20"})
    for workload in (exact, gaps):
        case = Case("case", "", workload)
        schedule = CONV2D.default_schedule(workload, H100)
        measurement = interpreter.call(CheckJob(case, schedule, 0, False)).measurements[0]
        assert measurement.status is Status.OK, measurement
        checked = Checked(case)
        checked.results[schedule.template] = [(schedule, measurement)]
        (row,) = rows_of(checked)
        assert (row["family"], row["group"]) == ("conv2d", "forward")
