"""Looking through the records: by device, type, layout, sizes and outcome, a page at a time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from sqlalchemy import ColumnElement, Double, Engine, Select, and_, case, cast, func, or_, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import InstrumentedAttribute, Session

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Reader
from kernelwright.db.tables import DeviceRow, RecordRow, WorkloadRow
from kernelwright.db.trust import Trust
from kernelwright.errors import UsageError
from kernelwright.types import DeviceSpec, FrozenMap, TuningRecord, canonical_json

ORDERS = ("newest", "speedup", "roofline")
"""How found records can be ordered; by speedup or roofline the largest comes first, those without one last."""

_SHOWN = RecordRow.trust != Trust.QUARANTINED.value


@dataclasses.dataclass(frozen=True)
class RecordFilter:
    """Which records are wanted; None, "" and no dims: any. dtype: element type of the first operand. layouts: of the
    tensors that matter, such as {"a": "row", "b": "col"}. winner: "kernel" or "vendor"."""

    operator: str | None = None
    device_key: str | None = None
    dtype: str | None = None
    layouts: FrozenMap[str] = FrozenMap()
    dims: FrozenMap[int] = FrozenMap()
    winner: str | None = None


def search_records(
    engine: Engine, wanted: RecordFilter, order: str = "newest", limit: int = 50, offset: int = 0
) -> tuple[list[TuningRecord], int]:
    """One page of the records that fit and are not in quarantine, and how many fit in all; UsageError for an order that
    there is not."""
    if order not in ORDERS:
        raise UsageError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    with session_scope(engine) as session:
        found = _fitting(session, wanted)
        total = session.scalar(found.with_only_columns(func.count(RecordRow.id))) or 0
        rows = session.scalars(found.order_by(*_order(session, order)).limit(limit).offset(offset)).all()
        return Reader().records(session, rows), total


def devices_of_records(engine: Engine) -> list[tuple[DeviceSpec, int]]:
    """The devices that have records with how many, most first; devices with one key count as one."""
    counts = (
        select(RecordRow.device_key, func.count(), func.max(RecordRow.device_id))
        .where(_SHOWN)
        .group_by(RecordRow.device_key)
    )
    with session_scope(engine) as session:
        found = session.execute(counts).all()
        wanted = select(DeviceRow.id, DeviceRow.body).where(DeviceRow.id.in_([row[2] for row in found]))
        bodies = {row[0]: row[1] for row in session.execute(wanted)}
    devices = [(DeviceSpec.from_json(json.loads(bodies[name])), count) for _, count, name in found]
    return sorted(devices, key=lambda pair: (-pair[1], pair[0].slug))


def _fitting(session: Session, wanted: RecordFilter) -> Select[Any]:
    query = select(RecordRow).where(_SHOWN)
    exact = {RecordRow.operator: wanted.operator, RecordRow.device_key: wanted.device_key}
    query = query.where(*(column == value for column, value in exact.items() if value))
    texts = _texts(wanted)
    if texts:
        query = query.join(WorkloadRow, WorkloadRow.key == RecordRow.workload_key).where(*texts)
    if wanted.winner:
        wins = _wins(session)
        query = query.where(wins if wanted.winner == "kernel" else ~wins)
    return query


def _texts(wanted: RecordFilter) -> list[ColumnElement[bool]]:
    """Conditions on the canonical JSON of workloads, in which each value has one spelling."""
    found: list[ColumnElement[bool]] = []
    if wanted.dtype:
        found.append(WorkloadRow.body.contains(f'"dtypes":{{"a":{canonical_json(wanted.dtype)},', autoescape=True))
    for name, layout in wanted.layouts.items():
        entry = f"{canonical_json(name)}:{canonical_json(layout)}"
        found.append(WorkloadRow.body.contains(entry, autoescape=True))
    for name, size in wanted.dims.items():
        entry = f"{canonical_json(name)}:{size}"
        ends = (WorkloadRow.dims.contains(entry + end, autoescape=True) for end in (",", "}"))
        found.append(or_(*ends))
    return found


def _number(session: Session, *path: str) -> ColumnElement[float]:
    """A number inside the body of a record, NULL where it has none."""
    body: InstrumentedAttribute[str] = RecordRow.body
    if session.get_bind().dialect.name == "postgresql":
        return cast(func.jsonb_extract_path_text(cast(body, JSONB), *path), Double)
    return cast(func.json_extract(body, "$." + ".".join(path)), Double)


def _speedup(session: Session) -> ColumnElement[float]:
    return _number(session, "vendor_us") / _number(session, "measurement", "median_us")


def _wins(session: Session) -> ColumnElement[bool]:
    """`TuningRecord.winner` as SQL: a body leaves out what equals the default."""
    noise = func.coalesce(_number(session, "noise"), TuningRecord.noise)
    vendor = _number(session, "vendor_us")
    return or_(vendor.is_(None), and_(vendor.is_not(None), _speedup(session) > 1 + noise))


def _order(session: Session, order: str) -> list[ColumnElement[Any]]:
    newest: list[ColumnElement[Any]] = [RecordRow.created.desc(), RecordRow.id.desc()]
    if order == "newest":
        return newest
    figure = _speedup(session) if order == "speedup" else _number(session, "roofline")
    return [case((figure.is_(None), 1), else_=0), figure.desc(), *newest]
