"""The records of one workload or many in one statement: what every question to a service begins with.

It hands the statement to the driver as it stands and remembers devices and toolchains, which never change: next to
reading rows through a session that takes a tenth of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.engine.interfaces import DBAPICursor

from kernelwright.db.engine import database_errors
from kernelwright.db.rows import own_fields
from kernelwright.db.store import Store
from kernelwright.db.trust import Trust
from kernelwright.errors import DatabaseUnavailable
from kernelwright.types import DeviceSpec, Toolchain, TuningRecord, Workload

PAGE = 500
"""Workloads in one statement: databases bound the number of parameters."""

T = TypeVar("T", DeviceSpec, Toolchain)

# In the order of `Store.find_records`; {} stands for the driver's parameter marks.
_FIND = (
    "SELECT workload_key, device_id, toolchain_key, body, trust FROM records "
    "WHERE device_key = {} AND workload_key IN ({}) AND trust IN ('measured', 'trusted', 'untrusted') "
    "ORDER BY CASE trust WHEN 'measured' THEN 0 ELSE 1 END, created DESC, id DESC"
)
_DEVICE = "SELECT body FROM devices WHERE id = {}"
_TOOLCHAIN = "SELECT body FROM toolchains WHERE key = {}"


class RecordLookup:
    """Reads the records of given workloads. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        dialect = store.engine.dialect
        self._mark = "?" if dialect.paramstyle == "qmark" else "%s"
        self._errors: Any = dialect.loaded_dbapi.Error
        self._where = store.engine.url.render_as_string(hide_password=True)
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def find(self, workloads: Sequence[Workload], device_key: str) -> Found:
        """The records of these workloads on a device that are not in quarantine."""
        by_key = {workload.key: workload for workload in workloads}
        found = Found(self.store, by_key)
        keys = list(by_key)
        connection = self._connect()
        try:
            cursor = connection.cursor()
            for start in range(0, len(keys), PAGE):
                page = keys[start : start + PAGE]
                cursor.execute(_FIND.format(self._mark, ",".join([self._mark] * len(page))), (device_key, *page))
                for key, device, toolchain, body, trust in cursor.fetchall():
                    found.add(
                        trust,
                        TuningRecord(
                            workload=by_key[key],
                            device=self._part(cursor, self._devices, DeviceSpec, _DEVICE, device),
                            toolchain=self._part(cursor, self._toolchains, Toolchain, _TOOLCHAIN, toolchain),
                            **own_fields(body),
                        ),
                    )
            cursor.close()
        except self._errors as error:
            connection.invalidate()
            raise DatabaseUnavailable(
                f"the database {self._where} could not be read: {error}; check that it runs and is reachable"
            ) from error
        finally:
            connection.close()
        return found

    def _connect(self) -> PoolProxiedConnection:
        with database_errors(self.store.engine):
            return self.store.engine.raw_connection()

    def _part(self, cursor: DBAPICursor, memory: dict[str, T], kind: type[T], query: str, key: str) -> T:
        found = memory.get(key)
        if found is None:
            cursor.execute(query.format(self._mark), (key,))
            (body,) = cursor.fetchall()[0]
            found = memory[key] = kind.from_json(json.loads(body))
        return found


class Found:
    """Records that were read before, for one device and some workloads; neighbours come from the store."""

    def __init__(self, store: Store, workload_keys: Iterable[str]) -> None:
        self._store = store
        self._records: dict[str, list[TuningRecord]] = {key: [] for key in workload_keys}
        self._untrusted: dict[str, list[TuningRecord]] = {}

    def add(self, trust: str, record: TuningRecord) -> None:
        """Take in a record, after those that come before it."""
        kept = self._untrusted if trust == Trust.UNTRUSTED.value else self._records
        kept.setdefault(record.workload.key, []).append(record)

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """As `Store.find_records`, for a workload that was read."""
        return self._records[workload_key]

    def find_untrusted(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """As `Store.find_untrusted`, for a workload that was read."""
        return self._untrusted.get(workload_key, [])

    def neighbours(self, workload: Workload, device_key: str, limit: int = 32) -> list[TuningRecord]:
        """As `Store.neighbours`."""
        return self._store.neighbours(workload, device_key, limit)
