"""`kernelwright devices`, `export`, `import` and `db`: what there is, carrying it elsewhere and letting go of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from kernelwright import db as database
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.service import cli_options as options
from kernelwright.service.catalog import list_devices
from kernelwright.service.cli_output import print_devices, print_json, to_stderr
from kernelwright.service.schemas import DeviceList
from kernelwright.service.settings import load_settings
from kernelwright.service.tool_exports import TOOL_FORMATS, tool_files
from kernelwright.types import TuningRecord

ARCHIVE_FORMATS = ("jsonl", "parquet")

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help=f"{' or '.join(ARCHIVE_FORMATS)} (default: as the name ends); for other tools {', '.join(TOOL_FORMATS)}.",
    ),
]

db_app = typer.Typer(help="Look after the database.", no_args_is_help=True)


def devices(json: options.Json = False) -> None:
    """List the GPUs that have a name, which are here, and which can be replayed."""
    found = list_devices(load_settings().recorded, look=True)
    if json:
        print_json(DeviceList(devices=found))
    else:
        print_devices(found)


def export(
    file: Annotated[Path, typer.Argument(help="File to write, or the folder for formats of other tools.")],
    form: Format = None,
    operator: options.MaybeOperator = None,
    hardware: options.Hardware = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Write trials and records to a file that `import` reads, or winners as files that other tools read."""
    settings = load_settings(db=db)
    device_key = None if hardware is None else named_device(hardware).key
    with database.Store.open(settings.db) as store:
        if form is not None and form in TOOL_FORMATS:
            _export_for_tool(file, form, store.records(operator, device_key, limit=None, trusted=True), json)
            return
        path = _archive_path(file, form)
        counts = database.export_archive(store, path, operator, device_key, key=settings.share_key)
    if json:
        print_json({"file": str(path), "trials": counts.trials, "records": counts.records, "signed": counts.trusted})
    else:
        signed = ", signed" if counts.trusted else ""
        typer.echo(f"wrote {counts.trials} trials and {counts.records} records to {path}{signed}")


def import_(
    file: Annotated[Path, typer.Argument(help="File that `export` wrote.")],
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Merge a file into the database; what is there already is not added again."""
    settings = load_settings(db=db)
    with database.Store.open(settings.db) as store:
        counts = database.import_archive(store, file, key=settings.share_key)
        store.audit("cli", "import", file.name, f"{counts.trials} trials, {counts.records} records")
    if json:
        print_json({"file": str(file), **dataclasses.asdict(counts)})
    else:
        typer.echo(f"added {counts.trials} trials and {counts.records} records from {file}")
        if not counts.trusted:
            to_stderr("No valid signature: they count as stale until `kernelwright refresh` measured them here.")


def _archive_path(file: Path, form: str | None) -> Path:
    if form not in (None, *ARCHIVE_FORMATS):
        listed = ", ".join((*ARCHIVE_FORMATS, *TOOL_FORMATS))
        raise UsageError(f"--format must be one of {listed}, got {form!r}")
    if form is not None and (file.suffix == ".parquet") is not (form == "parquet"):
        raise UsageError(
            f"a file of format {form} must {'' if form == 'parquet' else 'not '}end in .parquet, got {file}"
        )
    return file


def _export_for_tool(folder: Path, form: str, records: list[TuningRecord], json: bool) -> None:
    made = tool_files(form, records)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}; choose another folder") from error
    if json:
        files = sorted(made.files)
        print_json({"folder": str(folder), "files": files, "written": made.written, "left_out": made.left_out})
    else:
        typer.echo(f"wrote {made.written} winners to {len(made.files)} files in {folder}")
        if made.left_out:
            to_stderr(f"{made.left_out} winners left out, which the format {form} cannot say.")


@db_app.command("prune")
def prune(
    sample: Annotated[int, typer.Option("--sample", min=0, help="Trials to keep of each workload for training.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the sample; the same seed keeps the same ones.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Remove trials: winners, Pareto points, trials of running jobs and a sample stay; records all stay."""
    with database.Store.open(load_settings(db=db).db) as store:
        done = database.prune(store, sample, seed, dry_run=dry_run)
    if json:
        print_json({"dry_run": dry_run, **dataclasses.asdict(done)})
    else:
        kept = f"{done.winners} of winners, {done.pareto} Pareto points, {done.running} of running jobs"
        would = "would remove" if dry_run else "removed"
        typer.echo(f"{would} {done.removed} of {done.trials} trials; kept {kept}, {done.sample} as a sample")


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
