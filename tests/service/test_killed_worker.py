"""A worker process that is killed outright loses no stored trial, and its job goes on elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernelwright.db import JobRequest, JobState, Store
from kernelwright.service.worker import Worker, WorkerOptions
from kernelwright.service.workload_args import WorkloadArgs

KILLED_AT_FIFTH = """
import itertools, os, signal, sys
from pathlib import Path
from kernelwright.db import Store
from kernelwright.search import open_runner
from kernelwright.service.worker import Worker, WorkerOptions

def open_doomed(spec):
    runner = open_runner(spec, recorded=Path(sys.argv[2]))
    measure, count = runner.measure, itertools.count(1)
    def doomed(*given):
        for pair in measure(*given):
            if next(count) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair
    runner.measure = doomed
    return runner

Worker(Store.open(sys.argv[1]), WorkerOptions(name="doomed"), open_doomed).run_once()
"""


def test_killed_process_loses_nothing(
    store: Store, db_url: str, recorded: Path, open_recorded: Any, args: WorkloadArgs
) -> None:
    job = store.submit(JobRequest(args.workload(), "replay:h100", "random", trials=12))
    command = [sys.executable, "-c", KILLED_AT_FIFTH, db_url, str(recorded)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = store.get_job(job.id)
    assert left is not None and (left.state, left.worker, left.done) == (JobState.RUNNING, "doomed", 4)
    assert len(list(store.trials_of_job(job.id))) == 4

    time.sleep(0.05)
    Worker(store, WorkerOptions(name="heir", stale=0.02), open_recorded).run_once()
    finished = store.get_job(job.id)
    assert finished is not None and (finished.state, finished.worker) == (JobState.DONE, "heir")
    assert len({trial.schedule for trial in store.trials_of_job(job.id)}) == 12
