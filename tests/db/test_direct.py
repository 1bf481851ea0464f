"""Reads over kept connections: many threads at once, connections that died, databases that are gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kernelwright.db import Store
from kernelwright.errors import DatabaseUnavailable
from tests.db.values import matmul, record


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
