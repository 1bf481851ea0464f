"""Reads over kept connections: many threads at once, connections that died, databases that are gone."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kernelwright.db import Store
from kernelwright.db.record_lookup import RecordLookup
from kernelwright.errors import DatabaseUnavailable
from tests.db.values import H100, matmul, record


def count(cursor: Any) -> int:
    cursor.execute("SELECT count(*) FROM records")
    (found,) = cursor.fetchall()[0]
    return int(found)


def test_reads_see_what_was_written_since(store: Store) -> None:
    assert store.direct.run(count) == 0
    store.put_winner(record())
    assert store.direct.run(count) == 1


def test_threads_that_read_at_once_get_connections_of_their_own(store: Store) -> None:
    together = threading.Barrier(4)

    def slowly(cursor: Any) -> int:
        together.wait(10)
        return count(cursor)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: store.direct.run(slowly), range(8))) == [0] * 8
    assert len(store.direct._idle) == 4


def test_a_connection_that_died_is_replaced(store: Store) -> None:
    store.put_winner(record())
    assert store.direct.run(count) == 1
    (kept,) = store.direct._idle
    kept.close()
    assert store.direct.run(count) == 1
    assert kept not in store.direct._idle and len(store.direct._idle) == 1


def test_a_read_that_fails_says_so_and_the_next_one_works(store: Store) -> None:
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="could not be read"):
            store.direct.run(lambda cursor: cursor.execute("SELECT missing FROM records"))
    assert store.direct.run(count) == 0


def test_other_errors_pass_through(store: Store) -> None:
    def fault(cursor: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.direct.run(fault)
    assert store.direct.run(count) == 0


def test_a_database_in_memory_is_read_too() -> None:
    with Store.open("sqlite://") as store:
        store.put_winner(record(matmul(65)))
        assert store.direct.run(count) == store.direct.run(count) == 1


def test_an_event_loop_reads_what_it_need_not_wait_for(store: Store) -> None:
    store.put_winner(record())
    lookup, key = RecordLookup(store), H100.key
    sqlite = store.engine.dialect.name == "sqlite"
    known = lookup.find([matmul()], key).find_records(matmul().key, key)

    async def ask() -> None:
        at_once, soon = lookup.find_at_once(matmul(), key), await lookup.find_soon(matmul(), key)
        assert ((at_once is None), (soon is None)) == ((False, True) if sqlite else (True, False))
        found = at_once or soon
        assert found is not None and found.find_records(matmul().key, key) == known == [record()]
        missing = lookup.find_at_once(matmul(3), key) or await lookup.find_soon(matmul(3), key)
        assert missing is not None and missing.find_records(matmul(3).key, key) == []

    # A connection belongs to one loop.
    for _ in range(2):
        asyncio.run(ask())


def test_sqlite_that_is_locked_is_left_to_a_thread(sqlite_url: str) -> None:
    def locked(cursor: Any) -> int:
        cursor.execute("PRAGMA busy_timeout")
        assert cursor.fetchall() == [(0,)]
        raise sqlite3.OperationalError("database is locked")

    with Store.open(sqlite_url) as store:
        assert store.direct.run_at_once(count) is None
        assert store.direct.run(count) == store.direct.run_at_once(count) == 0
        assert store.direct.run_at_once(locked) is None
        assert store.direct.run_at_once(count) is None
        assert store.direct.run(count) == store.direct.run_at_once(count) == 0


def test_a_server_that_is_gone_is_left_to_a_thread_for_a_while(
    postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e6]
    monkeypatch.setattr("kernelwright.db.direct.time.monotonic", lambda: now[0])
    words = "SELECT count(*) FROM records"
    with Store.open(postgres()) as store:

        async def ask() -> list[object]:
            seen = [await store.direct.run_soon(words, ())]
            assert store.direct._line is not None
            store.direct._line.connection.pgconn.finish()
            seen += [await store.direct.run_soon(words, ()), await store.direct.run_soon(words, ())]
            now[0] += 10
            return [*seen, await store.direct.run_soon(words, ())]

        assert asyncio.run(ask()) == [[(0,)], None, None, [(0,)]]


def test_who_gives_up_leaves_no_half_answer_behind(postgres: Callable[[], str]) -> None:
    with Store.open(postgres()) as store:

        async def ask() -> object:
            slow = asyncio.create_task(store.direct.run_soon("SELECT 1, pg_sleep(30)", ()))
            await asyncio.sleep(0.2)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            return await store.direct.run_soon("SELECT 2", ())

        assert asyncio.run(ask()) == [(2,)]
