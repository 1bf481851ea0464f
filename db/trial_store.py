"""Trials: every schedule that was tried, with what came of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from sqlalchemy import ColumnElement, Engine, exc, func, select

from kernelwright.db.engine import session_scope
from kernelwright.db.rows import Parts, Reader, insert_new, lock_bulk_writers, trial_row
from kernelwright.db.tables import TrialRow
from kernelwright.errors import UsageError
from kernelwright.types import Trial

PAGE = 500


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
    ) -> Iterator[Trial]:
        """The trials with these keys (None: any), oldest first, read a page at a time."""
        wanted = {
            TrialRow.workload_key: workload_key,
            TrialRow.device_key: device_key,
            TrialRow.toolchain_key: toolchain_key,
            TrialRow.operator: operator,
        }
        return self._read_trials([column == value for column, value in wanted.items() if value is not None])

    def trials_of_job(self, job_id: str) -> Iterator[Trial]:
        """The trials that a job has stored so far, oldest first; a resumed job need not measure them again."""
        return self._read_trials([TrialRow.job_id == job_id])

    def count_trials(self) -> dict[str, int]:
        """How many trials are stored, by status; a status without trials is left out."""
        with session_scope(self.engine) as session:
            found = session.execute(select(TrialRow.status, func.count()).group_by(TrialRow.status)).all()
        return {status: count for status, count in found}

    def _read_trials(self, conditions: list[ColumnElement[bool]]) -> Iterator[Trial]:
        # No transaction stays open between pages: a slow reader must not keep SQLite's log from being folded in.
        reader = Reader()
        last = 0
        while True:
            query = select(TrialRow).where(TrialRow.id > last, *conditions).order_by(TrialRow.id).limit(PAGE)
            with session_scope(self.engine) as session:
                rows = session.scalars(query).all()
                page = reader.trials(session, rows)
                last = rows[-1].id if rows else last
            yield from page
            if len(page) < PAGE:
                return


def _pages(trials: Iterable[Trial]) -> Iterator[list[Trial]]:
    source = iter(trials)
    while page := list(itertools.islice(source, PAGE)):
        yield page
