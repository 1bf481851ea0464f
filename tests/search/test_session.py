from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.errors import NoWorkingSchedule, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.operator import roofline_us
from kernelwright.kernels.space import FiniteSpace
from kernelwright.search.budget import DEFAULT_TRIALS, LEAST_TRIALS, Budget
from kernelwright.search.session import Session
from kernelwright.search.strategy import make_strategy
from kernelwright.types import Measurement, Schedule, Status, Trial
from tests.search.fakes import (
    DEVICE,
    WORKLOAD,
    FakeRunner,
    HalfRightModel,
    failure,
    fake_space,
    true_us,
    workload,
    works,
)

SPACE = fake_space()
BEST = min(SPACE, key=true_us)


def session(
    runner: FakeRunner, budget: Budget, name: str = "model", seed: int = 0, known: list[Trial] | None = None
) -> Session:
    strategy = make_strategy(name, WORKLOAD, DEVICE, runner.space(WORKLOAD), seed, HalfRightModel())
    return Session(WORKLOAD, runner, strategy, budget, known=known or [])


def test_finds_the_best_and_says_everything_about_it() -> None:
    runner = FakeRunner()
    search = session(runner, Budget(trials=60))
    trials = list(search)
    record = search.record
    assert record.schedule == BEST
    assert record.measurement.median_us == 100.0
    assert (record.vendor, record.vendor_us, record.noise, record.aa_ratio) == ("torch.mm", 110.0, 0.01, 1.001)
    assert record.winner == "kernel"
    assert record.runner_up_us is not None and record.runner_up_us > 100.0
    assert record.runner_up is not None and true_us(record.runner_up) == record.runner_up_us
    assert record.roofline == pytest.approx(roofline_us(get_operator("matmul"), WORKLOAD, DEVICE) / 100.0)
    assert record.trials == len(trials) == 60
    assert record.template_fingerprint == get_operator("matmul").templates["pointer"].fingerprint
    assert record.space_fingerprint == SPACE.fingerprint
    assert record.origin == "tune"


def test_the_record_keeps_what_only_the_search_saw() -> None:
    search = session(FakeRunner(), Budget(trials=60))
    list(search)
    assert (search.record.measurement.registers, search.record.measurement.compile_s) == (128, 0.5)


def test_trials_carry_where_they_come_from() -> None:
    trial = next(iter(session(FakeRunner(), Budget(trials=8))))
    assert (trial.workload, trial.device, trial.origin) == (WORKLOAD, DEVICE, "tune")
    assert trial.measurement == works(trial.schedule)
    assert trial.template_fingerprint == get_operator("matmul").templates[trial.schedule.template].fingerprint
    assert trial.measured_at.endswith("+00:00")


def test_without_a_budget_the_default_number_is_tried() -> None:
    assert len(list(session(FakeRunner(), Budget(), "random"))) == DEFAULT_TRIALS
    assert LEAST_TRIALS <= len(list(session(FakeRunner(), Budget()))) < DEFAULT_TRIALS


def test_a_strategy_that_runs_dry_ends_it() -> None:
    assert len(list(session(FakeRunner(), Budget(trials=1000), "exhaustive"))) == len(SPACE)


def test_time_ends_it() -> None:
    runner = FakeRunner(seconds_each=0.01)
    search = session(runner, Budget(seconds=0.1), "random")
    trials = list(search)
    assert 1 <= len(trials) <= 10
    assert search.record.trials == len(trials)


def test_a_short_search_waits_for_its_first_result() -> None:
    """A cold start, or failures at first, may take longer than the budget: something must come of it all the same."""
    failures = {schedule: failure() for schedule in list(SPACE)[:3]}
    runner = FakeRunner(FiniteSpace(list(SPACE)), failures=failures, seconds_each=0.02)
    search = session(runner, Budget(seconds=0.01), "exhaustive")
    statuses = [trial.measurement.status for trial in search]
    assert statuses == [Status.BUILD_ERROR] * 3 + [Status.OK]
    assert search.record.schedule == runner.measured[3]


def test_one_that_is_not_patient_ends_without_a_result() -> None:
    runner = FakeRunner(failures={schedule: failure() for schedule in SPACE}, seconds_each=0.02)
    strategy = make_strategy("random", WORKLOAD, runner.device, SPACE, 0)
    search = Session(WORKLOAD, runner, strategy, Budget(seconds=0.05), patient=False)
    assert len(list(search)) <= 4
    with pytest.raises(NoWorkingSchedule):
        _ = search.record


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwright.search.session.FIRST_RESULT_S", 0.1)
    runner = FakeRunner(failures={schedule: failure() for schedule in SPACE}, seconds_each=0.02)
    search = session(runner, Budget(seconds=0.01), "random")
    assert 1 <= len(list(search)) <= 6
    with pytest.raises(NoWorkingSchedule):
        _ = search.record


def test_patience_ends_it_after_so_many_trials_without_gain() -> None:
    runner = FakeRunner(FiniteSpace(sorted(SPACE, key=true_us)))
    assert len(list(session(runner, Budget(trials=100, patience=7), "exhaustive"))) == 1 + 7


def test_failures_are_trials_and_the_search_goes_on() -> None:
    failures = {schedule: failure() for place, schedule in enumerate(SPACE) if place % 2}
    search = session(FakeRunner(failures=failures), Budget(trials=110), "random")
    statuses = [trial.measurement.status for trial in search]
    assert statuses.count(Status.BUILD_ERROR) == len(failures)
    assert search.record.schedule not in failures


def test_nothing_worked_is_told_with_counts_and_a_message() -> None:
    failures = dict.fromkeys(SPACE, failure())
    failures[BEST] = failure(Status.TIMEOUT, "")
    search = session(FakeRunner(failures=failures), Budget(trials=110))
    assert len(list(search)) == 110
    with pytest.raises(NoWorkingSchedule, match=r"all 110 .*109 build_error, 1 timeout.*LLVM said no"):
        _ = search.record


def test_an_empty_space_is_told() -> None:
    search = session(FakeRunner(FiniteSpace([])), Budget(trials=4), "random")
    assert list(search) == []
    with pytest.raises(NoWorkingSchedule, match=r"no schedule of .* is legal"):
        _ = search.record


def test_a_record_before_the_end_is_a_usage_error() -> None:
    search = session(FakeRunner(), Budget(trials=8))
    next(iter(search))
    with pytest.raises(UsageError, match="iterate over the session first"):
        _ = search.record


def test_a_loop_that_was_left_goes_on_where_it_was() -> None:
    search = session(FakeRunner(), Budget(trials=12))
    first = [next(iter(search)) for _ in range(5)]
    assert len(first + list(search)) == 12
    assert search.record.trials == 12


def test_stop_goes_to_the_final_round() -> None:
    search = session(FakeRunner(), Budget(trials=60))
    for count, _ in enumerate(search, 1):
        if count == 3:
            search.stop()
    assert search.record.trials == 3


def test_progress() -> None:
    search = session(FakeRunner(), Budget(trials=20))
    assert dataclasses.astuple(search.progress()) == (0, 20, None, 0.0)
    times = [trial.measurement.median_us for trial in search]
    assert search.progress().trials == 20
    assert search.progress().best_us == min(t for t in times if t is not None)
    assert search.progress().seconds > 0


def test_known_trials_are_taken_in_and_not_measured_again() -> None:
    first = session(FakeRunner(), Budget(trials=30), "random")
    stored = [next(iter(first)) for _ in range(12)]
    runner = FakeRunner()
    search = session(runner, Budget(trials=30), "random", known=stored)
    rest = list(search)
    assert len(rest) == 18
    assert not {trial.schedule for trial in stored} & set(runner.measured)
    assert search.record.trials == 30


def test_a_spent_budget_still_gives_a_record() -> None:
    stored = list(session(FakeRunner(), Budget(trials=30)))
    search = session(FakeRunner(), Budget(trials=30), known=stored)
    assert list(search) == []
    assert search.record.schedule == min((t.schedule for t in stored), key=true_us)


@pytest.mark.parametrize(
    "change",
    [
        {"workload": workload(m=4096)},
        {"device": dataclasses.replace(DEVICE, multiprocessors=114)},
        {"toolchain": dataclasses.replace(FakeRunner().toolchain, triton="3.6.0")},
        {"template_fingerprint": "older"},
        {"schedule": Schedule("vendor")},
    ],
)
def test_known_trials_of_something_else_do_not_count(change: dict[str, object]) -> None:
    stored = list(session(FakeRunner(), Budget(trials=4)))
    others = [dataclasses.replace(trial, **change) for trial in stored]  # type: ignore[arg-type]
    assert len(list(session(FakeRunner(), Budget(trials=8), known=others))) == 8


def test_only_near_finalists_meet_the_vendor() -> None:
    runner = FakeRunner()
    list(session(runner, Budget(trials=110), "exhaustive"))
    assert runner.final_rounds == [(BEST,)]


def test_ties_go_to_the_lighter_schedule_whatever_the_order() -> None:
    light, heavy = list(SPACE)[:2]
    for order in ((light, heavy), (heavy, light)):
        runner = FakeRunner(
            FiniteSpace(order),
            {
                light: Measurement(Status.OK, 100.0, shared_bytes=1000, registers=255),
                heavy: Measurement(Status.OK, 99.5, shared_bytes=2000, registers=32),
            },
            {light: Measurement(Status.OK, 100.0), heavy: Measurement(Status.OK, 99.5)},
        )
        search = session(runner, Budget(trials=2), "exhaustive")
        list(search)
        assert (search.record.schedule, search.record.runner_up) == (light, heavy)
        assert search.record.runner_up_us == 99.5


def test_beyond_the_noise_the_faster_wins() -> None:
    light, heavy = list(SPACE)[:2]
    seen = {
        light: Measurement(Status.OK, 102.0, shared_bytes=1000),
        heavy: Measurement(Status.OK, 100.0, shared_bytes=2000),
    }
    search = session(FakeRunner(FiniteSpace([light, heavy]), seen, seen), Budget(trials=2), "exhaustive")
    list(search)
    assert search.record.schedule == heavy


def test_a_finalist_that_fails_becomes_a_failed_trial_and_the_next_wins() -> None:
    wrong = failure(Status.WRONG_RESULT, "error 0.3")
    runner = FakeRunner(final_failures={BEST: wrong})
    search = session(runner, Budget(trials=110), "exhaustive")
    last = list(search)[-1]
    assert (last.schedule, last.measurement) == (BEST, wrong)
    assert search.record.schedule == sorted(SPACE, key=lambda s: (true_us(s), s.key))[1]


def test_a_bad_finalist_does_not_take_the_others_down() -> None:
    one, two = list(SPACE)[:2]
    crash = failure(Status.CRASHED, "the child died")

    class OneCrash(FakeRunner):
        def finals(self, workload, schedules):  # type: ignore[no-untyped-def]
            self.final_failures = dict.fromkeys(schedules, crash) if one in schedules else {}
            return super().finals(workload, schedules)

    same = {s: Measurement(Status.OK, us) for s, us in ((one, 100.0), (two, 101.0))}
    search = session(OneCrash(FiniteSpace([one, two]), same), Budget(trials=2), "exhaustive")
    failed = [trial.schedule for trial in search if not trial.measurement.ok]
    assert failed == [one]
    assert search.record.schedule == two


def test_a_slower_kernel_than_the_vendor_says_so() -> None:
    slow = [schedule for schedule in SPACE if true_us(schedule) > 150]
    search = session(FakeRunner(FiniteSpace(slow)), Budget(trials=10))
    list(search)
    assert search.record.winner == "vendor"


@pytest.mark.parametrize("name", ["model", "random"])
def test_equal_seeds_give_equal_sessions(name: str) -> None:
    def tried(seed: int) -> list[Schedule]:
        return [trial.schedule for trial in session(FakeRunner(), Budget(trials=24), name, seed)]

    assert tried(4) == tried(4)
    assert tried(4) != tried(5)


def test_a_small_budget_is_spent_in_several_rounds() -> None:
    asked = []

    class Counting(FakeRunner):
        def measure(self, workload, schedules, deadline=None):  # type: ignore[no-untyped-def]
            asked.append(len(schedules))
            return super().measure(workload, schedules, deadline)

    list(session(Counting(), Budget(trials=18)))
    assert asked == [9, 9]
    asked.clear()
    list(session(Counting(), Budget(trials=7)))
    assert asked == [4, 3]


def test_a_batch_must_hold_something() -> None:
    runner = FakeRunner()
    strategy = make_strategy("random", WORKLOAD, DEVICE, runner.space(WORKLOAD))
    with pytest.raises(UsageError, match="batch must be 1 or more, got 0"):
        Session(WORKLOAD, runner, strategy, Budget(trials=1), batch=0)


@settings(max_examples=20, deadline=None)
@given(
    trials=st.integers(1, 130),
    known=st.integers(0, 40),
    patience=st.none() | st.integers(1, 40),
    name=st.sampled_from(["random", "exhaustive"]),
    broken=st.sets(st.integers(0, 109)),
)
def test_a_budget_is_never_exceeded(trials: int, known: int, patience: int | None, name: str, broken: set[int]) -> None:
    failures = {schedule: failure() for place, schedule in enumerate(SPACE) if place in broken}
    stored = list(session(FakeRunner(failures=failures), Budget(trials=known), "random")) if known else []
    runner = FakeRunner(failures=failures)
    search = session(runner, Budget(trials=trials, patience=patience), name, 1, known=stored)
    new = [trial.schedule for trial in search]
    assert len(new) <= max(0, trials - known)
    assert len(set(new) | {t.schedule for t in stored}) == len(new) + known == search.progress().trials
    if patience is None:
        assert len(new) == min(max(0, trials - known), len(SPACE) - known)
