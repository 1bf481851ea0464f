"""Whether anything was written to a database, asked for next to nothing: what was read can be kept until then."""

from __future__ import annotations

import sqlite3
import threading

from sqlalchemy import Connection, Engine, PoolProxiedConnection, event, text

from kernelwright.db.engine import database_errors
from kernelwright.errors import DatabaseUnavailable


class ChangeWatch:
    """Gives a token that differs whenever a transaction that wrote has ended since, in whichever process.

    Read the token first and the data after it: data read under an equal token is what the database holds. `written`
    is set when this process wrote through the engine, until the next `token()`. Threads may share it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.written = threading.Event()
        self._connection: PoolProxiedConnection | None = None
        self._generation = 0
        self._lock = threading.Lock()
        event.listen(engine, "commit", self._on_commit)

    def token(self) -> str | None:
        """The token now; None where it cannot be told, as for a database in memory. DatabaseUnavailable as ever."""
        self.written.clear()
        with self._lock, database_errors(self.engine):
            if self.engine.dialect.name == "postgresql":
                with self.engine.connect() as connection:
                    return str(connection.scalar(text("SELECT pg_current_snapshot()")))
            return self._sqlite_token()

    def close(self) -> None:
        """Give the connection back."""
        event.remove(self.engine, "commit", self._on_commit)
        with self._lock:
            self._drop()

    def _sqlite_token(self) -> str | None:
        if self.engine.url.database in (None, "", ":memory:"):
            return None
        # The number is one connection's own, so that it must always be the same one, and one that never writes.
        try:
            if self._connection is None:
                self._connection = self.engine.raw_connection()
                self._connection.detach()
                self._generation += 1
            cursor = self._connection.cursor()
            cursor.execute("PRAGMA data_version")
            (version,) = cursor.fetchall()[0]
            cursor.close()
        except sqlite3.Error as error:
            self._drop()
            where = self.engine.url.render_as_string()
            raise DatabaseUnavailable(f"the database {where} could not be read: {error}; check the file") from error
        return f"{self._generation}:{version}"

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _on_commit(self, connection: Connection) -> None:
        if connection.get_execution_options().get("kernelwright_write"):
            self.written.set()
