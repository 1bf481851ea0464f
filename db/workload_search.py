"""Looking through the workloads that trials, records or jobs exist for."""

from __future__ import annotations

import json

from sqlalchemy import Engine, select

from kernelwright.db.engine import session_scope
from kernelwright.db.tables import WorkloadRow
from kernelwright.types import Workload


def workload_page(engine: Engine, operator: str | None = None, after: str = "", limit: int = 100) -> list[Workload]:
    """At most `limit` workloads of this operator (None: any) in the order of their keys, those past `after`."""
    query = select(WorkloadRow.body).where(WorkloadRow.key > after).order_by(WorkloadRow.key).limit(limit)
    if operator is not None:
        query = query.where(WorkloadRow.operator == operator)
    with session_scope(engine) as session:
        return [Workload.from_json(json.loads(body)) for body in session.scalars(query)]


def find_workload(engine: Engine, key: str) -> Workload | None:
    """The workload with this key; None if there is none."""
    with session_scope(engine) as session:
        body = session.scalar(select(WorkloadRow.body).where(WorkloadRow.key == key))
    return None if body is None else Workload.from_json(json.loads(body))
