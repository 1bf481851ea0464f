"""A worker: takes jobs from the queue one at a time, tunes, and keeps every trial as it comes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from kernelwright.db import Job, Store
from kernelwright.errors import DatabaseError, KernelwrightError
from kernelwright.search import Budget, Progress, Runner, open_runner
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.types import Trial

logger = logging.getLogger(__name__)


def worker_name() -> str:
    """A name that no other worker has, which says where it runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How a worker keeps time, in seconds.

    poll: between two looks at an empty queue. heartbeat: between two signs of life. stale: a job whose worker gave
    no sign of life for this long goes back to the queue. devices: take only jobs for these, None takes any. models:
    folder of the user's own cost models.
    """

    name: str = dataclasses.field(default_factory=worker_name)
    poll: float = 1.0
    heartbeat: float = 5.0
    stale: float = 30.0
    devices: tuple[str, ...] | None = None
    models: Path | None = None


class _Stopped(Exception):
    """The worker was told to stop."""


class _Lost(Exception):
    """The job is no longer this worker's: it was cancelled, or given to another worker."""


class Worker:
    """Runs jobs of one store. `open_runner` turns a job's device, as typed, into a runner."""

    def __init__(
        self, store: Store, options: WorkerOptions | None = None, open_runner: Callable[[str], Runner] = open_runner
    ) -> None:
        self.options = options or WorkerOptions()
        self._store = store
        self._open_runner = open_runner
        self._stop = threading.Event()

    def stop(self) -> None:
        """End after the trial that is being measured; its job goes back to the queue."""
        self._stop.set()

    def run(self) -> None:
        """Take jobs until `stop`; a database that cannot be reached is tried again."""
        while not self._stop.is_set():
            try:
                job = self.run_once()
            except DatabaseError as error:
                logger.warning("%s; trying again", error)
                job = None
            if job is None:
                self._stop.wait(self.options.poll)

    def run_once(self) -> Job | None:
        """Return dead workers' jobs to the queue, then take one job and finish it; None when the queue is empty."""
        returned = self._store.requeue_stale(self.options.stale)
        if returned:
            logger.warning("%d jobs of workers that gave no sign of life went back to the queue", returned)
        job = self._store.claim(self.options.name, self.options.devices)
        if job is not None:
            self._work_on(job)
        return job

    def _work_on(self, job: Job) -> None:
        logger.info("job %s: %s on %s", job.id, job.workload, job.device)
        try:
            with self._heartbeat(job) as lost:
                record_id = self._tune(job, lost)
        except _Stopped:
            logger.info("job %s goes back to the queue", job.id)
            self._store.release(job.id, self.options.name)
        except _Lost:
            logger.warning("job %s is no longer ours", job.id)
        except DatabaseError:
            raise
        except KernelwrightError as error:
            self._fail(job, str(error))
        except Exception as error:
            logger.exception("job %s failed", job.id)
            self._fail(job, f"{type(error).__name__}: {error}")
        else:
            self._store.finish(job.id, self.options.name, record_id)
            logger.info("job %s is done: record %s", job.id, record_id)

    def _tune(self, job: Job, lost: threading.Event) -> str:
        def on_trial(trial: Trial, progress: Progress) -> None:
            self._store.progress(job.id, self.options.name, progress.trials, progress.budget_trials)
            if lost.is_set():
                raise _Lost
            if self._stop.is_set():
                raise _Stopped

        budget = Budget(job.trials, job.seconds)
        request = TuneRequest(job.workload, job.strategy, budget, job.seed, job.id, self.options.models)
        with contextlib.closing(self._open_runner(job.device)) as runner:
            return tune_and_store(self._store, runner, request, on_trial).record.key

    def _fail(self, job: Job, message: str) -> None:
        logger.warning("job %s failed: %s", job.id, message)
        self._store.fail(job.id, self.options.name, message)

    @contextlib.contextmanager
    def _heartbeat(self, job: Job) -> Iterator[threading.Event]:
        """Give signs of life from a thread; the event is set once the store says that the job is not ours."""
        lost, over = threading.Event(), threading.Event()

        def beat() -> None:
            while not over.wait(self.options.heartbeat):
                try:
                    if not self._store.heartbeat(job.id, self.options.name):
                        lost.set()
                        return
                except DatabaseError as error:
                    logger.warning("no sign of life could be given: %s", error)

        thread = threading.Thread(target=beat, name=f"heartbeat-{job.id}", daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            over.set()
            thread.join()


class Stoppable(Protocol):
    """What a signal can stop."""

    def stop(self) -> None:
        """End soon; called from a signal handler."""
        ...


@contextlib.contextmanager
def stopped_by_signals(worker: Stoppable) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT stop the worker gracefully; only for the main thread."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: worker.stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
