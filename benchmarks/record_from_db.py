"""Add what was tuned into a database to the recordings: python benchmarks/record_from_db.py sqlite:///tuned.db

Every trial joins `benchmarks/recorded/<gpu>/<operator>.parquet`, and of each record the winner and the vendor call as
they were timed in turns in its final round. What is there already is not added again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from kernelwright.db import Store
from kernelwright.search.recorded import recorded_folder, save_recorded, vendor_trial
from kernelwright.search.recording_files import RecordingFolder
from kernelwright.types import Trial, TuningRecord

FINAL = "tune:final"


def final_trials(record: TuningRecord) -> Iterator[Trial]:
    """The winner and, where there is one, the vendor call of a record's final round."""
    yield Trial(
        record.workload,
        record.device,
        record.toolchain,
        record.schedule,
        record.measurement,
        FINAL,
        record.template_fingerprint,
        record.created_at,
    )
    vendor = vendor_trial(record)
    if vendor is not None:
        yield dataclasses.replace(vendor, origin=FINAL)


def add(url: str, folder: Path) -> dict[str, int]:
    """Put a database's trials and finals into the recordings under `folder`; how many each file then holds."""
    found: dict[tuple[str, str], list[Trial]] = {}
    with Store.open(url) as store:
        finals = (trial for record in store.records(limit=None) for trial in final_trials(record))
        for trial in (*store.trials(), *finals):
            found.setdefault((trial.device.slug, trial.workload.operator), []).append(trial)
    recordings = RecordingFolder(folder)
    counts = {}
    for (slug, operator), trials in found.items():
        merged = {trial.key: trial for trial in (*recordings.known(slug, operator), *trials)}
        path = recordings.path(slug, operator)
        counts[f"{slug}/{operator}"] = save_recorded(merged.values(), path)
    return counts


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", nargs="+", help="database URLs, such as sqlite:///tuned.db")
    parser.add_argument("--folder", type=Path, default=recorded_folder())
    args = parser.parse_args()
    for url in args.url:
        for name, count in add(url, args.folder).items():
            print(f"{name}: {count} trials")


if __name__ == "__main__":
    main()
