"""Which records may be relied on, how often they are used, and which are to be measured again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Engine, and_, exists, func, or_, select, update
from sqlalchemy.orm import aliased

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Reader, dialect_insert, now, storable
from kernelwright.db.tables import RecordRow, UseRow
from kernelwright.db.trust import RecordState, Trust
from kernelwright.types import TuningRecord


class TrustStore:
    """Trust in the records of a database, and their use."""

    engine: Engine
    reader: Reader

    def quarantine(self, record_id: str, reason: str) -> bool:
        """Serve a record no longer: it was found wrong or failing. False if there is no such record.

        It stays until it is measured here again and put in its place.
        """
        change = {"trust": Trust.QUARANTINED.value, "reason": storable(reason)}
        with session_scope(self.engine, write=True) as session:
            result = session.execute(update(RecordRow).where(RecordRow.key == record_id).values(change))
            return cast("CursorResult[Any]", result).rowcount == 1

    def record_state(self, record_id: str) -> RecordState | None:
        """What is known about a record beside itself; None if there is no such record."""
        return self.record_states([record_id]).get(record_id)

    def record_states(self, record_ids: Iterable[str]) -> dict[str, RecordState]:
        """What is known about records, by id; those that do not exist are left out."""
        query = (
            select(RecordRow.key, RecordRow.trust, RecordRow.source, RecordRow.reason, UseRow.count)
            .outerjoin(UseRow, UseRow.record_key == RecordRow.key)
            .where(RecordRow.key.in_(set(record_ids)))
        )
        with session_scope(self.engine) as session:
            return {
                key: RecordState(Trust(trust), source, reason, uses or 0)
                for key, trust, source, reason, uses in session.execute(query)
            }

    def count_trust(self) -> dict[str, int]:
        """How many records there are of each `Trust`; one without records is left out."""
        with session_scope(self.engine) as session:
            found = session.execute(select(RecordRow.trust, func.count()).group_by(RecordRow.trust))
            return {trust: count for trust, count in found}

    def quarantined(self, limit: int = 100) -> list[TuningRecord]:
        """Records in quarantine, newest first."""
        bad = select(RecordRow).where(RecordRow.trust == Trust.QUARANTINED.value)
        with session_scope(self.engine) as session:
            rows = session.scalars(bad.order_by(RecordRow.created.desc(), RecordRow.id.desc()).limit(limit)).all()
            return self.reader.records(session, rows)

    def count_use(self, record_ids: Iterable[str]) -> None:
        """Note that these records were the answer, once for each time that one is named; meant for batches."""
        counts = Counter(record_ids)
        if not counts:
            return
        with session_scope(self.engine, write=True) as session:
            moment = session.scalar(select(now(session)))
            # In the order of the keys, so that no two writers wait in a circle.
            rows = [{"record_key": key, "count": counts[key], "last_used": moment} for key in sorted(counts)]
            statement = dialect_insert(session, UseRow)
            more = {"count": UseRow.count + statement.excluded.count, "last_used": statement.excluded.last_used}
            session.execute(statement.on_conflict_do_update(index_elements=["record_key"], set_=more), rows)

    def to_refresh(
        self, device_key: str, toolchain_key: str, fingerprints: Mapping[str, str], limit: int | None = None
    ) -> list[TuningRecord]:
        """Records on a device that ought to be measured again, most used first, of workloads without a current one.

        That is: of another toolchain, of a template whose source is not the one in `fingerprints` (digest by template),
        or imported without a valid signature. Of each workload the record that is used most, then the newest.
        """
        current = aliased(RecordRow)
        known = exists().where(
            current.workload_key == RecordRow.workload_key,
            current.device_key == RecordRow.device_key,
            _is_current(current, toolchain_key, fingerprints),
        )
        query = (
            select(RecordRow)
            .outerjoin(UseRow, UseRow.record_key == RecordRow.key)
            .where(RecordRow.device_key == device_key, RecordRow.trust != Trust.QUARANTINED.value, ~known)
            .order_by(func.coalesce(UseRow.count, 0).desc(), RecordRow.created.desc(), RecordRow.id.desc())
        )
        chosen: dict[str, RecordRow] = {}
        with session_scope(self.engine) as session:
            for row in session.scalars(query):
                if limit is not None and len(chosen) == limit:
                    break
                chosen.setdefault(row.workload_key, row)
            return self.reader.records(session, list(chosen.values()))


def _is_current(row: type[RecordRow], toolchain_key: str, fingerprints: Mapping[str, str]) -> ColumnElement[bool]:
    codes = [and_(row.template == name, row.template_fingerprint == digest) for name, digest in fingerprints.items()]
    reliable = row.trust.in_([Trust.MEASURED.value, Trust.TRUSTED.value])
    return and_(row.toolchain_key == toolchain_key, reliable, or_(*codes) if codes else row.template.is_(None))
