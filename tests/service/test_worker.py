"""A worker finishes jobs, keeps trials through crashes and stops, and never keeps a job that is not its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kernelwright.db import Job, JobRequest, JobState, Store
from kernelwright.errors import DatabaseUnavailable
from kernelwright.search import Finals, ReplayRunner
from kernelwright.service.worker import Worker, WorkerOptions, stopped_by_signals, worker_name
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import Measurement, Schedule, Workload

OPTIONS = WorkerOptions(name="one", poll=0.01, heartbeat=0.01, stale=30.0)


class Hooked:
    """A replay runner that calls `hook` before each measurement."""

    def __init__(self, inner: ReplayRunner, hook: Callable[[int], None]) -> None:
        self.inner, self.hook, self.measured, self.closed = inner, hook, 0, False
        self.device, self.toolchain = inner.device, inner.toolchain

    def space(self, workload: Workload) -> Any:
        return self.inner.space(workload)

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        for pair in self.inner.measure(workload, schedules, deadline):
            self.measured += 1
            self.hook(self.measured)
            yield pair

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        return self.inner.finals(workload, schedules)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def job(store: Store, args: WorkloadArgs) -> Job:
    return store.submit(JobRequest(args.workload(), "replay:h100", "random", trials=12))


def now(store: Store, job: Job) -> Job:
    found = store.get_job(job.id)
    assert found is not None
    return found


def test_job_is_done(store: Store, job: Job, open_recorded: Callable[[str], Any]) -> None:
    worker = Worker(store, OPTIONS, open_recorded)
    assert worker.run_once() is not None
    done = now(store, job)
    assert done.state is JobState.DONE and done.done >= 12 and done.worker == "one"
    assert done.record_id is not None and store.get_record(done.record_id) is not None
    assert len(list(store.trials_of_job(job.id))) == done.done
    assert worker.run_once() is None


def test_misuse_fails_the_job_with_its_message(store: Store, args: WorkloadArgs, open_recorded: Any) -> None:
    job = store.submit(JobRequest(args.workload(), "replay:l4"))
    Worker(store, OPTIONS, open_recorded).run_once()
    failed = now(store, job)
    assert failed.state is JobState.FAILED and "l4" in failed.message


def test_fault_fails_the_job_and_the_worker_lives(store: Store, job: Job, runner: ReplayRunner) -> None:
    def fault(number: int) -> None:
        raise RuntimeError("boom")

    hooked = Hooked(runner, fault)
    Worker(store, OPTIONS, lambda spec: hooked).run_once()
    assert now(store, job).message == "RuntimeError: boom"
    assert hooked.closed


def test_crash_loses_nothing_and_another_worker_goes_on(store: Store, job: Job, runner: ReplayRunner) -> None:
    def die(number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Worker(store, OPTIONS, lambda spec: Hooked(runner, die)).run_once()
    assert now(store, job).state is JobState.RUNNING
    assert len(list(store.trials_of_job(job.id))) == 4

    time.sleep(0.05)
    second = Hooked(runner, lambda number: None)
    options = WorkerOptions(name="two", heartbeat=0.01, stale=0.02)
    Worker(store, options, lambda spec: second).run_once()
    done = now(store, job)
    assert done.state is JobState.DONE and done.worker == "two"
    assert second.measured == 8
    assert len({trial.schedule for trial in store.trials_of_job(job.id)}) == 12


def test_stop_gives_the_job_back(store: Store, job: Job, runner: ReplayRunner) -> None:
    hooked = Hooked(runner, lambda number: None)
    worker = Worker(store, OPTIONS, lambda spec: hooked)
    hooked.hook = lambda number: worker.stop() if number == 3 else None
    worker.run()
    given_back = now(store, job)
    assert given_back.state is JobState.QUEUED and given_back.worker is None and given_back.attempts == 0
    assert len(list(store.trials_of_job(job.id))) == 3
    assert hooked.closed


def test_sigterm_stops(store: Store, job: Job, runner: ReplayRunner) -> None:
    before = signal.getsignal(signal.SIGTERM)
    hooked = Hooked(runner, lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 3 else None)
    worker = Worker(store, OPTIONS, lambda spec: hooked)
    with stopped_by_signals(worker):
        worker.run()
    assert now(store, job).state is JobState.QUEUED
    assert signal.getsignal(signal.SIGTERM) == before


def test_cancelled_job_is_left(store: Store, job: Job, runner: ReplayRunner) -> None:
    def cancel(number: int) -> None:
        if number == 3:
            store.cancel(job.id)
            time.sleep(0.2)

    hooked = Hooked(runner, cancel)
    Worker(store, OPTIONS, lambda spec: hooked).run_once()
    assert now(store, job).state is JobState.CANCELLED
    assert hooked.measured == 3


def test_job_gets_signs_of_life(store: Store, job: Job, runner: ReplayRunner) -> None:
    seen: list[int] = []

    def watch(number: int) -> None:
        if number == 2:
            time.sleep(0.3)
            seen.append(store.requeue_stale(0.2))

    Worker(store, OPTIONS, lambda spec: Hooked(runner, watch)).run_once()
    assert seen == [0] and now(store, job).state is JobState.DONE


def test_worker_takes_only_its_devices(store: Store, job: Job, open_recorded: Any) -> None:
    options = WorkerOptions(name="gpu", devices=("cuda",))
    assert Worker(store, options, open_recorded).run_once() is None
    assert now(store, job).state is JobState.QUEUED


def test_unreachable_database_is_tried_again(store: Store, job: Job, open_recorded: Any, monkeypatch: Any) -> None:
    worker = Worker(store, OPTIONS, open_recorded)
    real, calls = store.claim, []

    def claim(*given: Any) -> Job | None:
        calls.append(given)
        if len(calls) == 1:
            raise DatabaseUnavailable("gone for a moment")
        if len(calls) == 3:
            worker.stop()
        return real(*given)

    monkeypatch.setattr(store, "claim", claim)
    worker.run()
    assert now(store, job).state is JobState.DONE


def test_two_workers_share_the_queue(store: Store, args: WorkloadArgs, open_recorded: Any) -> None:
    jobs = [store.submit(JobRequest(args.workload(), "replay:h100", "random", trials=4, seed=n)) for n in range(4)]
    workers = [Worker(store, WorkerOptions(poll=0.01), open_recorded) for _ in range(2)]

    def drain(worker: Worker) -> None:
        while worker.run_once():
            pass

    threads = [threading.Thread(target=drain, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [now(store, job).state for job in jobs] == [JobState.DONE] * 4
    assert [now(store, job).attempts for job in jobs] == [1] * 4


def test_names_differ() -> None:
    assert worker_name() != worker_name()
