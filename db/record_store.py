"""Records: the winner of each workload, device, toolchain and template source."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping
from typing import Any, cast

from sqlalchemy import ColumnElement, Engine, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Parts, Reader, dialect_insert, family, record_row
from kernelwright.db.tables import RecordRow, WorkloadRow
from kernelwright.types import TuningRecord, Workload

_NEWEST_FIRST = (RecordRow.created.desc(), RecordRow.id.desc())


class RecordStore:
    """The winners of a database. Values in and out are frozen."""

    engine: Engine

    def put_winner(self, record: TuningRecord) -> str:
        """Store a record, in place of one with the same key; returns its id, which is its key."""
        parts = Parts()
        row = record_row(record, parts)
        with session_scope(self.engine, write=True) as session:
            parts.save(session)
            session.execute(_upsert(session, row))
        return str(row["key"])

    def get_record(self, record_id: str) -> TuningRecord | None:
        """The record with this id; None if there is none."""
        found = self._read_records([RecordRow.key == record_id])
        return found[0] if found else None

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """The records of one workload on one device, newest first, of any toolchain."""
        return self._read_records([RecordRow.workload_key == workload_key, RecordRow.device_key == device_key])

    def neighbours(self, workload: Workload, device_key: str, limit: int = 64) -> list[TuningRecord]:
        """Records of workloads that differ from this one only in their sizes, nearest first.

        Near is a small distance in log2 of the sizes. Of each workload only the newest record counts.
        """
        with session_scope(self.engine) as session:
            found = session.execute(
                select(RecordRow.id, RecordRow.workload_key, WorkloadRow.dims)
                .join(WorkloadRow, WorkloadRow.key == RecordRow.workload_key)
                .where(RecordRow.family == family(workload), RecordRow.device_key == device_key)
                .where(RecordRow.workload_key != workload.key)
                .order_by(*_NEWEST_FIRST)
            ).all()
            newest: dict[str, tuple[int, str]] = {}
            for row_id, key, dims in found:
                newest.setdefault(key, (row_id, dims))
            ranked = [(_distance(workload.dims, json.loads(dims)), row_id) for row_id, dims in newest.values()]
            chosen = [row_id for _, row_id in heapq.nsmallest(limit, ranked)]
            rows = {row.id: row for row in session.scalars(select(RecordRow).where(RecordRow.id.in_(chosen)))}
            return Reader().records(session, [rows[row_id] for row_id in chosen])

    def records(
        self, operator: str | None = None, device_key: str | None = None, limit: int | None = 100, offset: int = 0
    ) -> list[TuningRecord]:
        """Records of this operator and device (None: any), newest first; limit None: all."""
        wanted = {RecordRow.operator: operator, RecordRow.device_key: device_key}
        conditions = [column == value for column, value in wanted.items() if value is not None]
        return self._read_records(conditions, limit, offset)

    def count_records(self) -> int:
        """How many records are stored."""
        with session_scope(self.engine) as session:
            return session.scalar(select(func.count()).select_from(RecordRow)) or 0

    def _read_records(
        self, conditions: list[ColumnElement[bool]], limit: int | None = None, offset: int = 0
    ) -> list[TuningRecord]:
        query = select(RecordRow).where(*conditions).order_by(*_NEWEST_FIRST).limit(limit).offset(offset)
        with session_scope(self.engine) as session:
            return Reader().records(session, session.scalars(query).all())


def merge_record(session: Session, row: dict[str, Any]) -> bool:
    """Store the row of a record, unless one with its key is there that is as new; returns whether it was stored."""
    table = cast(Table, RecordRow.__table__)
    statement = _upsert(session, row, table.c.created < row["created"]).returning(table.c.id)
    return session.execute(statement).first() is not None


def _upsert(
    session: Session, row: dict[str, Any], only_if: ColumnElement[bool] | None = None
) -> sqlite.Insert | postgresql.Insert:
    changed = {name: value for name, value in row.items() if name != "key"}
    statement = dialect_insert(session, RecordRow).values(row)
    return statement.on_conflict_do_update(index_elements=["key"], set_=changed, where=only_if)


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    names = one.keys() | other.keys()
    # A size of 0 has no logarithm; it counts as 1.
    steps = (math.log2(max(one.get(name, 1), 1)) - math.log2(max(other.get(name, 1), 1)) for name in names)
    return math.hypot(*steps)
