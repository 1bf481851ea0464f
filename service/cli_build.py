"""`kernelwright build`: compile the winners of a database before anyone waits for them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from kernelwright.kernels.cores import usable_cores
from kernelwright.kernels.triton_adapter import cache_folder
from kernelwright.service import cli_options as options
from kernelwright.service.building import BUILT, FAILED, HELD, Built, build_winners
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.device_args import device_for_query
from kernelwright.service.opening import open_store
from kernelwright.service.settings import load_settings

Processes = Annotated[int | None, typer.Option("--processes", min=1, help="How many compile. [default: a core each]")]


def build(
    operator: options.MaybeOperator = None,
    hardware: options.Hardware = None,
    device: options.QueryDevice = None,
    processes: Processes = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Compile the winners for a GPU into Triton's cache (TRITON_CACHE_DIR), such as that of a container image; needs
    no GPU."""
    spec = device_for_query(hardware, device)
    with open_store(load_settings(db=db)) as store:
        records = store.records(operator, spec.key, limit=None)
    done = build_winners(records, processes or usable_cores(), _tell)
    counts = {BUILT: 0, HELD: 0, FAILED: 0} | Counter(one.outcome for one in done)
    if json:
        failed = [{"workload": str(one.record.workload), "why": one.detail} for one in done if one.outcome == FAILED]
        print_json({**counts, "cache": str(cache_folder()), "failures": failed})
    else:
        typer.echo(f"{', '.join(f'{count} {outcome}' for outcome, count in counts.items())} in {cache_folder()}")
    if counts[FAILED]:
        raise typer.Exit(1)


def _tell(one: Built) -> None:
    if one.outcome != HELD:
        to_stderr(f"{one.outcome}: {one.record.workload}{': ' + one.detail if one.detail else ''}")
