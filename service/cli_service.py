"""`kernelwright serve` and `kernelwright worker`: the processes that stay."""

from __future__ import annotations

import functools
import ipaddress
import logging
from collections.abc import Callable
from typing import Annotated

import typer

from kernelwright.db import Job, Store
from kernelwright.search import Runner, open_runner
from kernelwright.service import cli_options as options
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.device_args import parse_device
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.worker import Worker, WorkerOptions, stopped_by_signals

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. [default: 127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", help="Port to listen on. [default: 8765]")]
Once = Annotated[bool, typer.Option("--once", help="Do one job if there is one, then end.")]
Devices = Annotated[list[str] | None, typer.Option("--device", help="Take only jobs for this device; may be repeated.")]


def serve(host: Host = None, port: Port = None, db: options.Database = None) -> None:
    """Serve the REST API; its documentation is at /docs."""
    # Late, so that the other commands start without loading a web framework.
    import uvicorn

    from kernelwright.service.app import create_app

    settings = load_settings(host=host, port=port, db=db)
    if not _is_loopback(settings.host):
        to_stderr(f"Warning: {settings.host} is reachable from other machines, and nothing asks them for a key.")
    uvicorn.run(create_app(settings), host=settings.host, port=settings.port, log_level=settings.log_level)


def worker(once: Once = False, device: Devices = None, db: options.Database = None, json: options.Json = False) -> None:
    """Take tuning jobs from the queue until told to stop; SIGTERM ends it after the present trial."""
    settings = load_settings(db=db)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    with Store.open(settings.db) as store:
        one = Worker(store, _worker_options(settings, device), _opener(settings))
        with stopped_by_signals(one):
            if not once:
                one.run()
                return
            taken = one.run_once()
        job = store.get_job(taken.id) if taken else None
    _tell(job, json)


def _worker_options(settings: Settings, devices: list[str] | None) -> WorkerOptions:
    return WorkerOptions(
        poll=settings.poll_seconds,
        heartbeat=settings.heartbeat_seconds,
        stale=settings.stale_seconds,
        devices=tuple(str(parse_device(text)) for text in devices) if devices else None,
    )


def _opener(settings: Settings) -> Callable[[str], Runner]:
    return functools.partial(open_runner, recorded=settings.recorded)


def _tell(job: Job | None, json: bool) -> None:
    summary = None if job is None else {"id": job.id, "state": job.state.value, "record_id": job.record_id}
    if json:
        print_json({"job": summary})
    elif job is None:
        to_stderr("no job is waiting")
    else:
        typer.echo(f"job {job.id} {job.state.value} {job.record_id or job.message}".rstrip())
    if job is not None and job.state.value == "failed":
        raise typer.Exit(1)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
