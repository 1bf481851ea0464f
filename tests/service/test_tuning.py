"""The glue of search and database: every trial is kept, and an interrupted run goes on."""

from __future__ import annotations

import pytest

from kernelwright.db import Store
from kernelwright.errors import InvalidWorkload, NothingRecorded, UnknownStrategy
from kernelwright.search import Budget, Progress, ReplayRunner
from kernelwright.service.tuning import TuneRequest, known_trials, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import Trial, Workload


class Interrupted(Exception):
    """Stands for whatever ends a run."""


def ignore(trial: Trial, progress: Progress) -> None:
    """Told after each trial."""


@pytest.fixture
def workload(args: WorkloadArgs) -> Workload:
    return args.workload()


def test_trials_and_winner_are_stored(store: Store, runner: ReplayRunner, workload: Workload) -> None:
    told: list[int] = []
    request = TuneRequest(workload, "random", Budget(trials=12), seed=1)
    result = tune_and_store(store, runner, request, lambda trial, progress: told.append(progress.trials))
    assert result.new_trials == len(told) == len(list(store.trials(workload_key=workload.key)))
    assert result.new_trials >= 12 and result.known_trials == 0
    assert store.get_record(result.record.key) == result.record
    assert result.record.vendor == "torch.mm" and result.record.winner == "kernel"


def test_exhaustive_tries_the_whole_space(store: Store, runner: ReplayRunner, workload: Workload) -> None:
    result = tune_and_store(store, runner, TuneRequest(workload, "exhaustive"), ignore)
    assert result.record.trials == len(runner.space(workload))
    assert result.failed_trials == sum(not t.measurement.ok for t in store.trials())
    best = min(t.measurement.median_us for t in store.trials() if t.measurement.median_us is not None)
    assert result.record.measurement.median_us is not None
    assert result.record.measurement.median_us <= best * 1.05


def test_interrupted_run_goes_on(store: Store, runner: ReplayRunner, workload: Workload) -> None:
    def stop(trial: Trial, progress: Progress) -> None:
        if progress.trials == 5:
            raise Interrupted

    request = TuneRequest(workload, "random", Budget(trials=12), seed=1)
    with pytest.raises(Interrupted):
        tune_and_store(store, runner, request, stop)
    kept = list(store.trials())
    assert len(kept) == 5 and store.count_records() == 0
    result = tune_and_store(store, runner, request, ignore)
    assert result.known_trials == 5
    schedules = [trial.schedule for trial in store.trials() if trial.origin == "tune"]
    assert len(set(schedules)) == result.record.trials == 12


@pytest.mark.parametrize(("budget", "waits"), [(Budget(8, 30.0), 1), (Budget(8), 0)])
def test_seconds_count_from_when_the_runner_is_ready(
    store: Store, trials: list[Trial], workload: Workload, budget: Budget, waits: int
) -> None:
    class Cold(ReplayRunner):
        waited = 0

        def warm_up(self) -> None:
            self.waited += 1

    runner = Cold(trials, trials[0].device)
    tune_and_store(store, runner, TuneRequest(workload, "random", budget), ignore)
    assert runner.waited == waits


def test_only_comparable_trials_count_as_known(store: Store, runner: ReplayRunner, trials: list[Trial]) -> None:
    ours = [trial for trial in trials if trial.schedule.template != "vendor"]
    changed = Trial.from_json({**ours[0].to_json(), "template_fingerprint": "another source"})
    other = Trial.from_json({**ours[1].to_json(), "toolchain": {**ours[1].toolchain.to_json(), "triton": "3.6.0"}})
    store.add_trials([*trials, changed, other])
    assert len(known_trials(store, runner, ours[0].workload)) == len(ours)


def test_misuse_stores_nothing(store: Store, runner: ReplayRunner, workload: Workload) -> None:
    with pytest.raises(UnknownStrategy):
        tune_and_store(store, runner, TuneRequest(workload, "guess"), ignore)
    other = WorkloadArgs("matmul", {"M": 5, "N": 5, "K": 5}).workload()
    with pytest.raises(NothingRecorded):
        tune_and_store(store, runner, TuneRequest(other), ignore)
    broken = Workload.from_json({**workload.to_json(), "epilogue": ["softmax"]})
    with pytest.raises(InvalidWorkload):
        tune_and_store(store, runner, TuneRequest(broken), ignore)
    assert list(store.trials()) == []
