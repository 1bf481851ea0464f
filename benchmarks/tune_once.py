"""One tuning in a fresh process, as `kernelwright tune` does it: nothing is imported that a tuning does not need.

    python benchmarks/tune_once.py '{"workload": {...}, "trials": 24, "timeline": false}'

The last line of its output is JSON: when the record was stored (time.monotonic is the machine's, the same in every
process) and what won.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from kernelwright.kernels.steps import Collector
from kernelwright.search.child_runner import ChildRunner


def one(job: Mapping[str, Any]) -> None:
    """Tune and tell."""
    began = time.monotonic()
    collector = Collector()
    if job.get("timeline"):
        collector.attach()
    runner = ChildRunner()
    # while the processes start
    from kernelwright.db import Store
    from kernelwright.search import Budget
    from kernelwright.service.tuning import TuneRequest, tune_and_store
    from kernelwright.types import Workload

    request = TuneRequest(Workload.from_json(job["workload"]), "model", Budget(job["trials"]), 0)
    with Store.open("sqlite://") as store:
        result = tune_and_store(store, runner, request, lambda trial, progress: None)
    told = {"stored_at": time.monotonic(), "schedule": result.record.schedule.to_json()}
    steps = [dataclasses.asdict(step) for step in collector.take()]
    print(json.dumps({**told, "began": began, "process": os.getpid(), "steps": steps}), flush=True)
    runner.close()


if __name__ == "__main__":
    one(json.loads(sys.argv[1]))
