"""Make the record sets that ship with the package out of the recorded trials: run `python benchmarks/make_pretuned.py`.

Of each recorded workload the winner among all its trials is crowned as a search would do it, with the times of the
recorded final rounds where there are any. Equal recordings give equal files.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from kernelwright.db import Store, export_archive
from kernelwright.errors import NoWorkingSchedule
from kernelwright.search import Budget, ReplayRunner, Session, load_recorded, make_strategy
from kernelwright.search.recorded import recorded_devices, recorded_folder
from kernelwright.types import Trial, TuningRecord, Workload

ORIGIN = "pretuned"
CHECK = "check"
FOLDER = Path(__file__).resolve().parents[1] / "db" / "pretuned_sets"


def crowned(trials: list[Trial]) -> Iterator[TuningRecord]:
    """A record for each workload that these trials of one device hold, moments taken from the trials."""
    runner = ReplayRunner(trials, trials[0].device)
    for workload in sorted(runner.workloads, key=str):
        last = max(trial.measured_at for trial in trials if trial.workload == workload)
        try:
            yield dataclasses.replace(_winner(runner, workload), origin=ORIGIN, created_at=last)
        except NoWorkingSchedule:
            continue


def make(slug: str, folder: Path = FOLDER) -> int:
    """Write the set of one recorded device; how many records it has."""
    paths = sorted((recorded_folder() / slug).glob("*.parquet"))
    # a check reads each time once, and not in turns with the vendor call
    trials = [trial for path in paths for trial in load_recorded(path) if trial.origin != CHECK]
    with Store.open("sqlite://") as store:
        for record in crowned(trials):
            store.put_winner(record)
        return export_archive(store, folder / f"{slug}.jsonl.gz").records


def _winner(runner: ReplayRunner, workload: Workload) -> TuningRecord:
    space = runner.space(workload)
    strategy = make_strategy("exhaustive", workload, runner.device, space, 0)
    session = Session(workload, runner, strategy, Budget(trials=len(space)), batch=len(space))
    for _ in session:
        pass
    return session.record


def main() -> None:
    """Make the sets of the devices named, by default of every recorded one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slug", nargs="*", default=recorded_devices())
    for slug in parser.parse_args().slug:
        print(f"{slug}: {make(slug)} records")


if __name__ == "__main__":
    main()
