"""Trials: every schedule that was tried, with what came of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from sqlalchemy import ColumnElement, Engine, exc, func, select

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Mark, Parts, Reader, insert_new, lock_bulk_writers, trial_row
from kernelwright.db.tables import TrialRow
from kernelwright.db.trust import Trust
from kernelwright.errors import UsageError
from kernelwright.types import VENDOR_TEMPLATE, Status, Trial

PAGE = 500


@dataclasses.dataclass(frozen=True)
class StoredTrial:
    """A trial with its id in this database; later ones have larger ids."""

    id: int
    trial: Trial


class TrialStore:
    """The trials of a database. Values in and out are frozen."""

    engine: Engine

    def add_trial(self, trial: Trial, job_id: str | None = None) -> bool:
        """Store a trial; it is on disk when this returns. False if one of its key is there already.

        job_id: the job that it belongs to; UsageError if there is no such job.
        """
        return self.add_trials([trial], job_id) == 1

    def add_trials(self, trials: Iterable[Trial], job_id: str | None = None) -> int:
        """Store many, a page to a transaction; returns how many were new."""
        return sum(self._add_page(page, job_id) for page in _pages(trials))

    def _add_page(self, trials: list[Trial], job_id: str | None) -> int:
        parts = Parts()
        rows = [trial_row(trial, parts, job_id) for trial in trials]
        try:
            with session_scope(self.engine, write=True) as session:
                if len(rows) > 1:
                    lock_bulk_writers(session)
                parts.save(session)
                return insert_new(session, TrialRow, rows)
        except exc.IntegrityError as error:
            raise UsageError(f"a trial's job must exist, got {job_id}; submit the job first") from error

    def trials(
        self,
        workload_key: str | None = None,
        device_key: str | None = None,
        toolchain_key: str | None = None,
        operator: str | None = None,
        *,
        trusted: bool = False,
    ) -> Iterator[Trial]:
        """The trials with these keys (None: any), oldest first, read a page at a time.

        trusted: leave out those that were imported without a valid signature.
        """
        wanted = {
            TrialRow.workload_key: workload_key,
            TrialRow.device_key: device_key,
            TrialRow.toolchain_key: toolchain_key,
            TrialRow.operator: operator,
        }
        conditions = [column == value for column, value in wanted.items() if value is not None]
        if trusted:
            conditions.append(TrialRow.trust != Trust.UNTRUSTED.value)
        return self._read_trials(conditions)

    def marked_trials(self, operator: str | None = None, device_key: str | None = None) -> Iterator[tuple[Trial, Mark]]:
        """The trials of this operator and device (None: any), oldest first, with what is known of each."""
        wanted = {TrialRow.operator: operator, TrialRow.device_key: device_key}
        conditions = [column == value for column, value in wanted.items() if value is not None]
        return self._read_marked(conditions)

    def trials_of_job(self, job_id: str, after: int = 0) -> Iterator[Trial]:
        """The trials that a job has stored so far, oldest first; a resumed job need not measure them again.

        after: only those whose id is larger, see `trial_page`.
        """
        return self._read_trials([TrialRow.job_id == job_id], after)

    def trial_page(
        self,
        *,
        workload_key: str | None = None,
        device_key: str | None = None,
        job_id: str | None = None,
        status: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[StoredTrial]:
        """At most `limit` trials with these marks (None: any), oldest first, with their ids.

        after: only those whose id is larger: the last one's id of a page leads to the next.
        """
        wanted = {
            TrialRow.workload_key: workload_key,
            TrialRow.device_key: device_key,
            TrialRow.job_id: job_id,
            TrialRow.status: status,
        }
        conditions = [column == value for column, value in wanted.items() if value is not None]
        query = select(TrialRow).where(TrialRow.id > after, *conditions).order_by(TrialRow.id).limit(limit)
        with session_scope(self.engine) as session:
            rows = session.scalars(query).all()
            return [StoredTrial(row.id, trial) for row, trial in zip(rows, Reader().trials(session, rows), strict=True)]

    def count_trials(self, workload_key: str | None = None, device_key: str | None = None) -> dict[str, int]:
        """How many trials are stored, by status; a status without trials is left out."""
        wanted = {TrialRow.workload_key: workload_key, TrialRow.device_key: device_key}
        conditions = [column == value for column, value in wanted.items() if value is not None]
        query = select(TrialRow.status, func.count()).where(*conditions).group_by(TrialRow.status)
        with session_scope(self.engine) as session:
            return {status: count for status, count in session.execute(query)}

    def pareto(self, workload_key: str, device_key: str, toolchain_key: str | None = None) -> list[Trial]:
        """The trials that no other beats in both time and error, fastest first; the vendor's are not among them.

        toolchain_key: compare only times of this one; None takes the one measured with last.
        """
        place = [TrialRow.workload_key == workload_key, TrialRow.device_key == device_key]
        place += [TrialRow.status == Status.OK.value, TrialRow.schedule.not_like(f'%"template":"{VENDOR_TEMPLATE}"%')]
        with session_scope(self.engine) as session:
            if toolchain_key is None:
                latest = select(TrialRow.toolchain_key).where(*place).order_by(TrialRow.id.desc()).limit(1)
                toolchain_key = session.scalar(latest)
            points = select(TrialRow.id, TrialRow.median_us, TrialRow.error)
            points = points.where(*place, TrialRow.toolchain_key == toolchain_key)
            chosen = pareto_front((row_id, time, error) for row_id, time, error in session.execute(points))
            rows = session.scalars(select(TrialRow).where(TrialRow.id.in_(chosen))).all()
            by_id = {row.id: row for row in rows}
            return Reader().trials(session, [by_id[row_id] for row_id in chosen])

    def _read_trials(self, conditions: list[ColumnElement[bool]], after: int = 0) -> Iterator[Trial]:
        return (trial for trial, _ in self._read_marked(conditions, after))

    def _read_marked(self, conditions: list[ColumnElement[bool]], after: int = 0) -> Iterator[tuple[Trial, Mark]]:
        # No transaction stays open between pages: a slow reader must not keep SQLite's log from being folded in.
        reader = Reader()
        last = after
        while True:
            query = select(TrialRow).where(TrialRow.id > last, *conditions).order_by(TrialRow.id).limit(PAGE)
            with session_scope(self.engine) as session:
                rows = session.scalars(query).all()
                marks = [Mark(Trust(row.trust), row.source) for row in rows]
                page = list(zip(reader.trials(session, rows), marks, strict=True))
                last = rows[-1].id if rows else last
            yield from page
            if len(page) < PAGE:
                return


def pareto_front(points: Iterable[tuple[int, float | None, float | None]]) -> list[int]:
    """The ids of those (id, time, error) that no other beats in both, fastest first; without an error, only the
    fastest of all can be one."""
    front: list[int] = []
    least = math.inf
    ranked = sorted(points, key=lambda point: (_or_inf(point[1]), _or_inf(point[2]), point[0]))
    for row_id, _, error in ranked:
        if not front or _or_inf(error) < least:
            front.append(row_id)
            least = min(least, _or_inf(error))
    return front


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


def _pages(trials: Iterable[Trial]) -> Iterator[list[Trial]]:
    source = iter(trials)
    while page := list(itertools.islice(source, PAGE)):
        yield page
