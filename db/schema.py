"""The version of a database's schema: read it, judge it, bring it up to date.

The version is the revision of the newest migration that ran, kept by Alembic in a table of our own name, so that a
database shared with another program that uses Alembic is not mistaken for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, column, inspect, select, table, text

from kernelwright.db.tables import Base
from kernelwright.errors import DatabaseTooNew, DatabaseTooOld, DatabaseUnavailable

if TYPE_CHECKING:
    from alembic.config import Config

VERSION_TABLE = "kernelwright_schema"
_SCRIPTS = "kernelwright.db:migrations"
_VERSIONS = "kernelwright.db.migrations.versions"
# Any number will do, as long as every release takes the same one.
_ADVISORY_LOCK = 7_305_808_869


def revisions() -> list[str]:
    """The revisions that this release knows, oldest first: the numbers that the scripts' names begin with.

    Alembic itself is only imported where a script has to run, because importing it takes longer than a whole query.
    """
    names = [path.name for path in resources.files(_VERSIONS).iterdir()]
    return sorted(name.partition("_")[0] for name in names if name[0].isdigit() and name.endswith(".py"))


def current_revision(connection: Connection) -> str | None:
    """The revision of the database; None when it has no schema of ours."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    revision: str | None = connection.execute(select(column("version_num")).select_from(table(VERSION_TABLE))).scalar()
    return revision


def ensure_schema(engine: Engine) -> None:
    """Create the schema in an empty database; raise DatabaseTooNew, DatabaseTooOld or DatabaseUnavailable if it is
    not the one that this release reads and writes."""
    with engine.begin() as connection:
        current = current_revision(connection)
    if current is None:
        migrate(engine)
    else:
        _refuse_newer(engine, current)
        head = revisions()[-1]
        if current != head:
            raise DatabaseTooOld(
                f"the database {_where(engine)} has schema {current}, this release needs {head}; "
                f"run `kernelwright db upgrade --db {_where(engine)}` (it keeps what is stored)"
            )


def migrate(engine: Engine) -> tuple[str | None, str]:
    """Run the migrations that are missing, in one transaction; returns the revision before and after.

    Two processes may call this at once: the second waits for the first and finds nothing left to do.
    """
    from alembic import command

    head = revisions()[-1]
    with engine.execution_options(kernelwright_write=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        current = current_revision(connection)
        if current is None:
            _refuse_foreign(engine, connection)
        else:
            _refuse_newer(engine, current)
        if current != head:
            command.upgrade(_config(connection), "head")
    return current, head


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", _SCRIPTS)
    return config


def _refuse_newer(engine: Engine, current: str) -> None:
    known: Sequence[str] = revisions()
    if current not in known:
        raise DatabaseTooNew(
            f"the database {_where(engine)} has schema {current}, this release knows up to {known[-1]}: it was written "
            "by a later release; upgrade kernelwright, or choose another database"
        )


def _refuse_foreign(engine: Engine, connection: Connection) -> None:
    # An SQLite file belongs to one program; a PostgreSQL schema may hold other tables as long as no name clashes.
    present = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    clashing = present if connection.dialect.name == "sqlite" else present & set(Base.metadata.tables)
    if clashing:
        raise DatabaseUnavailable(
            f"the database {_where(engine)} is not ours: it holds {', '.join(sorted(clashing)[:5])} "
            "but no schema version; choose another database"
        )


def _where(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=True)
