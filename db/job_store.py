"""Jobs: the table is the queue, and every change of state is a compare-and-set."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, Engine, func, select, update
from sqlalchemy.orm import Session, aliased

from kernelwright.db.engine import session_scope
from kernelwright.db.jobs import Job, JobRequest, JobState, states_before
from kernelwright.db.rows import Parts, dialect_insert, iso_from_unix, now, storable
from kernelwright.db.tables import JobRow, WorkloadRow
from kernelwright.errors import UsageError
from kernelwright.types import Workload

MAX_ATTEMPTS = 3


class JobStore:
    """The jobs of a database.

    A worker's name must be its own among all processes, such as host, process id and a random part: it is what tells
    the worker that holds a job from one that lost it.
    """

    engine: Engine

    def submit(self, request: JobRequest, idempotency_key: str | None = None) -> Job:
        """Put a request at the end of the queue.

        idempotency_key: a name that the client gave the request. The job that was made under it is returned instead of
        a second one, however many submit at once; UsageError when that job was made for another request.
        """
        job_id = secrets.token_hex(10)
        parts = Parts()
        parts.add_workload(request.workload)
        with session_scope(self.engine, write=True) as session:
            parts.save(session)
            row = {"id": job_id, "idempotency_key": idempotency_key, **_new_row(request, now(session))}
            session.execute(dialect_insert(session, JobRow).values(row).on_conflict_do_nothing())
            found = JobRow.id == job_id if idempotency_key is None else JobRow.idempotency_key == idempotency_key
            (job,) = _jobs(session, found)
        if job.request() != request:
            raise UsageError(f"the idempotency key {idempotency_key!r} belongs to another request; take a new one")
        return job

    def get_job(self, job_id: str) -> Job | None:
        """The job with this id; None if there is none."""
        with session_scope(self.engine) as session:
            return next(iter(_jobs(session, JobRow.id == job_id)), None)

    def jobs(self, state: str | None = None, limit: int = 100, offset: int = 0, after: str | None = None) -> list[Job]:
        """Jobs in this state (None: any), newest first; UsageError for a state that there is not.

        after: only those older than the job with this id, to go on from a page's last one.
        """
        conditions = [] if state is None else [JobRow.state == _state(state)]
        if after is not None:
            last = aliased(JobRow)
            conditions.append(JobRow.number < select(last.number).where(last.id == after).scalar_subquery())
        with session_scope(self.engine) as session:
            return _jobs(session, *conditions, limit=limit, offset=offset)

    def count_jobs(self) -> dict[str, int]:
        """How many jobs are in each state."""
        with session_scope(self.engine) as session:
            found = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        return {state.value: 0 for state in JobState} | {state: count for state, count in found}

    def claim(self, worker: str, devices: Sequence[str] | None = None) -> Job | None:
        """Take the oldest queued job for `worker`; None when none waits. No two workers ever get the same job.

        devices: take only jobs for these devices, named as in the request (None: any).
        """
        if not worker:
            raise UsageError("a worker needs a name to claim jobs, got an empty one; try host:pid")
        query = select(JobRow.id).where(JobRow.state == JobState.QUEUED).order_by(JobRow.number).limit(1)
        if devices is not None:
            query = query.where(JobRow.device.in_(devices))
        with session_scope(self.engine, write=True) as session:
            # PostgreSQL locks the row and passes over those that others hold; SQLite's write lock is held already.
            job_id = session.scalar(query.with_for_update(skip_locked=True))
            if job_id is None:
                return None
            taken = {"worker": worker, "attempts": JobRow.attempts + 1, "heartbeat_at": now(session)}
            if not _move(session, JobState.RUNNING, JobRow.id == job_id, **taken):
                return None
            return _jobs(session, JobRow.id == job_id)[0]

    def heartbeat(self, job_id: str, worker: str) -> bool:
        """Say that the worker lives. False when the job is no longer its own (cancelled, requeued): it must stop."""
        with session_scope(self.engine, write=True) as session:
            return _touch(session, job_id, worker)

    def progress(self, job_id: str, worker: str, done: int, total: int | None = None) -> bool:
        """Tell how many trials are done, and of how many if known; counts as a heartbeat and answers like one."""
        with session_scope(self.engine, write=True) as session:
            return _touch(session, job_id, worker, done=done, total=total)

    def finish(self, job_id: str, worker: str, record_id: str) -> bool:
        """The worker's job is done and found this record. False when the job is not running for this worker."""
        with session_scope(self.engine, write=True) as session:
            return bool(_move(session, JobState.DONE, *_held(job_id, worker), record_id=record_id, message=""))

    def fail(self, job_id: str, worker: str, message: str) -> bool:
        """The worker's job failed for this reason. False when the job is not running for this worker."""
        with session_scope(self.engine, write=True) as session:
            return bool(_move(session, JobState.FAILED, *_held(job_id, worker), message=storable(message)))

    def release(self, job_id: str, worker: str) -> bool:
        """Put the worker's job back into its place in the queue, as if it had not been claimed: the worker was told
        to stop. False when the job is not running for this worker."""
        back = {"worker": None, "heartbeat_at": None, "attempts": JobRow.attempts - 1}
        with session_scope(self.engine, write=True) as session:
            return bool(_move(session, JobState.QUEUED, *_held(job_id, worker), **back))

    def cancel(self, job_id: str) -> bool:
        """Stop a job that is queued or running; its worker learns it from the next heartbeat. False if it ended."""
        with session_scope(self.engine, write=True) as session:
            return bool(_move(session, JobState.CANCELLED, JobRow.id == job_id))

    def requeue_stale(self, older_than_seconds: float, max_attempts: int = MAX_ATTEMPTS) -> int:
        """Put running jobs without a heartbeat for so long back into their place in the queue; how many that were.

        A job that was claimed `max_attempts` times fails instead: it may be what kills its workers.
        """
        with session_scope(self.engine, write=True) as session:
            stale = JobRow.heartbeat_at <= now(session) - older_than_seconds
            lost = f"its worker went away {max_attempts} times; see the worker's log, then submit it again"
            _move(session, JobState.FAILED, stale, JobRow.attempts >= max_attempts, message=lost)
            return _move(session, JobState.QUEUED, stale, worker=None, heartbeat_at=None)


def _new_row(request: JobRequest, moment: ColumnElement[float]) -> dict[str, Any]:
    return {
        "state": JobState.QUEUED.value,
        "workload_key": request.workload.key,
        "device": request.device,
        "strategy": request.strategy,
        "trials": request.trials,
        "seconds": request.seconds,
        "seed": request.seed,
        "attempts": 0,
        "created_at": moment,
        "updated_at": moment,
        "message": "",
        "done": 0,
        "total": request.trials,
    }


def _held(job_id: str, worker: str) -> tuple[ColumnElement[bool], ...]:
    return (JobRow.id == job_id, JobRow.worker == worker)


def _move(session: Session, to: JobState, *conditions: ColumnElement[bool], **values: Any) -> int:
    """Compare-and-set: only jobs in a state that may precede `to` change; returns how many did."""
    allowed = JobRow.state.in_([state.value for state in states_before(to)])
    return _change(session, allowed, *conditions, state=to.value, **values)


def _touch(session: Session, job_id: str, worker: str, **values: Any) -> bool:
    running = JobRow.state == JobState.RUNNING
    return _change(session, running, *_held(job_id, worker), heartbeat_at=now(session), **values) == 1


def _change(session: Session, *conditions: ColumnElement[bool], **values: Any) -> int:
    statement = update(JobRow).where(*conditions).values(updated_at=now(session), **values)
    result = session.execute(statement, execution_options={"synchronize_session": False})
    return cast("CursorResult[Any]", result).rowcount


def _jobs(session: Session, *conditions: ColumnElement[bool], limit: int | None = None, offset: int = 0) -> list[Job]:
    query = (
        select(JobRow, WorkloadRow.body)
        .join(WorkloadRow, WorkloadRow.key == JobRow.workload_key)
        .where(*conditions)
        .order_by(JobRow.number.desc())
        .limit(limit)
        .offset(offset)
    )
    return [_job(row, body) for row, body in session.execute(query)]


def _job(row: JobRow, workload: str) -> Job:
    return Job(
        id=row.id,
        state=JobState(row.state),
        workload=Workload.from_json(json.loads(workload)),
        device=row.device,
        strategy=row.strategy,
        trials=row.trials,
        seconds=row.seconds,
        seed=row.seed,
        worker=row.worker,
        attempts=row.attempts,
        heartbeat_at=None if row.heartbeat_at is None else iso_from_unix(row.heartbeat_at),
        created_at=iso_from_unix(row.created_at),
        updated_at=iso_from_unix(row.updated_at),
        message=row.message,
        record_id=row.record_id,
        done=row.done,
        total=row.total,
    )


def _state(name: str) -> str:
    try:
        return JobState(name).value
    except ValueError as error:
        raise UsageError(f"a job's state must be one of {', '.join(JobState)}, got {name!r}") from error
