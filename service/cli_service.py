"""`kernelwright serve` and `kernelwright worker`: the processes that stay."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from kernelwright.db import Job, Store
from kernelwright.errors import UsageError
from kernelwright.search import Runner, open_runner
from kernelwright.service import cli_options as options
from kernelwright.service.cli_fleet import Where, open_fleet
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.crew import Crew
from kernelwright.service.demo import demonstration
from kernelwright.service.device_args import parse_device
from kernelwright.service.logs import configure_logs
from kernelwright.service.loopback import is_loopback
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.worker import Worker, WorkerOptions, stopped_by_signals

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. [default: 127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", help="Port to listen on. [default: 8765]")]
Once = Annotated[bool, typer.Option("--once", help="Do one job if there is one, then end.")]
Devices = Annotated[list[str] | None, typer.Option("--device", help="Take only jobs for this device; may be repeated.")]
InsecureOpen = Annotated[
    bool | None, typer.Option("--insecure-open", help="Listen for other machines although nothing asks for a key.")
]
Certificate = Annotated[
    Path | None, typer.Option("--tls-certificate", help="PEM file with the certificate chain; speaks TLS.")
]
PrivateKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file with the certificate's private key.")]
Demo = Annotated[
    bool, typer.Option("--demo", help="Serve the recorded trials from a new database, with a worker; nothing is kept.")
]

SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter: one that asks the cost model must not hold up the others' answers."""


def serve(
    host: Host = None,
    port: Port = None,
    db: options.Database = None,
    insecure_open: InsecureOpen = None,
    tls_certificate: Certificate = None,
    tls_key: PrivateKey = None,
    demo: Demo = False,
) -> None:
    """Serve the REST API and the pages at /; the API's documentation is at /docs."""
    # Late, so that the other commands start without loading a web framework.
    from kernelwright.service.app import create_app

    settings = load_settings(
        host=host, port=port, db=db, insecure_open=insecure_open, tls_certificate=tls_certificate, tls_key=tls_key
    )
    if demo and db is not None:
        raise UsageError("--demo makes a database of its own, so --db must be left out")
    refuse_open(settings)
    configure_logs(settings.log_level, settings.log_format)
    with _unwound_by_sigterm(), demonstration(settings) if demo else contextlib.nullcontext(settings) as used:
        _serve(used, create_app(used))


@contextlib.contextmanager
def _unwound_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is an exception, so that what was made is deleted. uvicorn sends the signal again at its end."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(settings: Settings, app: FastAPI) -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    # What is there now stays: not looking through it again at each collection spares answers that take 50 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    _server(settings, app).run()


def refuse_open(settings: Settings) -> None:
    """UsageError when other machines could reach a service that asks for no key, unless that is wished for."""
    if is_loopback(settings.host) or settings.require_keys:
        return
    with Store.open(settings.db) as store:
        if store.list_keys():
            return
    if not settings.insecure_open:
        raise UsageError(
            f"{settings.host} is reachable from other machines, and no key was made yet; make one with `kernelwright "
            "keys create`, set KERNELWRIGHT_REQUIRE_KEYS=true, or let everybody in with --insecure-open"
        )
    to_stderr(f"Warning: {settings.host} is reachable from other machines, and nothing asks them for a key.")


def _server(settings: Settings, app: FastAPI) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """Tells the streams to end as soon as a signal comes, so that they do not hold up the end of the process."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.shared.stopping.set()
            super().handle_exit(sig, frame)

    return Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=settings.forwarded_allow_ips,
            timeout_graceful_shutdown=settings.shutdown_seconds,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
    )


def worker(
    once: Once = False,
    device: Devices = None,
    runner: options.RunnerName = "local",
    address: options.Address = None,
    devices: options.DeviceCount = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Take tuning jobs from the queue until told to stop; SIGTERM ends it after the present trial.

    With --runner ray or --devices, as many jobs at once as there are devices of the kind that --device names.
    """
    settings = load_settings(db=db)
    configure_logs(settings.log_level, settings.log_format)
    if runner != "local" or devices is not None:
        if once:
            raise UsageError("--once is for a worker of one device; leave it out with --runner ray or --devices")
        _work_with(settings, Where(",".join(device or ["cuda"]), runner, address, devices), device)
        return
    with Store.open(settings.db) as store:
        one = Worker(store, _worker_options(settings, device), _opener(settings))
        with stopped_by_signals(one):
            if not once:
                one.run()
                return
            taken = one.run_once()
        job = store.get_job(taken.id) if taken else None
    _tell(job, json)


def _work_with(settings: Settings, where: Where, devices: list[str] | None) -> None:
    """Feed a fleet from the queue until a signal comes."""
    with Store.open(settings.db) as store, open_fleet(where, settings) as (fleet, builders):
        crew = Crew(store, fleet, builders, _worker_options(settings, devices))
        with stopped_by_signals(crew):
            crew.run()


def _worker_options(settings: Settings, devices: list[str] | None) -> WorkerOptions:
    return WorkerOptions(
        poll=settings.poll_seconds,
        heartbeat=settings.heartbeat_seconds,
        stale=settings.stale_seconds,
        devices=tuple(str(parse_device(text)) for text in devices) if devices else None,
        models=settings.models,
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
