"""The queue feeds a fleet: jobs side by side, each once, stopped as one worker is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelwright.db import JobRequest, JobState, Store
from kernelwright.errors import UnknownDevice
from kernelwright.search.fleet import Fleet
from kernelwright.search.local_fleet import local_fleet
from kernelwright.service.crew import Crew
from kernelwright.service.worker import WorkerOptions
from kernelwright.service.workload_args import WorkloadArgs
from tests.service.command_line import CommandLine

OPTIONS = WorkerOptions(poll=0.01, heartbeat=0.05)


@pytest.fixture
def fleet(recorded: Path) -> Iterator[Fleet]:
    made, _ = local_fleet("replay:h100", 3, recorded=recorded)
    yield made
    made.close()


def test_every_job_is_done_once_and_all_workers_stop(store: Store, fleet: Fleet, args: WorkloadArgs) -> None:
    specs = ("replay:h100", "h100", "cuda")
    jobs = [store.submit(JobRequest(args.workload(), spec, "random", trials=8, seed=n)) for n, spec in enumerate(specs)]
    crew = Crew(store, fleet, None, OPTIONS)
    thread = threading.Thread(target=crew.run)
    thread.start()
    end = time.monotonic() + 30
    while time.monotonic() < end and store.count_jobs()["done"] < len(jobs):
        time.sleep(0.02)
    crew.stop()
    thread.join(10)
    assert not thread.is_alive()
    seen = [found for job in jobs if (found := store.get_job(job.id)) is not None]
    assert [(job.state, job.attempts) for job in seen] == [(JobState.DONE, 1)] * 3


def test_a_device_that_the_fleet_has_not(store: Store, fleet: Fleet) -> None:
    crew = Crew(store, fleet, None, OPTIONS)
    for spec in ("replay:b200", "cuda:1", "l4:0"):
        with pytest.raises(UnknownDevice):
            crew.open(spec)


def test_once_is_for_one_device(cli: CommandLine) -> None:
    code, _, err = cli.run("worker", "--once", "--devices", "2")
    assert code == 2 and "--once is for a worker of one device" in err
