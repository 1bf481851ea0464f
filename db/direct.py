"""Reads handed to the driver as they stand, over connections kept for them: next to a session that takes a tenth of the
time, and one round to the server instead of three.

`run` does for any read in any thread. An event loop, which must not wait, has two quicker ways, each for one database;
where they give None, `run` has to be asked, and it tells what is wrong.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.engine.interfaces import DBAPICursor

from kernelwright.db.engine import database_errors
from kernelwright.errors import DatabaseUnavailable

T = TypeVar("T")

Rows = Sequence[Sequence[Any]]

REST_SECONDS = 5.0
"""After a connection of an event loop failed, until it is tried again."""


@dataclasses.dataclass
class _Line:
    """An event loop's own connection to a server, which one question at a time may use."""

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock
    connection: Any = None
    rests_until: float = 0.0


class DirectReads:
    """Runs reads on an engine's database, each statement by itself, outside of any transaction. Threads may share it.

    There are as many connections as reads that ever ran at once. A database in memory has one only, the engine's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._postgres = engine.dialect.name == "postgresql"
        self.mark = "%s" if self._postgres else "?"
        self._errors: Any = engine.dialect.loaded_dbapi.Error
        self._keeps = self._postgres or engine.url.database not in (None, "", ":memory:")
        self._idle: list[Any] = []
        self._quick: Any = None
        self._line: _Line | None = None
        self._lock = threading.Lock()

    def run(self, read: Callable[[DBAPICursor], T]) -> T:
        """What `read` gives for a cursor; run once more when a connection has died since it was last used.

        Raises DatabaseUnavailable as the store does.
        """
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            try:
                connection = kept or self._connect()
                found = self._read(connection, read)
            except self._errors as error:
                if kept is None:
                    raise self._unavailable(error) from error
                continue
            if self._keeps:
                with self._lock:
                    self._idle.append(connection)
                self._prepare_quick()
            return found

    def run_at_once(self, read: Callable[[DBAPICursor], T]) -> T | None:
        """What `read` gives where nobody has to be waited for, else None: only a SQLite file that `run` has read
        before, and only while no lock is in the way, is read by the thread that asks. Always by the same one."""
        quick = self._quick
        if quick is None:
            return None
        try:
            return read(quick.cursor())
        except self._errors:
            # The other way tells what is wrong, if it is not just a lock.
            self._drop_quick()
            return None

    async def run_soon(self, words: str, values: tuple[Any, ...]) -> Rows | None:
        """The rows of a statement, which the event loop itself reads from PostgreSQL; None for another database and
        while there is something wrong with this one."""
        if not self._postgres:
            return None
        line = self._line_of(asyncio.get_running_loop())
        async with line.lock:
            if time.monotonic() < line.rests_until:
                return None
            whole = False
            try:
                line.connection = line.connection or await self._connect_soon()
                cursor = await line.connection.execute(words, values)
                rows: Rows = await cursor.fetchall()
                whole = True
                return rows
            except self._errors:
                line.rests_until = time.monotonic() + REST_SECONDS
                return None
            finally:
                if not whole:
                    # Whoever asked may be gone too, and half an answer may still be on the way.
                    _hang_up(line)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._drop_quick()
        if self._line is not None:
            _hang_up(self._line)
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _line_of(self, loop: asyncio.AbstractEventLoop) -> _Line:
        if self._line is None or self._line.loop is not loop:
            if self._line is not None:
                _hang_up(self._line)
            self._line = _Line(loop, asyncio.Lock())
        return self._line

    async def _connect_soon(self) -> Any:
        driver: Any = self.engine.dialect.loaded_dbapi
        _, options = self.engine.dialect.create_connect_args(self.engine.url)
        return await driver.AsyncConnection.connect(**{"connect_timeout": 10, **options}, autocommit=True)

    def _prepare_quick(self) -> None:
        """Open the connection that never waits: opening one may."""
        with self._lock:
            if self._quick is None and not self._postgres:
                self._quick = self._connect()
                self._quick.execute("PRAGMA busy_timeout = 0")

    def _drop_quick(self) -> None:
        quick, self._quick = self._quick, None
        if quick is not None:
            quick.close()

    def _read(self, connection: Any, read: Callable[[DBAPICursor], T]) -> T:
        whole = False
        try:
            cursor = connection.cursor()
            found = read(cursor)
            cursor.close()
            whole = True
            return found
        finally:
            if not (whole and self._keeps):
                connection.close()

    def _connect(self) -> Any:
        with database_errors(self.engine):
            pooled = self.engine.raw_connection()
        if not self._keeps:
            return pooled
        connection: Any = pooled.dbapi_connection
        pooled.detach()
        if self._postgres:
            # SQLite's connections begin nothing by themselves anyway.
            connection.autocommit = True
        return connection

    def _unavailable(self, error: Exception) -> DatabaseUnavailable:
        where = self.engine.url.render_as_string(hide_password=True)
        return DatabaseUnavailable(
            f"the database {where} could not be read: {error}; check that it runs and is reachable"
        )


def _hang_up(line: _Line) -> None:
    connection, line.connection = line.connection, None
    if connection is not None:
        # Its own close() is for the loop that made it, which may have ended.
        connection.pgconn.finish()
