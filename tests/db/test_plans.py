"""The searches that must stay fast go through indexes, as each database plans them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text

from kernelwright.db import JobRequest, Store
from kernelwright.db.engine import session_scope
from tests.contracts.team_contract import fill
from tests.db.values import H100, TOOLCHAIN, matmul, record, trial

SEARCHES: dict[str, Callable[[Store], object]] = {
    "find_records": lambda store: store.find_records(matmul().key, H100.key),
    "find_untrusted": lambda store: store.find_untrusted(matmul().key, H100.key),
    "neighbours": lambda store: store.neighbours(matmul(3000), H100.key, limit=8),
    "get_record": lambda store: store.get_record(record().key),
    "record_states": lambda store: store.record_states([record().key]),
    "known trials": lambda store: list(
        store.trials(workload_key=matmul().key, device_key=H100.key, toolchain_key=TOOLCHAIN.key)
    ),
    "trials of an operator": lambda store: list(store.trials(operator="conv2d", device_key=H100.key)),
    "trials of a job": lambda store: store.trial_page(job_id="a", after=5),
    "pareto": lambda store: store.pareto(matmul().key, H100.key),
    "counts of a workload": lambda store: store.count_trials(matmul().key, H100.key),
    "a job": lambda store: store.get_job("a"),
    "a named job": lambda store: store.submit(JobRequest(matmul(), "cuda"), "once"),
    "the next job": lambda store: store.claim("w"),
    "a key": lambda store: store.find_key_by_hash("a"),
}

Statement = tuple[str, Any]


@contextmanager
def statements(store: Store) -> Iterator[list[Statement]]:
    """The statements that run inside, with their values."""
    seen: list[Statement] = []

    def note(connection: object, cursor: object, statement: str, values: Any, *_: object) -> None:
        if statement.startswith("SELECT") and "FROM" in statement:
            seen.append((statement, values))

    event.listen(store.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(store.engine, "before_cursor_execute", note)


def plan(store: Store, statement: Statement) -> str:
    words, values = statement
    with session_scope(store.engine, write=True) as session:
        connection = session.connection()
        if store.engine.dialect.name == "sqlite":
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {words}", values).all()
            return "\n".join(str(row[3]) for row in rows)
        # With few rows PostgreSQL reads all of them, unless that is not allowed.
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        return "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {words}", values))


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store, [record(matmul(m)) for m in range(1, 40)])
    store.add_trials([trial(1), trial(2)])
    return store


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES.keys())
def test_a_search_goes_through_an_index(filled: Store, search: Callable[[Store], object]) -> None:
    with statements(filled) as seen:
        search(filled)
    plans = [plan(filled, statement) for statement in seen]
    assert plans
    for found in plans:
        for table in ("records", "trials", "jobs", "workloads", "api_keys", "uses"):
            assert f"SCAN {table}" not in found and f"Seq Scan on {table}" not in found, found


def test_neighbours_of_a_large_family_go_by_place(filled: Store) -> None:
    with statements(filled) as seen:
        filled.neighbours(matmul(3000), H100.key, limit=8)
    boxed = [plan(filled, statement) for statement in seen if "BETWEEN" in statement[0]]
    assert boxed and all("ix_records_near" in found for found in boxed)
