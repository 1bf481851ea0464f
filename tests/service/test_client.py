"""The Python client, against the real app without a socket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kernelwright.db import Store
from kernelwright.errors import ServiceError, UsageError
from kernelwright.service.client import Client
from kernelwright.service.schemas import JobOut
from kernelwright.service.settings import Settings
from kernelwright.service.worker import Worker, WorkerOptions
from kernelwright.service.workload_args import WorkloadArgs


def test_submit_wait_and_best(
    client: Client, store: Store, open_recorded: Callable[[str], Any], args: WorkloadArgs
) -> None:
    job = client.submit(args, "replay:h100", strategy="random", trials=8, seed=3)
    assert (job.state, job.trials, job.seed) == ("queued", 8, 3)
    seen: list[JobOut] = []
    thread = threading.Thread(target=Worker(store, WorkerOptions(), open_recorded).run_once)
    thread.start()
    done = client.wait(job.id, timeout=30, poll=0.02, on_progress=seen.append)
    thread.join()
    assert done.state == "done" and done.record_id is not None
    best = client.best(args, "h100")
    assert best.record_id == done.record_id and best.how == "measured"
    assert client.source(done.record_id) == client.source(done.record_id)
    assert "import triton" in client.best_source(args, "h100")
    assert client.health().records == 1


@pytest.mark.usefixtures("no_gpu")
def test_devices(client: Client) -> None:
    assert {"h100", "l4"} <= {device.slug for device in client.devices()}


def test_failed_job_raises_its_message(client: Client, store: Store, args: WorkloadArgs) -> None:
    job = client.submit(args, "replay:h100")
    store.claim("one")
    store.fail(job.id, "one", "no luck")
    with pytest.raises(ServiceError, match="failed: no luck"):
        client.wait(job.id)


def test_waiting_ends(client: Client, args: WorkloadArgs) -> None:
    job = client.submit(args, "replay:h100")
    with pytest.raises(ServiceError, match="still queued after 0"):
        client.wait(job.id, timeout=0.05, poll=0.02)


def test_misuse(client: Client, args: WorkloadArgs) -> None:
    with pytest.raises(ServiceError, match="404: device must be one of"):
        client.best(args, "h1000")
    with pytest.raises(ServiceError, match="404: no record has the id"):
        client.source("no-such")
    with pytest.raises(ServiceError, match="404"):
        client.source("../jobs")
    with pytest.raises(UsageError, match="trials"):
        client.submit(args, "cuda", trials=0)


@pytest.mark.parametrize("url", ["", "no url at all", "localhost:8765", "ftp://localhost", "http://", "http://[::"])
def test_address_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="must be a URL such as http"):
        Client(url)


def test_nobody_there(args: WorkloadArgs) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        Client(transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(ServiceError, match="kernelwright serve"),
    ):
        client.best(args, "h100")


@pytest.mark.parametrize("answer", [httpx.Response(200, text="<html>"), httpx.Response(502, text="bad gateway")])
def test_somebody_else_there(answer: httpx.Response, args: WorkloadArgs) -> None:
    with Client(transport=httpx.MockTransport(lambda request: answer)) as client, pytest.raises(ServiceError):
        client.best(args, "h100")


def test_default_address_is_where_serve_listens() -> None:
    settings = Settings()
    assert Client().url == f"http://{settings.host}:{settings.port}"
