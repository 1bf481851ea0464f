"""`kernelwright devices`, `export`, `import` and `db`: what there is, and carrying it elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from kernelwright import db as database
from kernelwright.kernels.device import named_device
from kernelwright.service import cli_options as options
from kernelwright.service.catalog import list_devices
from kernelwright.service.cli_output import print_devices, print_json
from kernelwright.service.schemas import DeviceList
from kernelwright.service.settings import load_settings

Operator = Annotated[str | None, typer.Option("--operator", help="Only this operator.")]

db_app = typer.Typer(help="Look after the database.", no_args_is_help=True)


def devices(json: options.Json = False) -> None:
    """List the GPUs that have a name, which are here, and which can be replayed."""
    found = list_devices(load_settings().recorded, look=True)
    if json:
        print_json(DeviceList(devices=found))
    else:
        print_devices(found)


def export(
    file: Annotated[Path, typer.Argument(help="File to write; .gz compresses it.")],
    operator: Operator = None,
    hardware: options.Hardware = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Write trials and records to a file that `import` reads."""
    device_key = None if hardware is None else named_device(hardware).key
    with database.Store.open(load_settings(db=db).db) as store:
        counts = database.export_archive(store, file, operator, device_key)
    if json:
        print_json({"file": str(file), **dataclasses.asdict(counts)})
    else:
        typer.echo(f"wrote {counts.trials} trials and {counts.records} records to {file}")


def import_(
    file: Annotated[Path, typer.Argument(help="File that `export` wrote.")],
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Merge a file into the database; what is there already is not added again."""
    with database.Store.open(load_settings(db=db).db) as store:
        counts = database.import_archive(store, file)
    if json:
        print_json({"file": str(file), **dataclasses.asdict(counts)})
    else:
        typer.echo(f"added {counts.trials} trials and {counts.records} records from {file}")


@db_app.command("upgrade")
def upgrade(db: options.Database = None, json: options.Json = False) -> None:
    """Bring the database's schema up to this release; what is stored stays."""
    before, after = database.upgrade(load_settings(db=db).db)
    if json:
        print_json({"before": before, "after": after})
    elif before == after:
        typer.echo(f"the database is up to date, schema {after}")
    else:
        typer.echo(f"upgraded the database from {before or 'empty'} to schema {after}")
