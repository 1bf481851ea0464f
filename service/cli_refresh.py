"""`kernelwright refresh`: measure again what may no longer hold."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Annotated

import typer

from kernelwright.db import Store
from kernelwright.search import open_runner
from kernelwright.service import cli_options as options
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.refreshing import Refreshed, refresh
from kernelwright.service.settings import load_settings

Device = Annotated[str, typer.Option("--device", help="Where to measure: cuda (the GPU here), cuda:1, replay:h100.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Measure at most so many, the most used first.")]


def refresh_command(
    limit: Limit = None, device: Device = "cuda", db: options.Database = None, json: options.Json = False
) -> None:
    """Measure stale and untrusted winners of a GPU again, most used first; bad ones go into quarantine."""
    settings = load_settings(db=db)
    opened = contextlib.closing(open_runner(device, recorded=settings.recorded))
    with opened as runner, Store.open(settings.db) as store:
        done = refresh(store, runner, limit, _tell)
    counts = {"measured": 0, "quarantined": 0, "skipped": 0} | Counter(one.outcome for one in done)
    if json:
        print_json({**counts, "records": [_out(one) for one in done]})
    else:
        typer.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def _tell(one: Refreshed) -> None:
    to_stderr(f"{one.outcome}: {one.record.workload}, {one.why or 'stale'}{'; ' + one.detail if one.detail else ''}")


def _out(one: Refreshed) -> dict[str, object]:
    return {
        "record_id": one.record.key,
        "workload": str(one.record.workload),
        "outcome": one.outcome,
        "why": one.why,
        "detail": one.detail,
        "new_record_id": one.now.key if one.now else None,
        "before_us": one.record.measurement.median_us,
        "after_us": one.now.measurement.median_us if one.now else None,
    }
