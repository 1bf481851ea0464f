"""The records of one workload or many in one statement, and those near it: every question to a service begins so.

Rows are turned into values when they are asked for; devices and toolchains, which never change, are remembered.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy.engine.interfaces import DBAPICursor

from kernelwright.db.nearby import nearest_rows
from kernelwright.db.rows import own_fields
from kernelwright.db.store import Store
from kernelwright.db.trust import Trust
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
_NEAR = (
    "SELECT records.id, dims, device_id, toolchain_key, records.body FROM records "
    "JOIN workloads ON workloads.key = workload_key WHERE records.id IN ({})"
)
_DEVICE = "SELECT body FROM devices WHERE id = {}"
_TOOLCHAIN = "SELECT body FROM toolchains WHERE key = {}"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A record as it was read; the body is its JSON."""

    trust: str
    device: DeviceSpec
    toolchain: Toolchain
    body: str

    def record(self, workload: Workload) -> TuningRecord:
        """The record, which is of this workload."""
        return TuningRecord(workload=workload, device=self.device, toolchain=self.toolchain, **own_fields(self.body))


class RecordLookup:
    """Reads the records of given workloads. Threads may share it."""

    def __init__(self, store: Store) -> None:
        self._reads = store.direct
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def find(self, workloads: Sequence[Workload], device_key: str) -> Found:
        """The records of these workloads on a device that are not in quarantine; raises DatabaseUnavailable."""
        by_key = {workload.key: workload for workload in workloads}
        return Found(self, by_key, self._reads.run(lambda cursor: self._rows(cursor, list(by_key), device_key)))

    def find_at_once(self, workload: Workload, device_key: str) -> Found | None:
        """As `find`; None where that might take a while, so that an event loop may call it."""
        rows = self._reads.run_at_once(lambda cursor: self._rows(cursor, [workload.key], device_key))
        return None if rows is None else Found(self, {workload.key: workload}, rows)

    async def find_soon(self, workload: Workload, device_key: str) -> Found | None:
        """As `find`, by the event loop itself; None where it cannot."""
        rows = await self._reads.run_soon(_FIND.replace("{}", self._reads.mark), (device_key, workload.key))
        if rows is None or any(row[1] not in self._devices or row[2] not in self._toolchains for row in rows):
            return None
        found = [
            Row(trust, self._devices[device], self._toolchains[tool], body) for _, device, tool, body, trust in rows
        ]
        return Found(self, {workload.key: workload}, {workload.key: found})

    def neighbours(self, workload: Workload, device_key: str, limit: int = 16) -> list[TuningRecord]:
        """As `Store.neighbours`."""
        return self._reads.run(lambda cursor: self._neighbours(cursor, workload, device_key, limit))

    def _rows(self, cursor: DBAPICursor, keys: Sequence[str], device_key: str) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for start in range(0, len(keys), PAGE):
            page = keys[start : start + PAGE]
            query = _FIND.format("{}", ",".join(["{}"] * len(page)))
            for key, device, toolchain, body, trust in self._execute(cursor, query, (device_key, *page)):
                found.setdefault(key, []).append(self._row(cursor, trust, device, toolchain, body))
        return found

    def _neighbours(self, cursor: DBAPICursor, workload: Workload, device_key: str, limit: int) -> list[TuningRecord]:
        chosen = nearest_rows(lambda *query: self._execute(cursor, *query), workload, device_key, limit)
        if not chosen:
            return []
        found = {}
        for number, dims, device, toolchain, body in self._execute(
            cursor, _NEAR.format(",".join(["{}"] * len(chosen))), tuple(chosen)
        ):
            other = dataclasses.replace(workload, dims=json.loads(dims))
            found[number] = self._row(cursor, Trust.MEASURED.value, device, toolchain, body).record(other)
        return [found[number] for number in chosen]

    def _execute(self, cursor: DBAPICursor, words: str, values: tuple[Any, ...]) -> Sequence[Sequence[Any]]:
        cursor.execute(words.replace("{}", self._reads.mark), values)
        return cursor.fetchall()

    def _row(self, cursor: DBAPICursor, trust: str, device: str, toolchain: str, body: str) -> Row:
        return Row(
            trust,
            self._devices.get(device) or self._part(cursor, self._devices, DeviceSpec, _DEVICE, device),
            self._toolchains.get(toolchain) or self._part(cursor, self._toolchains, Toolchain, _TOOLCHAIN, toolchain),
            body,
        )

    def _part(self, cursor: DBAPICursor, memory: dict[str, T], kind: type[T], query: str, key: str) -> T:
        ((body,),) = self._execute(cursor, query, (key,))
        found = memory[key] = kind.from_json(json.loads(body))
        return found


class Found:
    """Records that were read before, for one device and some workloads; neighbours are read when they are asked for."""

    def __init__(self, lookup: RecordLookup, workloads: dict[str, Workload], rows: dict[str, list[Row]]) -> None:
        self._lookup = lookup
        self._workloads = workloads
        self._rows = rows

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """As `Store.find_records`, for a workload that was read."""
        return self._records(workload_key, untrusted=False)

    def find_untrusted(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """As `Store.find_untrusted`, for a workload that was read."""
        return self._records(workload_key, untrusted=True)

    def neighbours(self, workload: Workload, device_key: str, limit: int = 16) -> list[TuningRecord]:
        """As `Store.neighbours`."""
        return self._lookup.neighbours(workload, device_key, limit)

    def _records(self, key: str, untrusted: bool) -> list[TuningRecord]:
        workload = self._workloads[key]
        rows: Iterable[Row] = self._rows.get(key, ())
        return [row.record(workload) for row in rows if (row.trust == Trust.UNTRUSTED.value) is untrusted]
