"""Records: the winner of each workload, device, toolchain and template source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, Engine, Table, case, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, aliased

from kernelwright.db.engine import session_scope
from kernelwright.db.nearby import nearest_rows
from kernelwright.db.rows import Parts, Reader, dialect_insert, record_row
from kernelwright.db.tables import RecordRow
from kernelwright.db.trust import Trust
from kernelwright.types import TuningRecord, Workload

_NEWEST_FIRST: tuple[ColumnElement[Any], ...] = (RecordRow.created.desc(), RecordRow.id.desc())
_RELIABLE = RecordRow.trust.in_([Trust.MEASURED.value, Trust.TRUSTED.value])


class RecordStore:
    """The winners of a database. Values in and out are frozen."""

    engine: Engine
    reader: Reader

    def put_winner(self, record: TuningRecord) -> str:
        """Store a record that was measured here, in place of one with the same key, whatever that was; returns its id,
        which is its key."""
        parts = Parts()
        row = record_row(record, parts)
        with session_scope(self.engine, write=True) as session:
            parts.save(session)
            session.execute(_upsert(session, row))
        return str(row["key"])

    def get_record(self, record_id: str) -> TuningRecord | None:
        """The record with this id, in quarantine or not; None if there is none."""
        found = self._read_records([RecordRow.key == record_id])
        return found[0] if found else None

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """The records of one workload on one device that may be relied on, of any toolchain.

        Those measured here come first, each kind newest first.
        """
        place = [RecordRow.workload_key == workload_key, RecordRow.device_key == device_key]
        own_first = case((RecordRow.trust == Trust.MEASURED.value, 0), else_=1)
        return self._read_records([*place, _RELIABLE], order=(own_first, *_NEWEST_FIRST))

    def find_untrusted(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """The records of one workload on one device that were imported without a valid signature and not measured here
        yet, newest first."""
        place = [RecordRow.workload_key == workload_key, RecordRow.device_key == device_key]
        return self._read_records([*place, RecordRow.trust == Trust.UNTRUSTED.value])

    def neighbours(self, workload: Workload, device_key: str, limit: int = 16) -> list[TuningRecord]:
        """Records that may be relied on of workloads that differ from this one only in their sizes, nearest first.

        Near is a small distance in log2 of the sizes. Of each workload only the newest record counts. Where a family
        has more than `limit` workloads, only those within a factor of 2 in each size are sure to be looked at, and
        where that leaves hundreds, fewer: the work does not grow with what is stored.
        """
        with session_scope(self.engine) as session:
            mark = "%s" if self.engine.dialect.name == "postgresql" else "?"

            def execute(words: str, values: tuple[Any, ...]) -> Sequence[Sequence[Any]]:
                return session.connection().exec_driver_sql(words.replace("{}", mark), values).all()

            chosen = nearest_rows(execute, workload, device_key, limit)
            rows = {row.id: row for row in session.scalars(select(RecordRow).where(RecordRow.id.in_(chosen)))}
            return self.reader.records(session, [rows[row_id] for row_id in chosen])

    def records(
        self,
        operator: str | None = None,
        device_key: str | None = None,
        limit: int | None = 100,
        offset: int = 0,
        *,
        after: str | None = None,
        trusted: bool = False,
    ) -> list[TuningRecord]:
        """Records of this operator and device (None: any) that are not in quarantine, newest first; limit None: all.

        after: only those that come after the record with this id, to go on from a page's last one. trusted: leave out
        those that were imported without a valid signature.
        """
        wanted = {RecordRow.operator: operator, RecordRow.device_key: device_key}
        conditions = [column == value for column, value in wanted.items() if value is not None]
        conditions.append(_RELIABLE if trusted else RecordRow.trust != Trust.QUARANTINED.value)
        if after is not None:
            last = aliased(RecordRow)
            mark = select(last.created, last.id).where(last.key == after).scalar_subquery()
            conditions.append(tuple_(RecordRow.created, RecordRow.id) < mark)
        return self._read_records(conditions, limit, offset)

    def count_records(self) -> int:
        """How many records are stored."""
        with session_scope(self.engine) as session:
            return session.scalar(select(func.count()).select_from(RecordRow)) or 0

    def _read_records(
        self,
        conditions: list[ColumnElement[bool]],
        limit: int | None = None,
        offset: int = 0,
        order: tuple[ColumnElement[Any], ...] = _NEWEST_FIRST,
    ) -> list[TuningRecord]:
        query = select(RecordRow).where(*conditions).order_by(*order).limit(limit).offset(offset)
        with session_scope(self.engine) as session:
            return self.reader.records(session, session.scalars(query).all())


def merge_record(session: Session, row: dict[str, Any]) -> bool:
    """Store the row of an imported record, unless one with its key is there that is as good; returns whether it was.

    What may be relied on takes the place of what may not, and otherwise the newer that of the older. What is in
    quarantine stays there until it is measured here.
    """
    table = cast(Table, RecordRow.__table__)
    untrusted = table.c.trust == Trust.UNTRUSTED.value
    newer = table.c.created < row["created"]
    if row["trust"] == Trust.UNTRUSTED.value:
        better = untrusted & newer
    else:
        better = untrusted | (newer & (table.c.trust != Trust.QUARANTINED.value))
    statement = _upsert(session, row, better).returning(table.c.id)
    return session.execute(statement).first() is not None


def _upsert(
    session: Session, row: dict[str, Any], only_if: ColumnElement[bool] | None = None
) -> sqlite.Insert | postgresql.Insert:
    changed = {name: value for name, value in row.items() if name != "key"}
    statement = dialect_insert(session, RecordRow).values(row)
    return statement.on_conflict_do_update(index_elements=["key"], set_=changed, where=only_if)
