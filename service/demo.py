"""`kernelwright serve --demo`: a service on a database of its own, filled with what ships, and a worker."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from kernelwright.db import JobRequest, Store
from kernelwright.db.pretuned import load_pretuned
from kernelwright.search import ReplayRunner, Runner, load_recorded, open_runner
from kernelwright.search.recorded import recorded_devices, recorded_folder
from kernelwright.service.settings import Settings
from kernelwright.service.worker import Worker, WorkerOptions
from kernelwright.types import DeviceSpec, Measurement, Schedule, Trial, Workload

PACE = 0.08
"""Seconds that a replayed trial takes, so that a job can be watched."""

POLL = 0.3
LEFT_OUT = 8
"""Of every so many recorded workloads one has no trials yet."""

FIRST_JOB_TRIALS = 64

logger = logging.getLogger(__name__)


class PacedRunner(ReplayRunner):
    """A replay that takes its time over each trial."""

    def __init__(self, trials: Sequence[Trial], device: DeviceSpec, pace: float = PACE) -> None:
        super().__init__(trials, device)
        self._pace = pace

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """As the replay, more slowly."""
        for schedule, measurement in super().measure(workload, schedules, deadline):
            time.sleep(self._pace)
            yield schedule, measurement


@contextlib.contextmanager
def demonstration(settings: Settings, pace: float = PACE) -> Iterator[Settings]:
    """Settings of a service on a new database, which is deleted afterwards.

    The winners are there at once; recorded trials are added while it serves, but for some workloads, which are left to
    be tuned: one of them is in the queue from the start.
    """
    with tempfile.TemporaryDirectory(prefix="kernelwright-demo-") as folder:
        url = f"sqlite:///{folder}/demo.db"
        with Store.open(url) as store:
            logger.info("demo: %d winners in %s", load_pretuned(store), url)
            worker = Worker(store, WorkerOptions(poll=POLL), lambda spec: _paced(settings, spec, pace))
            thread = threading.Thread(target=_fill_and_work, args=(settings, store, worker), name="demo", daemon=True)
            thread.start()
            try:
                yield settings.model_copy(update={"db": url, "pretuned": False})
            finally:
                worker.stop()
                thread.join()


def _fill_and_work(settings: Settings, store: Store, worker: Worker) -> None:
    for slug in recorded_devices(settings.recorded):
        trials = _recorded(settings, slug)
        left = list(dict.fromkeys(trial.workload for trial in trials))[::LEFT_OUT]
        store.submit(JobRequest(left[0], f"replay:{slug}", trials=FIRST_JOB_TRIALS))
        added = store.add_trials(trial for trial in trials if trial.workload not in left)
        logger.info("demo: %d recorded trials of %s, %d workloads left to tune", added, slug, len(left))
    worker.run()


def _recorded(settings: Settings, slug: str) -> list[Trial]:
    paths = sorted(((settings.recorded or recorded_folder()) / slug).glob("*.parquet"))
    return [trial for path in paths for trial in load_recorded(path)]


def _paced(settings: Settings, spec: str, pace: float) -> Runner:
    slug = spec.removeprefix("replay:")
    if slug not in recorded_devices(settings.recorded):
        return open_runner(spec, recorded=settings.recorded)
    trials = _recorded(settings, slug)
    return PacedRunner(trials, trials[0].device, pace)
