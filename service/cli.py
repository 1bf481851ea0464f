"""The command line: `kernelwright COMMAND`. Exit codes: 0 done, 2 misuse, 1 anything else."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kernelwright.errors import KernelwrightError, UsageError
from kernelwright.service import (
    cli_build,
    cli_data,
    cli_evaluate,
    cli_explain,
    cli_keys,
    cli_model,
    cli_query,
    cli_record,
    cli_refresh,
    cli_service,
    cli_tune,
)
from kernelwright.service.cli_output import to_stderr

app = typer.Typer(
    help="Finds, keeps and serves the fastest correct Triton kernel for an operator, a shape and a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("kernelwright"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


app.command("tune")(cli_tune.tune)
app.command("query")(cli_query.query)
app.command("source")(cli_query.source)
app.command("explain")(cli_explain.explain)
app.command("build")(cli_build.build)
app.command("serve")(cli_service.serve)
app.command("worker")(cli_service.worker)
app.command("devices")(cli_data.devices)
app.command("export")(cli_data.export)
app.command("import")(cli_data.import_)
app.command("refresh")(cli_refresh.refresh_command)
app.command("audit")(cli_keys.audit)
app.command("record")(cli_record.record)
app.command("pack")(cli_record.pack)
app.add_typer(cli_data.db_app, name="db")
app.add_typer(cli_evaluate.evaluate_app, name="evaluate")
app.add_typer(cli_model.model_app, name="model")
app.add_typer(cli_keys.keys_app, name="keys")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit; errors of ours are told in plain words, without a traceback."""
    try:
        app(args=None if argv is None else list(argv), prog_name="kernelwright")
    except KernelwrightError as error:
        to_stderr(f"Error: {error}")
        sys.exit(2 if isinstance(error, UsageError) else 1)


if __name__ == "__main__":
    main()
