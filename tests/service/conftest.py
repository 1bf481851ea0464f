"""A recorded H100 that takes no time, a database of its own for each test, and the app served without a socket."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kernelwright.db import Store
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.search import ReplayRunner, open_runner, save_recorded
from kernelwright.service.app import create_app
from kernelwright.service.client import Client
from kernelwright.service.settings import Settings
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import DeviceSpec, FrozenMap, Measurement, Schedule, Status, Toolchain, Trial, Workload
from tests.service.command_line import CommandLine

TOOLCHAIN = Toolchain(triton="3.7.1", torch="2.13.0", driver="580.1", compiler="ptxas 12.9.86", timer=1)

VENDOR_US = 200.0


class AppTransport(httpx.BaseTransport):
    """Calls an ASGI app in the process; faults come back as the answers that the app gives to them."""

    def __init__(self, app: FastAPI) -> None:
        self._inner = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        whole = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())

        async def call() -> httpx.Response:
            answer = await self._inner.handle_async_request(whole)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return asyncio.run(call())


def synthetic_trials(workload: Workload, device: DeviceSpec, count: int = 40) -> list[Trial]:
    """Trials of different schedules, most faster than the vendor call, some failed, in an order drawn once."""
    operator = get_operator(workload.operator)
    schedules = operator.space(workload, device).sample(random.Random(7), count)
    out = []
    for number, schedule in enumerate(schedules):
        failed = number % 10 == 9
        seen = (
            Measurement(Status.OUT_OF_RESOURCES, message="too much shared memory")
            if failed
            else Measurement(Status.OK, 100.0 + 3 * number, error=1e-3, registers=128, spills=0, shared_bytes=65536)
        )
        print_of = operator.templates[schedule.template].fingerprint
        moment = f"2026-01-01T00:00:{number:02d}+00:00"
        out.append(Trial(workload, device, TOOLCHAIN, schedule, seen, "record", print_of, moment))
    call = Schedule("vendor", FrozenMap({"call": "torch.mm"}))
    seen = Measurement(Status.OK, VENDOR_US)
    out.append(Trial(workload, device, TOOLCHAIN, call, seen, "record", "", "2026-01-01T00:01:00+00:00"))
    return out


@pytest.fixture(scope="session")
def args() -> WorkloadArgs:
    return WorkloadArgs("matmul", {"M": 2048, "N": 4096, "K": 4096})


@pytest.fixture(scope="session")
def device() -> DeviceSpec:
    return named_device("h100")


@pytest.fixture(scope="session")
def trials(args: WorkloadArgs, device: DeviceSpec) -> list[Trial]:
    return synthetic_trials(args.workload(), device)


@pytest.fixture(scope="session")
def recorded(trials: list[Trial], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    save_recorded(trials, folder / "h100" / "matmul.parquet")
    return folder


@pytest.fixture
def runner(trials: list[Trial], device: DeviceSpec) -> ReplayRunner:
    return ReplayRunner(trials, device)


@pytest.fixture(scope="session")
def empty_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database, made once: running the migrations takes longer than a test."""
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def db_url(empty_db: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_db, tmp_path / 'tuning.db')}"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the import of torch, which looking for GPUs takes."""
    monkeypatch.setattr("kernelwright.service.catalog.gpu_count", lambda: 0)


@pytest.fixture
def store(db_url: str) -> Iterator[Store]:
    with Store.open(db_url) as opened:
        yield opened


@pytest.fixture
def settings(db_url: str, recorded: Path) -> Settings:
    return Settings(db=db_url, recorded=recorded, pretuned=False, model_processes=0)


@pytest.fixture
def app(settings: Settings) -> Iterator[FastAPI]:
    made = create_app(settings)
    yield made
    made.state.shared.store.close()


@pytest.fixture
def http(app: FastAPI) -> Iterator[httpx.Client]:
    with httpx.Client(transport=AppTransport(app), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def client(app: FastAPI) -> Iterator[Client]:
    with Client("http://127.0.0.1", transport=AppTransport(app)) as made:
        yield made


@pytest.fixture
def open_recorded(recorded: Path) -> Callable[[str], Any]:
    return lambda spec: open_runner(spec, recorded=recorded)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, db_url: str, recorded: Path
) -> CommandLine:
    """Commands run in an empty folder, with recorded trials and the database of this test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELWRIGHT_DB", db_url)
    monkeypatch.setenv("KERNELWRIGHT_RECORDED", str(recorded))
    monkeypatch.setenv("KERNELWRIGHT_PRETUNED", "0")
    # The logs of a process are set up once, and this one is the tests'.
    monkeypatch.setattr("kernelwright.service.cli_service.configure_logs", lambda level, form: None)
    return CommandLine(capsys)
