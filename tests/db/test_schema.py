"""Versions of the schema: which databases are refused, and that the migrations make what the tables say."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text

from kernelwright.db import Store, open_engine, schema, upgrade
from kernelwright.db.engine import session_scope
from kernelwright.db.tables import Base
from kernelwright.errors import DatabaseTooNew, DatabaseTooOld
from tests.db.values import matmul, record, trial

ASSETS = Path(__file__).parent / "assets"


def set_revision(url: str, revision: str) -> None:
    with Store.open(url) as store, session_scope(store.engine, write=True) as session:
        session.execute(text("UPDATE kernelwright_schema SET version_num = :to"), {"to": revision})


def test_migrations_make_the_tables_that_the_code_expects(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": schema.VERSION_TABLE, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_revisions_are_numbered_without_gaps() -> None:
    assert schema.revisions() == [f"{number:04}" for number in range(1, len(schema.revisions()) + 1)]


def test_revisions_are_those_of_the_scripts_and_opening_imports_no_alembic(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", "kernelwright.db:migrations")
    walked = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert schema.revisions() == walked[::-1]
    url = f"sqlite:///{tmp_path / 'here.db'}"
    Store.open(url).close()
    code = f"import sys; from kernelwright.db import Store; Store.open({url!r}); print('alembic' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "False\n"


def test_a_newer_database_is_refused_and_left_alone(url: str) -> None:
    set_revision(url, "9999")
    for call in (open_engine, upgrade):
        with pytest.raises(DatabaseTooNew, match=r"schema 9999, this release knows up to 0003.*upgrade kernelwright"):
            call(url)


def test_an_older_database_is_refused_until_it_is_upgraded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(url).close()
    known = schema.revisions()
    monkeypatch.setattr(schema, "revisions", lambda: [*known, "0004"])
    with pytest.raises(
        DatabaseTooOld,
        match=r"has schema 0003, this release needs 0004; run `kernelwright db upgrade --db (sqlite|postgresql)",
    ):
        open_engine(url)


def test_upgrade_says_what_it_did(url: str) -> None:
    head = schema.revisions()[-1]
    assert upgrade(url) == (None, head)
    assert upgrade(url) == (head, head)


def test_many_may_open_an_empty_database_at_once(url: str) -> None:
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        start.wait()
        try:
            with Store.open(url) as store:
                store.add_trial(trial(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with Store.open(url) as store:
        assert len(list(store.trials())) == 4


def test_a_migration_that_fails_leaves_the_database_empty(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_way(config: object, revision: str) -> None:
        real(config, revision)  # type: ignore[arg-type]
        raise ZeroDivisionError

    real = command.upgrade
    monkeypatch.setattr(command, "upgrade", half_way)
    with pytest.raises(ZeroDivisionError):
        open_engine(url)
    monkeypatch.undo()
    assert upgrade(url)[0] is None


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.sql")), ids=lambda path: path.stem)
def test_a_database_of_an_earlier_release_is_upgraded_with_all_it_holds(asset: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as old:
        old.executescript(asset.read_text(encoding="utf-8"))
    old.close()
    assert upgrade(f"sqlite:///{path}") == (asset.stem, schema.revisions()[-1])
    with Store.open(f"sqlite:///{path}") as store:
        assert list(store.trials()) == [trial(1), trial(2)]
        assert store.records() == [record()]
        assert store.find_records(matmul().key, record().device.key) == [record()]
        assert store.neighbours(matmul(65), record().device.key) == [record()]
        assert store.pareto(matmul().key, record().device.key) == [trial(1)]
        assert [(job.state, job.workload) for job in store.jobs()] == [("queued", matmul())]


def test_every_released_schema_is_kept_as_an_asset() -> None:
    assert [path.stem for path in sorted(ASSETS.glob("*.sql"))] == schema.revisions()


def test_the_version_table_is_our_own(sqlite_url: str) -> None:
    Store.open(sqlite_url).close()
    engine = create_engine(sqlite_url)
    with engine.connect() as connection:
        names = connection.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all()
    engine.dispose()
    assert schema.VERSION_TABLE in names and not any(re.search("alembic", name) for name in names)
