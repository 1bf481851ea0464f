"""Between frozen values and rows: the parts that many trials and records share are stored once."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, Float, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from kernelwright.db.tables import Base, DeviceRow, RecordRow, ToolchainRow, TrialRow, WorkloadRow
from kernelwright.types import (
    DeviceSpec,
    Measurement,
    Schedule,
    Toolchain,
    Trial,
    TuningRecord,
    Workload,
    canonical_json,
    digest,
)

_PARTS = ("workload", "device", "toolchain")


def dialect_insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """The insert of the session's database; both kinds offer the same on_conflict methods."""
    make = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    return make(cast(Table, table.__table__))


def insert_new(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> int:
    """Insert the rows whose unique key is not there yet, and return how many that were.

    Rows come sorted by key, so that two writers never wait for each other in a circle.
    """
    if not rows:
        return 0
    statement = dialect_insert(session, table).on_conflict_do_nothing()
    first_column = next(iter(cast(Table, table.__table__).primary_key))
    return len(session.execute(statement.returning(first_column), rows).all())


def now(session: Session) -> ColumnElement[float]:
    """Unix seconds by the database's clock, as an SQL expression."""
    if session.get_bind().dialect.name == "postgresql":
        return func.extract("epoch", func.clock_timestamp()).cast(Float)
    return (func.julianday("now", type_=Float) - 2440587.5) * 86400.0


def iso_from_unix(moment: float) -> str:
    """UTC, ISO 8601 with milliseconds."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat(timespec="milliseconds")


def unix_from_iso(moment: str) -> float:
    """Unix seconds; a moment without time zone is UTC, and text that is no moment counts as the oldest, 0.0."""
    try:
        parsed = datetime.datetime.fromisoformat(moment)
    except ValueError:
        return 0.0
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)).timestamp()


def family(workload: Workload) -> str:
    """Digest of everything but the sizes: workloads of one family differ in their dimensions only."""
    return digest({name: value for name, value in workload.to_json().items() if name != "dims"})


def device_id(device: DeviceSpec) -> str:
    """Digest of every field, unlike the key: devices that only differ in name are told apart."""
    return digest(device.to_json())


class Parts:
    """Distinct workloads, devices and toolchains by digest, to be stored before what refers to them."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def collect(self, owner: Trial | TuningRecord) -> None:
        """Take in the three parts of a trial or record."""
        self.collect_workload(owner.workload)
        self._devices[device_id(owner.device)] = owner.device
        self._toolchains[owner.toolchain.key] = owner.toolchain

    def collect_workload(self, workload: Workload) -> None:
        """Take in a workload."""
        self._workloads[workload.key] = workload

    def save(self, session: Session) -> None:
        """Insert what is new."""
        insert_new(session, WorkloadRow, [_workload_row(key, w) for key, w in sorted(self._workloads.items())])
        devices = [
            {"id": key, "key": d.key, "slug": d.slug, "body": canonical_json(d.to_json())}
            for key, d in sorted(self._devices.items(), key=lambda item: item[0])
        ]
        insert_new(session, DeviceRow, devices)
        toolchains = [{"key": key, "body": canonical_json(t.to_json())} for key, t in sorted(self._toolchains.items())]
        insert_new(session, ToolchainRow, toolchains)


def parts_of(owners: Iterable[Trial | TuningRecord]) -> Parts:
    """The parts of several trials or records."""
    parts = Parts()
    for owner in owners:
        parts.collect(owner)
    return parts


def _workload_row(key: str, workload: Workload) -> dict[str, Any]:
    body = workload.to_json()
    dims = canonical_json(dict(workload.dims))
    return {"key": key, "operator": workload.operator, "dims": dims, "body": canonical_json(body)}


def _columns_of_parts(owner: Trial | TuningRecord) -> dict[str, Any]:
    return {
        "key": owner.key,
        "workload_key": owner.workload.key,
        "device_id": device_id(owner.device),
        "device_key": owner.device.key,
        "toolchain_key": owner.toolchain.key,
        "operator": owner.workload.operator,
    }


def trial_row(trial: Trial, job_id: str | None) -> dict[str, Any]:
    """The columns of a trial."""
    return _columns_of_parts(trial) | {
        "status": trial.measurement.status.value,
        "median_us": trial.measurement.median_us,
        "schedule": canonical_json(trial.schedule.to_json()),
        "measurement": canonical_json(trial.measurement.to_json()),
        "origin": trial.origin,
        "template_fingerprint": trial.template_fingerprint,
        "measured_at": trial.measured_at,
        "job_id": job_id,
    }


def record_row(record: TuningRecord) -> dict[str, Any]:
    """The columns of a record; its body leaves out the parts."""
    body = {name: value for name, value in record.to_json().items() if name not in _PARTS}
    return _columns_of_parts(record) | {
        "family": family(record.workload),
        "created": unix_from_iso(record.created_at),
        "body": canonical_json(body),
    }


class Reader:
    """Turns rows into values; each workload, device and toolchain is read and parsed once."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def trials(self, session: Session, rows: Sequence[TrialRow]) -> list[Trial]:
        """The trials of these rows."""
        self._load(session, rows)
        return [
            Trial(
                workload=self._workloads[row.workload_key],
                device=self._devices[row.device_id],
                toolchain=self._toolchains[row.toolchain_key],
                schedule=Schedule.from_json(json.loads(row.schedule)),
                measurement=Measurement.from_json(json.loads(row.measurement)),
                origin=row.origin,
                template_fingerprint=row.template_fingerprint,
                measured_at=row.measured_at,
            )
            for row in rows
        ]

    def records(self, session: Session, rows: Sequence[RecordRow]) -> list[TuningRecord]:
        """The records of these rows."""
        self._load(session, rows)
        return [self._record(row) for row in rows]

    def _record(self, row: RecordRow) -> TuningRecord:
        body = json.loads(row.body)
        for name, kind in (("schedule", Schedule), ("measurement", Measurement), ("runner_up", Schedule)):
            if body.get(name) is not None:
                body[name] = kind.from_json(body[name])
        return TuningRecord(
            workload=self._workloads[row.workload_key],
            device=self._devices[row.device_id],
            toolchain=self._toolchains[row.toolchain_key],
            **body,
        )

    def _load(self, session: Session, rows: Sequence[TrialRow] | Sequence[RecordRow]) -> None:
        workloads = {row.workload_key for row in rows} - self._workloads.keys()
        for key, body in _bodies(session, WorkloadRow.key, WorkloadRow.body, workloads):
            self._workloads[key] = Workload.from_json(body)
        devices = {row.device_id for row in rows} - self._devices.keys()
        for key, body in _bodies(session, DeviceRow.id, DeviceRow.body, devices):
            self._devices[key] = DeviceSpec.from_json(body)
        toolchains = {row.toolchain_key for row in rows} - self._toolchains.keys()
        for key, body in _bodies(session, ToolchainRow.key, ToolchainRow.body, toolchains):
            self._toolchains[key] = Toolchain.from_json(body)


def _bodies(
    session: Session, key: InstrumentedAttribute[str], body: InstrumentedAttribute[str], wanted: set[str]
) -> list[tuple[str, dict[str, Any]]]:
    if not wanted:
        return []
    return [(found, json.loads(text)) for found, text in session.execute(select(key, body).where(key.in_(wanted)))]
