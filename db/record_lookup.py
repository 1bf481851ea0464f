"""The records of many workloads in one read."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from kernelwright.db.engine import session_scope
from kernelwright.db.store import Store
from kernelwright.db.tables import RecordRow
from kernelwright.db.trust import Trust
from kernelwright.types import TuningRecord, Workload

PAGE = 500
"""Workloads in one statement: databases bound the number of parameters."""


def find_records_of(store: Store, workload_keys: Sequence[str], device_key: str) -> dict[str, list[TuningRecord]]:
    """What `find_records` gives for each of these workloads, by key; a workload without records has an empty list."""
    found: dict[str, list[TuningRecord]] = {key: [] for key in workload_keys}
    wanted = list(found)
    with session_scope(store.engine) as session:
        for start in range(0, len(wanted), PAGE):
            rows = session.scalars(
                select(RecordRow)
                .where(RecordRow.workload_key.in_(wanted[start : start + PAGE]), RecordRow.device_key == device_key)
                .where(RecordRow.trust.in_([Trust.MEASURED.value, Trust.TRUSTED.value]))
            ).all()
            newest = sorted(rows, key=lambda row: (row.trust != Trust.MEASURED.value, -row.created, -row.id))
            for record in store.reader.records(session, newest):
                found[record.workload.key].append(record)
    return found


class Preloaded:
    """Answers `find_records` for one device from one read, everything else from the store."""

    def __init__(self, store: Store, workloads: Sequence[Workload], device_key: str) -> None:
        self._store = store
        self._device_key = device_key
        self._found = find_records_of(store, [workload.key for workload in workloads], device_key)

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """As `Store.find_records`."""
        if device_key == self._device_key and workload_key in self._found:
            return self._found[workload_key]
        return self._store.find_records(workload_key, device_key)

    def neighbours(self, workload: Workload, device_key: str, limit: int = 64) -> list[TuningRecord]:
        """As `Store.neighbours`."""
        return self._store.neighbours(workload, device_key, limit)
