from __future__ import annotations

import dataclasses

import pytest

from kernelwright.errors import NothingRecorded
from kernelwright.search.budget import Budget
from kernelwright.search.replay_runner import REPLAY_NOISE, ReplayRunner
from kernelwright.search.runner import RecordedCode, Runner
from kernelwright.search.session import Session
from kernelwright.search.strategy import make_strategy
from kernelwright.types import Measurement, Schedule, Status, Trial, Workload
from tests.contracts.runner_contract import RunnerContract
from tests.search.fakes import (
    DEVICE,
    TOOLCHAIN,
    WORKLOAD,
    HalfRightModel,
    failure,
    fake_space,
    trial,
    true_us,
    vendor,
    workload,
)

MEMBERS = list(fake_space())
ONE = MEMBERS[0]
SWEEP = [*(trial(s) for s in MEMBERS), vendor(110.0), trial(ONE, of=workload(64), fingerprint="other")]


@pytest.fixture
def runner() -> Runner:
    return ReplayRunner(SWEEP, DEVICE)


class TestReplayRunner(RunnerContract):
    @pytest.fixture
    def workload(self) -> Workload:
        return WORKLOAD


def ok(us: float) -> Measurement:
    return Measurement(Status.OK, us)


def replayed(trials: list[Trial]) -> Measurement:
    return dict(ReplayRunner(trials, DEVICE).measure(WORKLOAD, [ONE]))[ONE]


def test_the_space_is_what_was_recorded(runner: Runner) -> None:
    assert list(runner.space(WORKLOAD)) == MEMBERS
    assert list(runner.space(workload(64))) == [ONE]


def test_failures_are_answered_too() -> None:
    assert replayed([trial(ONE, failure())]) == failure()


def test_the_final_round_has_the_vendor_call(runner: Runner) -> None:
    finals = runner.finals(WORKLOAD, MEMBERS[:2])
    assert (finals.vendor, finals.vendor_us, finals.noise) == ("torch.mm", 110.0, REPLAY_NOISE)
    assert [m.median_us for _, m in finals.measurements] == [true_us(s) for s in MEMBERS[:2]]


def test_the_fastest_of_several_vendor_calls_counts() -> None:
    finals = ReplayRunner([*SWEEP, vendor(90.0, call="cublasLt")], DEVICE).finals(WORKLOAD, [])
    assert (finals.vendor, finals.vendor_us) == ("cublasLt", 90.0)


def test_without_a_vendor_call_there_is_none() -> None:
    finals = ReplayRunner([trial(ONE)], DEVICE).finals(WORKLOAD, [ONE])
    assert (finals.vendor, finals.vendor_us) == ("", None)


def test_the_middle_of_several_times_counts() -> None:
    assert replayed([trial(ONE, ok(us)) for us in (9.0, 1.0, 2.0)]).median_us == 2.0
    assert replayed([trial(ONE, ok(us)) for us in (9.0, 2.0)]).median_us == 2.0


def test_a_time_beats_a_crash_but_not_a_wrong_result() -> None:
    assert replayed([trial(ONE, ok(5.0)), trial(ONE, failure(Status.CRASHED))]).median_us == 5.0
    wrong = failure(Status.WRONG_RESULT)
    assert replayed([trial(ONE, wrong), trial(ONE, ok(5.0), at="2027")]) == wrong


def test_the_last_failure_counts_when_it_never_worked() -> None:
    crash, hang = failure(Status.CRASHED), failure(Status.TIMEOUT)
    assert replayed([trial(ONE, crash, at="2027"), trial(ONE, hang, at="2026")]) == crash


def test_times_of_the_final_round_answer_the_final_round() -> None:
    runner = ReplayRunner([trial(ONE, ok(5.0)), trial(ONE, ok(4.0), origin="record:final")], DEVICE)
    assert dict(runner.measure(WORKLOAD, [ONE]))[ONE].median_us == 5.0
    assert dict(runner.finals(WORKLOAD, [ONE]).measurements)[ONE].median_us == 4.0


def test_the_most_common_toolchain_is_preferred() -> None:
    newer = dataclasses.replace(TOOLCHAIN, triton="3.8.0")
    runner = ReplayRunner([*SWEEP, trial(ONE, ok(1.0), toolchain=newer, at="2027")], DEVICE)
    assert runner.toolchain == TOOLCHAIN
    assert dict(runner.measure(WORKLOAD, [ONE]))[ONE].median_us == true_us(ONE)


def test_an_unknown_workload_is_told_with_the_nearest() -> None:
    recorded = [trial(ONE, of=workload(m)) for m in (8, 64, 512, 1024, 4096, 8192, 65536)]
    runner = ReplayRunner(recorded, DEVICE)
    with pytest.raises(
        NothingRecorded, match=r"nearest of 7 recorded workloads: matmul\[K=4096,M=1024,N=4096\]"
    ) as told:
        runner.space(workload(1100))
    assert "M=65536" not in str(told.value)


def test_a_schedule_that_was_not_recorded_is_told(runner: Runner) -> None:
    with pytest.raises(NothingRecorded, match="was not recorded"):
        list(runner.measure(WORKLOAD, [Schedule("pointer")]))


def test_trials_of_other_devices_are_left_out() -> None:
    other = dataclasses.replace(DEVICE, multiprocessors=114)
    with pytest.raises(NothingRecorded, match="needs trials recorded on one"):
        ReplayRunner(SWEEP, other)


def test_it_knows_the_code_that_was_measured(runner: Runner) -> None:
    assert isinstance(runner, RecordedCode)
    assert runner.fingerprints(WORKLOAD)["pointer"] == "f" * 20
    assert runner.fingerprints(workload(64))["pointer"] == "other"


def test_a_whole_search_without_a_gpu(runner: Runner) -> None:
    strategy = make_strategy("model", WORKLOAD, runner.device, runner.space(WORKLOAD), 0, HalfRightModel())
    session = Session(WORKLOAD, runner, strategy, Budget(trials=24), origin="replay")
    trials = list(session)
    assert len(trials) == 24
    assert session.record.measurement.median_us == 100.0
    assert session.record.vendor_us == 110.0
    assert session.record.template_fingerprint == "f" * 20
