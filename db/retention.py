"""Letting go of trials that nobody will need, so that a database does not grow for ever."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from kernelwright.db.engine import session_scope
from kernelwright.db.jobs import JobState
from kernelwright.db.store import Store
from kernelwright.db.tables import JobRow, RecordRow, TrialRow
from kernelwright.db.trial_store import pareto_front
from kernelwright.errors import UsageError
from kernelwright.types import canonical_json

SAMPLE = 32
"""Trials of each place that are kept for training, by default."""

_CHUNK = 500

Place = tuple[str, str, str]
"""Keys of a workload, a device and a toolchain."""


@dataclasses.dataclass(frozen=True)
class Pruned:
    """How many trials there were, and why those that stay do: each is counted once, by the first of the reasons."""

    trials: int = 0
    winners: int = 0
    pareto: int = 0
    running: int = 0
    sample: int = 0
    removed: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def prune(store: Store, sample: int = SAMPLE, seed: int = 0, *, dry_run: bool = False) -> Pruned:
    """Remove trials; records all stay.

    Of each workload, device and toolchain these trials stay: of a record's schedule or its runner-up; those that no
    other beats in both time and error; those of a job that has not ended; and `sample` more, failures among them, drawn
    by `seed`: the same ones as long as the seed and the trials are the same. dry_run: only count.
    """
    if sample < 0:
        raise UsageError(f"sample must be 0 or more, got {sample}")
    done = Pruned()
    for place in _places(store):
        with session_scope(store.engine, write=not dry_run) as session:
            removable, counts = _sort_out(session, place, sample, seed)
            done += counts
            if not dry_run:
                for start in range(0, len(removable), _CHUNK):
                    session.execute(delete(TrialRow).where(TrialRow.id.in_(removable[start : start + _CHUNK])))
    return done


def _places(store: Store) -> list[Place]:
    columns = (TrialRow.workload_key, TrialRow.device_key, TrialRow.toolchain_key)
    with session_scope(store.engine) as session:
        return [(w, d, t) for w, d, t in session.execute(select(*columns).distinct().order_by(*columns))]


def _sort_out(session: Session, place: Place, sample: int, seed: int) -> tuple[list[int], Pruned]:
    """(ids of the trials of one place that may go, counts)."""
    columns = (TrialRow.id, TrialRow.key, TrialRow.median_us, TrialRow.error, TrialRow.schedule, JobRow.state)
    query = select(*columns).outerjoin(JobRow, JobRow.id == TrialRow.job_id).where(*_at(TrialRow, place))
    trials = session.execute(query.order_by(TrialRow.id)).all()
    crowned = _crowned(session, place)
    winners = {row.id for row in trials if row.schedule in crowned}
    pareto = set(pareto_front((row.id, row.median_us, row.error) for row in trials if row.median_us is not None))
    open_states = [state.value for state in JobState if not state.is_final]
    running = {row.id for row in trials if row.state in open_states}
    rest = [row for row in trials if row.id not in winners | pareto | running]
    drawn = {row.id for row in heapq.nsmallest(sample, rest, key=lambda row: _draw(row.key, seed))}
    removable = [row.id for row in rest if row.id not in drawn]
    counts = Pruned(
        trials=len(trials),
        winners=len(winners),
        pareto=len(pareto - winners),
        running=len(running - winners - pareto),
        sample=len(drawn),
        removed=len(removable),
    )
    return removable, counts


def _at(table: type[TrialRow] | type[RecordRow], place: Place) -> list[ColumnElement[bool]]:
    columns = (table.workload_key, table.device_key, table.toolchain_key)
    return [column == value for column, value in zip(columns, place, strict=True)]


def _crowned(session: Session, place: Place) -> set[str]:
    """Schedules of the place's records and of their runners-up, as the column of trials has them."""
    bodies = map(json.loads, session.scalars(select(RecordRow.body).where(*_at(RecordRow, place))))
    return {canonical_json(body[name]) for body in bodies for name in ("schedule", "runner_up") if body.get(name)}


def _draw(key: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{key}".encode()).digest()
