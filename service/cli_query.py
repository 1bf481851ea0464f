"""`kernelwright query` and `kernelwright source`: ask a database or a service for the best kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.service import cli_options as options
from kernelwright.service.answer_json import tell
from kernelwright.service.answering import Answers, source_of_answer, source_of_record
from kernelwright.service.cli_output import print_best, print_json, to_stderr
from kernelwright.service.client import Client
from kernelwright.service.device_args import device_for_query, parse_device
from kernelwright.service.missing import NotFound
from kernelwright.service.opening import open_store
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import DeviceSpec, Toolchain

Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the file here instead of printing it.")]


def query(
    operator: Annotated[str, typer.Argument(help="Name of the operator, such as matmul.")],
    shape: options.Shape,
    dtype: options.Dtype = "bf16",
    layout: options.Layout = "",
    epilogue: options.Epilogue = "",
    out_dtype: options.OutDtype = None,
    error_budget: options.ErrorBudget = None,
    attributes: options.Attributes = "",
    hardware: options.Hardware = None,
    device: options.QueryDevice = None,
    db: options.Database = None,
    url: options.Url = None,
    json: options.Json = False,
) -> None:
    """Print the best kernel that is known for a workload on a GPU, and how it is known."""
    args = options.workload_args(operator, shape, dtype, layout, epilogue, out_dtype, error_budget, attributes)
    args.workload()
    settings, spec = settings_for(db, url), device_for_query(hardware, device)
    if settings.url is not None:
        with Client(settings.url, settings.timeout, key=settings.api_key) as client:
            best = client.best(args, spec.slug)
    else:
        best = tell(local_answer(settings, args, spec, toolchain_for(hardware, device)))
    if json:
        print_json(best)
    else:
        print_best(best)


def source(
    target: Annotated[str, typer.Argument(help="Id of a record, or with --shape the name of an operator.")],
    shape: options.MaybeShape = None,
    dtype: options.Dtype = "bf16",
    layout: options.Layout = "",
    epilogue: options.Epilogue = "",
    out_dtype: options.OutDtype = None,
    error_budget: options.ErrorBudget = None,
    attributes: options.Attributes = "",
    hardware: options.Hardware = None,
    device: options.QueryDevice = None,
    output: Output = None,
    db: options.Database = None,
    url: options.Url = None,
    json: options.Json = False,
) -> None:
    """Print a kernel as a Python file that needs only torch and triton."""
    settings = settings_for(db, url)
    if shape is None:
        text = record_source(settings, target)
    else:
        args = options.workload_args(target, shape, dtype, layout, epilogue, out_dtype, error_budget, attributes)
        args.workload()
        spec = device_for_query(hardware, device)
        text = best_source(settings, args, spec, toolchain_for(hardware, device))
    _deliver(text, output, json)


def settings_for(db: str | None, url: str | None) -> Settings:
    """Settings whose `url` says whether to ask a service: what is typed counts before the environment."""
    if db is not None and url is not None:
        raise UsageError("--db and --url cannot both be given; ask either a database or a service")
    settings = load_settings(db=db, url=url)
    return settings.model_copy(update={"url": None}) if db is not None else settings


def toolchain_for(hardware: str | None, device: str | None) -> Toolchain | None:
    """The software of this machine when the question is about the GPU here, else None, which takes any."""
    if hardware is not None or (device is not None and parse_device(device).replay is not None):
        return None
    return current_toolchain(TIMER_VERSION)


def local_answer(settings: Settings, args: WorkloadArgs, device: DeviceSpec, toolchain: Toolchain | None) -> Answer:
    """The answer from the database."""
    with open_store(settings) as store:
        return Answers(store, settings.models).best(args.workload(), device, toolchain)


def record_source(settings: Settings, record_id: str) -> str:
    """A record's kernel, from the service or the database."""
    if settings.url is not None:
        with Client(settings.url, settings.timeout, key=settings.api_key) as client:
            return client.source(record_id)
    with Store.open(settings.db) as store:
        record = store.get_record(record_id)
    if record is None:
        raise NotFound(f"no record has the id {record_id!r}; for an operator's best kernel give --shape as well")
    return source_of_record(record)


def best_source(settings: Settings, args: WorkloadArgs, device: DeviceSpec, toolchain: Toolchain | None) -> str:
    """The best kernel for a workload, from the service or the database."""
    if settings.url is not None:
        with Client(settings.url, settings.timeout, key=settings.api_key) as client:
            return client.best_source(args, device.slug)
    return source_of_answer(local_answer(settings, args, device, toolchain))


def _deliver(text: str, output: Path | None, json: bool) -> None:
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror or error}; choose another path") from error
        to_stderr(f"wrote {output}")
    if json:
        print_json({"source": text, "file": None if output is None else str(output)})
    elif output is None:
        typer.echo(text, nl=False)
