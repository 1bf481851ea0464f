"""Between frozen values and rows: the parts that many trials and records share are stored once."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Double, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from kernelwright.db.places import place
from kernelwright.db.tables import Base, DeviceRow, RecordRow, ToolchainRow, TrialRow, WorkloadRow
from kernelwright.db.trust import Trust
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

T = TypeVar("T")

MOST_REMEMBERED = 4096
"""Parts of each kind that a reader remembers."""

# Any number will do, as long as every release takes the same one.
_BULK_LOCK = 7_305_808_870
_PARTS = ("workload", "device", "toolchain")


def dialect_insert(session: Session, table: type[Base]) -> sqlite.Insert | postgresql.Insert:
    """The insert of the session's database; both kinds offer the same on_conflict methods."""
    make = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    return make(cast(Table, table.__table__))


def insert_new(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> int:
    """Insert the rows whose unique key is not there yet, in their order, and return how many that were."""
    if not rows:
        return 0
    statement = dialect_insert(session, table).on_conflict_do_nothing()
    (first_column,) = cast(Table, table.__table__).primary_key
    return len(session.execute(statement.returning(first_column), rows).all())


def lock_bulk_writers(session: Session) -> None:
    """Let one transaction at a time insert many trials, or two with the same ones could wait for each other.

    SQLite has one writer anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_BULK_LOCK)))


def now(session: Session) -> ColumnElement[float]:
    """Unix seconds by the database's clock, as an SQL expression."""
    if session.get_bind().dialect.name == "postgresql":
        return func.extract("epoch", func.clock_timestamp()).cast(Double)
    return (func.julianday("now", type_=Double) - 2440587.5) * 86400.0


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


def storable(text: str) -> str:
    """The text without what PostgreSQL cannot hold, NUL and halves of surrogate pairs: a dying compiler prints any."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def family(workload: Workload) -> str:
    """Digest of everything but the sizes: workloads of one family differ in their dimensions only."""
    return digest({name: value for name, value in workload.to_json().items() if name != "dims"})


def device_id(device: DeviceSpec) -> str:
    """Digest of every field, unlike the key: devices that only differ in name are told apart."""
    return digest(device.to_json())


@dataclasses.dataclass(frozen=True)
class Mark:
    """How far what is stored may be relied on, and what brought it."""

    trust: Trust = Trust.MEASURED
    source: str = ""


OWN = Mark()


class Parts:
    """Distinct workloads, devices and toolchains by digest, to be stored before what refers to them."""

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def columns(self, owner: Trial | TuningRecord) -> dict[str, Any]:
        """Take in the parts of a trial or record; returns the columns that name them, and it."""
        toolchain_key = owner.toolchain.key
        own_device_id = device_id(owner.device)
        self._toolchains[toolchain_key] = owner.toolchain
        self._devices[own_device_id] = owner.device
        return {
            "key": owner.key,
            "workload_key": self.add_workload(owner.workload),
            "device_id": own_device_id,
            "device_key": owner.device.key,
            "toolchain_key": toolchain_key,
            "operator": owner.workload.operator,
        }

    def add_workload(self, workload: Workload) -> str:
        """Take in a workload; returns its key."""
        key = workload.key
        self._workloads[key] = workload
        return key

    def save(self, session: Session) -> None:
        """Insert what is new, by kind and in the order of the keys, so that no two writers wait in a circle."""
        insert_new(session, WorkloadRow, [_workload_row(key, w) for key, w in sorted(self._workloads.items())])
        devices = [
            {"id": key, "key": d.key, "slug": d.slug, "body": canonical_json(d.to_json())}
            for key, d in sorted(self._devices.items(), key=lambda item: item[0])
        ]
        insert_new(session, DeviceRow, devices)
        toolchains = [{"key": key, "body": canonical_json(t.to_json())} for key, t in sorted(self._toolchains.items())]
        insert_new(session, ToolchainRow, toolchains)


def _workload_row(key: str, workload: Workload) -> dict[str, Any]:
    body = workload.to_json()
    dims = canonical_json(dict(workload.dims))
    return {"key": key, "operator": workload.operator, "dims": dims, "body": canonical_json(body)}


def trial_row(trial: Trial, parts: Parts, job_id: str | None = None, mark: Mark = OWN) -> dict[str, Any]:
    """The columns of a trial, whose parts go to `parts`."""
    return parts.columns(trial) | {
        "status": trial.measurement.status.value,
        "median_us": trial.measurement.median_us,
        "schedule": canonical_json(trial.schedule.to_json()),
        "measurement": canonical_json(trial.measurement.to_json()),
        "origin": trial.origin,
        "template_fingerprint": trial.template_fingerprint,
        "measured_at": trial.measured_at,
        "job_id": job_id,
        "error": trial.measurement.error if trial.measurement.ok else None,
        "trust": mark.trust.value,
        "source": mark.source,
    }


def record_row(record: TuningRecord, parts: Parts, mark: Mark = OWN) -> dict[str, Any]:
    """The columns of a record, whose parts go to `parts` and not into its body."""
    body = {name: value for name, value in record.to_json().items() if name not in _PARTS}
    return parts.columns(record) | {
        "family": family(record.workload),
        "created": unix_from_iso(record.created_at),
        "body": canonical_json(body),
        "place": place(record.workload.dims),
        "template": record.schedule.template,
        "template_fingerprint": record.template_fingerprint,
        "trust": mark.trust.value,
        "source": mark.source,
        "reason": "",
    }


class Reader:
    """Turns rows into values; each workload, device and toolchain is read and parsed once while it is remembered.

    May be shared between threads.
    """

    def __init__(self) -> None:
        self._workloads: dict[str, Workload] = {}
        self._devices: dict[str, DeviceSpec] = {}
        self._toolchains: dict[str, Toolchain] = {}

    def trials(self, session: Session, rows: Sequence[TrialRow]) -> list[Trial]:
        """The trials of these rows."""
        workloads, devices, toolchains = self._load(session, rows)
        return [
            Trial(
                workload=workloads[row.workload_key],
                device=devices[row.device_id],
                toolchain=toolchains[row.toolchain_key],
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
        workloads, devices, toolchains = self._load(session, rows)
        return [
            TuningRecord(
                workload=workloads[row.workload_key],
                device=devices[row.device_id],
                toolchain=toolchains[row.toolchain_key],
                **own_fields(row.body),
            )
            for row in rows
        ]

    def _load(
        self, session: Session, rows: Sequence[TrialRow] | Sequence[RecordRow]
    ) -> tuple[Mapping[str, Workload], Mapping[str, DeviceSpec], Mapping[str, Toolchain]]:
        return (
            _remembered(
                self._workloads,
                {row.workload_key for row in rows},
                lambda keys: _bodies(session, WorkloadRow.key, WorkloadRow.body, keys),
                Workload.from_json,
            ),
            _remembered(
                self._devices,
                {row.device_id for row in rows},
                lambda keys: _bodies(session, DeviceRow.id, DeviceRow.body, keys),
                DeviceSpec.from_json,
            ),
            _remembered(
                self._toolchains,
                {row.toolchain_key for row in rows},
                lambda keys: _bodies(session, ToolchainRow.key, ToolchainRow.body, keys),
                Toolchain.from_json,
            ),
        )


def own_fields(text: str) -> dict[str, Any]:
    """The fields of a record that its row's body holds."""
    body: dict[str, Any] = json.loads(text)
    body["schedule"] = Schedule(**body["schedule"])
    body["measurement"] = Measurement(**body["measurement"])
    if body.get("runner_up") is not None:
        body["runner_up"] = Schedule(**body["runner_up"])
    return body


def _remembered(
    memory: dict[str, T],
    wanted: set[str],
    read: Callable[[set[str]], list[tuple[str, dict[str, Any]]]],
    parse: Callable[[dict[str, Any]], T],
) -> dict[str, T]:
    """The wanted parts, from memory or read; what another thread forgets meanwhile does not matter."""
    found = {key: part for key in wanted if (part := memory.get(key)) is not None}
    found |= {key: parse(body) for key, body in read(wanted - found.keys())}
    if len(memory) > MOST_REMEMBERED:
        memory.clear()
    memory.update(found)
    return found


def _bodies(
    session: Session, key: InstrumentedAttribute[str], body: InstrumentedAttribute[str], wanted: set[str]
) -> list[tuple[str, dict[str, Any]]]:
    if not wanted:
        return []
    return [(found, json.loads(text)) for found, text in session.execute(select(key, body).where(key.in_(wanted)))]
