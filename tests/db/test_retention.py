"""Which trials stay."""

from __future__ import annotations

import pytest

from kernelwright.db import JobRequest, Pruned, Store, prune
from kernelwright.errors import UsageError
from kernelwright.types import Measurement, Schedule, Status
from tests.db.values import OLDER_TOOLCHAIN, matmul, record, trial

WINNER = trial(1, measurement=Measurement(Status.OK, 9.0, error=1e-3))
RUNNER_UP = trial(2, measurement=Measurement(Status.OK, 9.5, error=1e-3))
PRECISE = trial(3, measurement=Measurement(Status.OK, 20.0, error=1e-6))
DULL = [trial(number, measurement=Measurement(Status.OK, 30.0 + number, error=1e-2)) for number in range(10, 30)]
FAILED = [trial(number, measurement=Measurement(Status.CRASHED)) for number in range(30, 40)]


@pytest.fixture
def filled(store: Store) -> Store:
    job = store.submit(JobRequest(matmul(), "cuda"))
    store.add_trials([WINNER, RUNNER_UP, PRECISE, *DULL, *FAILED])
    store.add_trial(trial(50, measurement=Measurement(Status.CRASHED)), job.id)
    store.add_trials([trial(60, toolchain=OLDER_TOOLCHAIN), trial(61, workload=matmul(65))])
    store.put_winner(record(schedule=WINNER.schedule, runner_up=RUNNER_UP.schedule, runner_up_us=9.5))
    return store


def test_winners_pareto_points_running_jobs_and_a_sample_stay(filled: Store) -> None:
    expected = Pruned(trials=36, winners=2, pareto=3, running=1, sample=5, removed=25)
    before = list(filled.trials())
    assert prune(filled, sample=5, dry_run=True) == expected
    assert list(filled.trials()) == before
    assert prune(filled, sample=5) == expected
    left = list(filled.trials())
    assert len(left) == 11 and {WINNER, RUNNER_UP, PRECISE} <= set(left)
    assert filled.records() == [record(schedule=WINNER.schedule, runner_up=RUNNER_UP.schedule, runner_up_us=9.5)]
    assert prune(filled, sample=5) == Pruned(trials=11, winners=2, pareto=3, running=1, sample=5)
    assert list(filled.trials()) == left


def test_the_seed_chooses_the_sample() -> None:
    def left(seed: int) -> set[Schedule]:
        with Store.open("sqlite://") as store:
            store.add_trials([*DULL, *FAILED])
            prune(store, sample=6, seed=seed)
            return {one.schedule for one in store.trials()}

    assert left(1) == left(1) and left(1) != left(2)


def test_a_sample_below_nothing_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="sample must be 0 or more, got -1"):
        prune(store, -1)
