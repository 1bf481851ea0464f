"""Opening a database: what it becomes, and what is said when it cannot be opened."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from kernelwright.db import Store, default_url, open_engine, schema, upgrade
from kernelwright.db.engine import session_scope
from kernelwright.errors import DatabaseUnavailable, MissingDependency
from tests.db.values import record, trial


def test_sqlite_waits_for_others_and_checks_what_rows_refer_to(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, session_scope(store.engine) as session:
        found = {
            name: session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "busy_timeout", "foreign_keys", "synchronous")
        }
    assert found == {"journal_mode": "wal", "busy_timeout": 30_000, "foreign_keys": 1, "synchronous": 2}


def test_what_was_stored_is_there_after_opening_again(url: str) -> None:
    with Store.open(url) as store:
        store.add_trial(trial(1))
        store.put_winner(record())
    with Store.open(url) as store:
        assert list(store.trials()) == [trial(1)]
        assert store.records() == [record()]


def test_many_may_open_a_new_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About one in twelve such meetings failed while the switch to the write-ahead log was not tried again."""
    monkeypatch.setattr(schema, "ensure_schema", lambda engine: engine.connect().close())
    with ThreadPoolExecutor(4) as threads:
        for number in range(80):
            meet = threading.Barrier(4)

            def open_it(url: str = f"sqlite:///{tmp_path}/{number}.db", meet: threading.Barrier = meet) -> None:
                meet.wait()
                open_engine(url).dispose()

            for opened in [threads.submit(open_it) for _ in range(4)]:
                opened.result()


def test_the_default_is_in_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "not" / "there" / "yet"))
    with Store.open() as store:
        store.add_trial(trial(1))
    assert default_url() == f"sqlite:///{tmp_path}/not/there/yet/kernelwright/kernelwright.db"
    assert Path(default_url().removeprefix("sqlite:///")).is_file()


def test_a_database_in_memory_serves_one_process() -> None:
    with Store.open("sqlite://") as store:
        store.add_trials(trial(number) for number in range(600))
        assert len(list(store.trials())) == 600


@pytest.mark.parametrize("prefix", ["postgresql://", "postgresql+psycopg://", "postgres://"])
def test_every_name_of_postgresql_means_psycopg_3(postgres: Callable[[], str], prefix: str) -> None:
    engine = open_engine(prefix + postgres().partition("://")[2])
    assert engine.dialect.driver == "psycopg"
    engine.dispose()


def test_a_failing_scope_changes_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), session_scope(store.engine, write=True) as session:
        session.execute(text("INSERT INTO toolchains VALUES ('k', 'b')"))
        raise ZeroDivisionError
    with session_scope(store.engine) as session:
        assert session.scalar(text("SELECT count(*) FROM toolchains")) == 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("t.db", "must begin with sqlite:/// or postgresql://, got 't.db'; try sqlite:///"),
        ("mysql://root@localhost/x", "must begin with .* got mysql://"),
        ("postgresql+asyncpg://localhost/x", r"must begin with .* got postgresql\+asyncpg://"),
        ("sqlite:////nowhere/at/all/t.db", "directory of the database must exist.* make /nowhere/at/all first"),
        ("sqlite:////tmp", "must be a file, got the directory /tmp"),
        ("sqlite:////proc/t.db", "could not be used: unable to open database file; check the URL, the rights"),
        ("sqlite:////dev/null/t.db", "directory of the database must exist"),
        ("postgresql://me:secret@127.0.0.1:1/x", r"postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/x could not be used"),
    ],
)
@pytest.mark.parametrize("call", [open_engine, upgrade])
def test_what_cannot_be_opened(call: Callable[[str], object], bad: str, said: str) -> None:
    with pytest.raises(DatabaseUnavailable, match=said) as caught:
        call(bad)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but longer than the header of one would be. " * 20)
    with pytest.raises(DatabaseUnavailable, match="file is not a database; choose another file"):
        open_engine(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE songs (title TEXT)")
    theirs.close()
    with pytest.raises(DatabaseUnavailable, match="is not ours: it holds songs"):
        open_engine(f"sqlite:///{path}")


def test_postgresql_may_hold_other_tables_but_not_of_our_names(postgres: Callable[[], str]) -> None:
    shared = postgres()
    with Store.open(shared) as store, session_scope(store.engine, write=True) as session:
        session.execute(text("CREATE TABLE songs (title TEXT)"))
        session.execute(text("DROP TABLE kernelwright_schema"))
    with pytest.raises(DatabaseUnavailable, match="is not ours: it holds api_keys, audit, devices, jobs, pieces"):
        open_engine(shared)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kernelwright\[postgres\]'"):
        open_engine("postgresql://localhost/x")


def test_a_database_that_goes_bad_while_open_is_told(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        with session_scope(store.engine, write=True) as session:
            session.execute(text("DROP TABLE records"))
        with pytest.raises(DatabaseUnavailable, match="no such table: records"):
            store.records()


def test_it_needs_no_file_in_the_working_directory(tmp_path: Path) -> None:
    code = "from kernelwright.db import Store\nwith Store.open('sqlite:///t.db') as store: print(store.count_records())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "0", "")
    assert {path.name for path in tmp_path.iterdir()} == {"t.db"}


def test_searches_go_through_the_indexes(sqlite_url: str) -> None:
    queries = {
        "ix_records_place": "SELECT * FROM records WHERE workload_key = 'a' AND device_key = 'b' ORDER BY created DESC",
        "ix_trials_place": "SELECT * FROM trials WHERE workload_key = 'a' AND device_key = 'b' AND toolchain_key = 'c'",
        "ix_trials_job": "SELECT * FROM trials WHERE job_id = 'a' AND id > 5 ORDER BY id LIMIT 9",
        "ix_jobs_state_number": "SELECT id FROM jobs WHERE state = 'queued' ORDER BY number LIMIT 1",
    }
    with Store.open(sqlite_url) as store, session_scope(store.engine) as session:
        for index, query in queries.items():
            plan = str(session.execute(text(f"EXPLAIN QUERY PLAN {query}")).all())
            assert index in plan and "TEMP B-TREE" not in plan, plan


def test_a_value_out_of_the_store_is_frozen(store: Store) -> None:
    store.add_trial(trial(1))
    (found,) = store.trials()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.origin = "mine"  # type: ignore[misc]
