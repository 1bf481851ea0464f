"""The measuring runner with planted bad schedules: each leaves its trial, and the session goes on."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import InvalidWorkload, UnknownDevice
from kernelwright.kernels import build as build_module
from kernelwright.kernels import get_operator
from kernelwright.kernels.child_process import ChildDied, ChildProcess, ChildRaised
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import TEMPLATES
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.nursery import Nursery
from kernelwright.search import Budget, Session, child_runner
from kernelwright.search.child_runner import ChildRunner, Jobs
from kernelwright.search.device_guard import DeviceLock
from kernelwright.search.exhaustive_search import ExhaustiveSearch
from kernelwright.search.measure_job import LoadJob, TrialJob
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status

TARGETS = Path(__file__).parents[1] / "assets" / "child_targets"
WORKLOAD = matmul_workload(128, 128, 256, "fp16")
EXPECTED = {
    "none": Status.OK,
    "abort_in_compiler": Status.BUILD_ERROR,
    "no_such_syntax": Status.BUILD_ERROR,
    "wrong": Status.WRONG_RESULT,
    "unwritten": Status.WRONG_RESULT,
    "raise": Status.CRASHED,
    "crash": Status.CRASHED,
    "hang": Status.TIMEOUT,
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """It imports torch and triton once for the children of all tests, each of which would take seconds for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TARGETS)
        nursery = Nursery("kw_planted:preload")
        yield nursery
        nursery.close()


@pytest.fixture(params=["forked"])
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nursery: Nursery) -> Iterator[ChildRunner]:
    """A runner that believes in an H100 and whose children plant the template of bad schedules. They are forks of the
    nursery, or started as they are for users."""

    def forked(*args: Any, **options: Any) -> ChildProcess:
        return ChildProcess(*args, **{**options, "nursery": nursery})

    if request.param == "forked":
        for module in (child_runner, build_module):
            monkeypatch.setattr(module, "ChildProcess", forked)
    monkeypatch.syspath_prepend(TARGETS)
    sys.modules.pop("kw_planted", None)
    import kw_planted

    monkeypatch.setattr(child_runner, "present_device", lambda index: named_device("h100"))
    kw_planted.plant()
    jobs = Jobs("kw_planted:plan_in_compiler", "kw_planted:start_fake", trial_timeout_s=2.0)
    runner = ChildRunner(seed=1, compile_workers=1, jobs=jobs)
    yield runner
    runner.close()
    del TEMPLATES["planted"]


def members() -> list[Schedule]:
    return list(get_operator("matmul").templates["planted"].space(WORKLOAD, named_device("h100")))


def test_every_fault_is_a_trial_and_the_session_goes_on(planted: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelwright.kernels.space import FiniteSpace

    space = FiniteSpace(members())
    monkeypatch.setattr(planted, "space", lambda workload: space)
    session = Session(WORKLOAD, planted, ExhaustiveSearch(space), Budget(trials=len(space)))
    status = {str(trial.schedule.knobs["fault"]): trial.measurement.status for trial in session}
    assert status == EXPECTED
    assert session.record.schedule.knobs["fault"] == "none"
    assert session.record.trials == len(EXPECTED)


def test_failures_say_what_happened(planted: ChildRunner) -> None:
    wanted = {"crash": "SIGSEGV", "hang": "no result after 2 s", "raise": "planted", "abort_in_compiler": "SIGABRT"}
    chosen = [schedule for schedule in members() if schedule.knobs["fault"] in wanted]
    for schedule, measurement in planted.measure(WORKLOAD, chosen):
        assert wanted[str(schedule.knobs["fault"])] in measurement.message


@pytest.mark.parametrize("planted", ["forked", "started"], indirect=True)
def test_a_finalist_that_kills_the_child_fails_the_round(planted: ChildRunner) -> None:
    crash, fine = (next(s for s in members() if s.knobs["fault"] == name) for name in ("crash", "none"))
    together = planted.finals(WORKLOAD, [crash, fine])
    assert [measurement.status for _, measurement in together.measurements] == [Status.CRASHED, Status.CRASHED]
    alone = planted.finals(WORKLOAD, [fine])
    assert alone.measurements == ((fine, Measurement(Status.OK, 10.0, (10.0,), 1e-3)),)
    assert (alone.vendor, alone.vendor_us) == ("torch.mm", 12.0)


def test_a_deadline_cuts_what_has_not_come(planted: ChildRunner) -> None:
    begin = time.monotonic()
    assert list(planted.measure(WORKLOAD, members(), deadline=begin)) == []
    assert time.monotonic() - begin < 60.0


def test_operands_are_loaded_once_while_the_first_schedules_compile(
    planted: ChildRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[type, str]] = []
    call = planted._child.call

    def noted(job: object, timeout_s: float) -> object:
        calls.append((type(job), threading.current_thread().name))
        return call(job, timeout_s)

    planted.warm_up()
    monkeypatch.setattr(planted._child, "call", noted)
    fine = [schedule for schedule in members() if schedule.knobs["fault"] == "none"]
    for _ in range(2):
        assert [m.status for _, m in planted.measure(WORKLOAD, fine)] == [Status.OK]
    here = threading.current_thread().name
    assert calls == [(LoadJob, "kernelwright-child"), (TrialJob, here), (TrialJob, here)]


def test_a_warm_runner_has_all_its_processes(planted: ChildRunner) -> None:
    planted.warm_up()
    first = planted._child.pid
    assert first is not None and planted._pool.wait_until_up(0.0)
    planted._child.kill()
    planted.warm_up()
    assert planted._child.pid not in (None, first)


def test_processes_start_while_the_gpu_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    started: list[object] = []
    begun = threading.Event()

    def start(child: ChildProcess) -> None:
        started.append(child)
        begun.set()

    def look(index: int) -> DeviceSpec:
        assert begun.wait(10.0)
        return named_device("h100")

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(child_runner, "present_device", look)
    runner = ChildRunner(compile_workers=1, jobs=Jobs("kw_planted:plan_in_compiler", "kw_planted:start_fake"))
    runner.close()
    assert runner._child in started


def test_without_a_gpu_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[ChildProcess] = []
    make = ChildProcess.__init__

    def noted(child: ChildProcess, *args: Any, **options: Any) -> None:
        children.append(child)
        make(child, *args, **options)

    monkeypatch.setattr(ChildProcess, "__init__", noted)
    with pytest.raises(UnknownDevice):
        ChildRunner(97, compile_workers=1)
    assert len(children) == 2 and all(child.pid is None for child in children)
    with pytest.raises(ChildDied):
        children[0].start()


def test_operands_that_cannot_be_loaded_fail_the_trial_and_tell_why(
    planted: ChildRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: object, timeout_s: float) -> object:
        raise ChildRaised("OutOfMemoryError", "operands too large", "")

    monkeypatch.setattr(planted._child, "call", refuse)
    ((_, measurement),) = planted.measure(WORKLOAD, members()[:1])
    assert (measurement.status, "operands too large" in measurement.message) == (Status.CRASHED, True)


def test_operands_that_our_own_error_refuses_are_tried_again_by_each_trial(
    planted: ChildRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[type] = []
    uncaught: list[object] = []

    def refuse(job: object, timeout_s: float) -> object:
        jobs.append(type(job))
        raise InvalidWorkload("no such operands")

    planted.warm_up()
    monkeypatch.setattr(planted._child, "call", refuse)
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    fine = [schedule for schedule in members() if schedule.knobs["fault"] == "none"]
    for _ in range(2):
        with pytest.raises(InvalidWorkload):
            list(planted.measure(WORKLOAD, fine))
    assert jobs == [LoadJob] * 4 and not uncaught


def test_a_child_is_not_warmed_up_beside_its_load(planted: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def call(job: object, timeout_s: float) -> None:
        done.append(f"{type(job).__name__} begins")
        time.sleep(0.3)
        done.append(f"{type(job).__name__} ends")

    planted.warm_up()
    planted._child.kill()
    monkeypatch.setattr(planted._child, "call", call)
    assert list(planted.measure(WORKLOAD, members(), deadline=time.monotonic())) == []
    planted.warm_up()
    assert done == ["LoadJob begins", "LoadJob ends", "WarmUpJob begins", "WarmUpJob ends"]


def test_closing_does_not_wait_for_operands(planted: ChildRunner) -> None:
    import kw_planted

    planted._seed = kw_planted.SEED_THAT_HANGS
    results = planted.measure(WORKLOAD, members(), deadline=time.monotonic())
    assert list(results) == []
    begin = time.monotonic()
    planted.close()
    assert time.monotonic() - begin < 60.0


def test_closing_ends_a_warm_up_that_waits(planted: ChildRunner) -> None:
    import kw_planted

    planted.warm_up()
    planted._seed = kw_planted.SEED_THAT_HANGS
    assert list(planted.measure(WORKLOAD, members(), deadline=time.monotonic())) == []
    waiting = threading.Thread(target=planted.warm_up, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    planted.close()
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_closing_twice_is_harmless(planted: ChildRunner) -> None:
    planted.close()
    planted.close()


@pytest.mark.parametrize("what", ["measure", "finals"])
def test_closing_ends_a_trial_of_another_thread(planted: ChildRunner, what: str) -> None:
    """As a fleet does with a run that is late; the trial fails like any other that lost its process."""
    hang = next(schedule for schedule in members() if schedule.knobs["fault"] == "hang")
    found: list[Any] = []

    def work() -> None:
        try:
            if what == "finals":
                found.extend(planted.finals(WORKLOAD, [hang]).measurements)
            else:
                found.extend(planted.measure(WORKLOAD, [hang]))
        except BaseException as error:
            found.append(error)

    planted.warm_up()
    thread = threading.Thread(target=work)
    thread.start()
    while planted._calls == 0:
        time.sleep(0.01)
    time.sleep(0.3)
    planted.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert [(schedule, measurement.status) for schedule, measurement in found] == [(hang, Status.CRASHED)]


def test_clocks_are_those_of_the_gpu_that_is_measured(planted: ChildRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES numbers GPUs anew; nvidia-smi does not look at it."""
    for uuid, visible, expected in (("GPU-b", "", "GPU-b"), ("", "", "1"), ("GPU-b", "GPU-b", "GPU-b")):
        monkeypatch.setattr(child_runner, "gpu_uuid", lambda index, uuid=uuid: uuid)
        jobs = Jobs("kw_planted:plan_in_compiler", "kw_planted:start_fake")
        with contextlib.closing(ChildRunner(1, compile_workers=1, jobs=jobs, visible=visible)) as runner:
            assert runner._clocks_of == expected


def test_closing_does_not_wait_for_another_process_on_the_gpu(planted: ChildRunner, tmp_path: Path) -> None:
    fine, found = next(schedule for schedule in members() if schedule.knobs["fault"] == "none"), []
    planted.warm_up()
    planted._lock = DeviceLock("GPU-1", tmp_path)
    with DeviceLock("GPU-1", tmp_path).held():
        thread = threading.Thread(target=lambda: found.extend(planted.finals(WORKLOAD, [fine]).measurements))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        begin = time.monotonic()
        planted.close()
        thread.join(60.0)
        assert not thread.is_alive() and time.monotonic() - begin < 60.0
    assert [measurement.status for _, measurement in found] == [Status.CRASHED]
