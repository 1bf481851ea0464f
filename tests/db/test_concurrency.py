"""Several threads and processes on one database: nothing is lost and nothing is given out twice."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from kernelwright.db import JobRequest, Store, engine, trial_store
from kernelwright.db.tables import Base
from kernelwright.errors import DatabaseUnavailable
from tests.db.children import begin, children, line_of, outputs
from tests.db.values import matmul, trial


def test_a_hundred_writers_lose_nothing(store: Store, url: str) -> None:
    """Two processes and 98 threads, each with trials of its own."""
    arguments = [(url, str(first), "5") for first in (10_000, 20_000)]
    with children("child_writer.py", *arguments) as writers, ThreadPoolExecutor(98) as pool:
        mine = [pool.submit(store.add_trials, [trial(2 * number), trial(2 * number + 1)]) for number in range(98)]
        said = outputs(writers)
        assert [future.result() for future in mine] == [2] * 98
    stored = [value.key for value in store.trials()]
    expected = {key for lines in said for key in lines} | {trial(number).key for number in range(196)}
    assert len(stored) == len(set(stored)) == 206 and set(stored) == expected


def test_bulk_writers_with_the_same_trials_do_not_wait_in_a_circle(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is held half way until the other is half way too, which must not happen."""
    half_way = threading.Barrier(2)
    insert_new = trial_store.insert_new

    def insert_slowly(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> int:
        middle = len(rows) // 2
        first = insert_new(session, table, rows[:middle])
        with contextlib.suppress(threading.BrokenBarrierError):
            half_way.wait(0.3)
        return first + insert_new(session, table, rows[middle:])

    store.add_trial(trial(100))
    monkeypatch.setattr(trial_store, "insert_new", insert_slowly)
    same = [trial(number) for number in range(20)]
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(store.add_trials, [same, same[::-1]])) == [0, 20]
    assert half_way.broken
    assert set(store.trials()) == {trial(100), *same}


def test_two_processes_never_claim_the_same_job(store: Store, url: str) -> None:
    submitted = [store.submit(JobRequest(matmul(m), "cuda")).id for m in range(1, 31)]
    with children("child_claimer.py", (url, "a"), (url, "b")) as claimers:
        claimed = outputs(claimers)
    assert sorted(claimed[0] + claimed[1]) == sorted(submitted)
    for worker, own in zip("ab", claimed, strict=True):
        jobs = [store.get_job(job_id) for job_id in own]
        assert {(job.worker, job.attempts) for job in jobs if job} <= {(worker, 1)}


def test_threads_never_claim_the_same_job(store: Store) -> None:
    submitted = [store.submit(JobRequest(matmul(m), "cuda")).id for m in range(1, 21)]
    with ThreadPoolExecutor(5) as pool:
        claimed = list(pool.map(lambda number: store.claim(f"w{number}"), range(20)))
    assert sorted(job.id for job in claimed if job) == sorted(submitted)


def test_one_of_two_reports_on_a_requeued_job_counts(store: Store) -> None:
    job = store.submit(JobRequest(matmul(), "cuda"))
    store.claim("slow")
    store.requeue_stale(0)
    store.claim("fast")
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda worker: store.finish(job.id, worker, worker), ["slow", "fast"]))
    assert ended == [False, True]
    found = store.get_job(job.id)
    assert found is not None and found.record_id == "fast"


def test_a_killed_writer_loses_no_trial_that_it_was_told_is_stored(store: Store, url: str) -> None:
    with children("child_writer.py", (url, "0", "100000")) as (writer,):
        begin(writer)
        acknowledged = [line_of(writer) for _ in range(30)]
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate(timeout=30)
        assert writer.returncode == -signal.SIGKILL
    # The last line may be half a key.
    acknowledged += [key for key in rest.split() if len(key) == 20]
    stored = [value.key for value in store.trials()]
    assert set(acknowledged) <= set(stored)
    assert len(stored) <= len(acknowledged) + 1
    assert store.add_trial(trial(200_000))


def test_a_writer_waits_for_one_who_holds_the_lock(sqlite_url: str, tmp_path: Path) -> None:
    with Store.open(sqlite_url) as store:
        holder = sqlite3.connect(tmp_path / "local.db", isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, holder.execute, ["COMMIT"])
        timer.start()
        assert store.add_trial(trial(1))
        timer.join()
        holder.close()


def test_a_writer_tries_again_when_its_turn_never_came(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", 100)
    with Store.open(sqlite_url) as store:
        holder = sqlite3.connect(tmp_path / "local.db", isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailable, match="database is locked; another process holds it"):
            store.add_trial(trial(1))
        timer = threading.Timer(0.2, holder.execute, ["COMMIT"])
        timer.start()
        assert store.add_trial(trial(1))
        timer.join()
        holder.close()
