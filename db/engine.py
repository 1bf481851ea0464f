"""From a URL to an engine that is ready for use, and the one session scope that commits or rolls back."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from kernelwright.db import schema
from kernelwright.errors import DatabaseUnavailable, MissingDependency

BUSY_TIMEOUT_MS = 30_000
_BEGIN_ATTEMPTS = 4
_POSTGRES_NAMES = ("postgresql", "postgres", "postgresql+psycopg")
_SQLITE_NAMES = ("sqlite", "sqlite+pysqlite")


def default_url() -> str:
    """The database that is used when none is named: SQLite in the user's data directory."""
    return f"sqlite:///{platformdirs.user_data_path('kernelwright') / 'kernelwright.db'}"


def open_engine(url: str | None = None) -> Engine:
    """An engine on the database at `url` (None: `default_url()`), whose schema is the one that this release needs.

    An empty database gets its schema. Raises DatabaseUnavailable, DatabaseTooNew, DatabaseTooOld or, for PostgreSQL
    without psycopg, MissingDependency. An engine must not be carried over a fork.
    """
    engine = _connectable(url)
    try:
        with database_errors(engine):
            schema.ensure_schema(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def upgrade(url: str | None = None) -> tuple[str | None, str]:
    """Bring the database at `url` up to date; returns its schema revision before (None: it was empty) and after."""
    engine = _connectable(url)
    try:
        with database_errors(engine):
            return schema.migrate(engine)
    finally:
        engine.dispose()


@contextlib.contextmanager
def session_scope(engine: Engine, *, write: bool = False) -> Iterator[Session]:
    """A session that commits when the block ends and rolls back when it raises; nothing else does either.

    A writing scope takes SQLite's write lock at once, so that it never has to give up half way.
    """
    bind = engine.execution_options(kernelwright_write=True) if write else engine
    with database_errors(engine), Session(bind) as session, session.begin():
        yield session


@contextlib.contextmanager
def database_errors(engine: Engine) -> Iterator[None]:
    """Tell errors of the database itself as DatabaseUnavailable; misuse of it (a broken constraint) passes through."""
    try:
        yield
    except (exc.IntegrityError, exc.ProgrammingError, exc.DataError):
        raise
    except (exc.DatabaseError, exc.InterfaceError, exc.TimeoutError) as error:
        where = engine.url.render_as_string(hide_password=True)
        reason = str(getattr(error, "orig", None) or error).strip()
        raise DatabaseUnavailable(f"the database {where} could not be used: {reason}; {_advice(reason)}") from error


def _advice(reason: str) -> str:
    if "not a database" in reason or "malformed" in reason:
        return "choose another file, or import an export into a new one"
    if "locked" in reason:
        return "another process holds it; try again when that has ended"
    return "check the URL, the rights and that there is room"


def _connectable(url: str | None) -> Engine:
    parsed = _parse(url or _made_default())
    if parsed.drivername in _POSTGRES_NAMES:
        return _postgres(parsed.set(drivername="postgresql+psycopg"))
    if parsed.drivername in _SQLITE_NAMES:
        return _sqlite(parsed)
    raise _bad_url(f"{parsed.drivername}://…")


def _made_default() -> str:
    directory = platformdirs.user_data_path("kernelwright")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseUnavailable(
            f"the data directory {directory} could not be made: {error.strerror}; "
            "name a database by --db or KERNELWRIGHT_DB"
        ) from error
    return default_url()


def _parse(url: str) -> URL:
    try:
        return make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise _bad_url(repr(url)) from error


def _bad_url(got: str) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"a database URL must begin with sqlite:/// or postgresql://, got {got}; "
        "try sqlite:///kernelwright.db or postgresql://user@host/name"
    )


def _postgres(url: URL) -> Engine:
    options: dict[str, Any] = {} if "connect_timeout" in url.query else {"connect_timeout": 10}
    try:
        return create_engine(url, connect_args=options, pool_pre_ping=True)
    except ImportError as error:
        raise MissingDependency(
            "a postgresql:// database needs psycopg 3, which is not installed; try pip install 'kernelwright[postgres]'"
        ) from error


def _sqlite(url: URL) -> Engine:
    in_memory = url.database in (None, "", ":memory:")
    if not in_memory and not str(url.database).startswith("file:"):
        _check_path(Path(str(url.database)))
    # A database in memory lives in its only connection, which the threads take in turns.
    size = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0} if in_memory else {}
    engine = create_engine(url, connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_MS / 1000}, **size)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _check_path(path: Path) -> None:
    parent = path.absolute().parent
    if not parent.is_dir():
        raise DatabaseUnavailable(f"the directory of the database must exist, got {path}; make {parent} first")
    if path.is_dir():
        raise DatabaseUnavailable(f"the database must be a file, got the directory {path}; add a file name")


def _prepare_sqlite(connection: Any, _: object) -> None:
    # With isolation_level None the driver begins nothing by itself, so that schema changes are transactional too.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    _use_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _use_wal(connection: Any) -> None:
    # SQLite's busy timeout does not hold here: of several connections that switch a new file at once, all but one are
    # told at once that it is locked.
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _begin_sqlite(connection: Connection) -> None:
    # SQLite does not queue its waiters, so that one of many writers can wait in vain for the whole busy timeout.
    write = connection.get_execution_options().get("kernelwright_write", False)
    for attempt in range(_BEGIN_ATTEMPTS):
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
            return
        except exc.OperationalError as error:
            if "locked" not in str(error.orig) or attempt == _BEGIN_ATTEMPTS - 1:
                raise
