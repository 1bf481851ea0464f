"""Live progress of jobs as server-sent events. Clients at the same place share one look at the database."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable

from anyio import to_thread

from kernelwright.db import Store, StoredTrial
from kernelwright.service.schemas import JobOut
from kernelwright.service.telling import tell_job, tell_trial

HEARTBEAT_SECONDS = 15.0
PAGE = 200
MAX_LOOKS = 1024


@dataclasses.dataclass(frozen=True)
class Look:
    """A job as it was and the trials past a place: events as text, the last trial's number, whether more wait."""

    job: JobOut
    events: str
    last: int
    more: bool


class JobFeed:
    """Reads jobs for those who watch them, each place of each job at most once in `interval` seconds."""

    def __init__(self, store: Store, interval: float) -> None:
        self._store = store
        self._interval = interval
        self._looks: dict[tuple[str, int], tuple[float, asyncio.Task[Look | None]]] = {}

    async def look(self, job_id: str, after: int) -> Look | None:
        """The job now and its trials past number `after`; None if there is no such job."""
        now = time.monotonic()
        made, task = self._looks.get((job_id, after), (float("-inf"), None))
        if task is None or now - made >= self._interval or task.get_loop() is not asyncio.get_running_loop():
            self._forget(now)
            task = asyncio.create_task(to_thread.run_sync(self._read, job_id, after))
            self._looks[job_id, after] = (now, task)
        return await asyncio.shield(task)

    async def events(self, job_id: str, after: int, ended: Callable[[], bool]) -> AsyncIterator[str]:
        """Events from trial number `after` on: "trial" for each trial, "job" whenever the job changed, "end" with its
        last state. Comments keep the line open. Stops early when `ended` says so; the client comes again."""
        yield f"retry: {max(1000, int(2000 * self._interval))}\n\n"
        shown: JobOut | None = None
        quiet_since = time.monotonic()
        while not ended() and (seen := await self.look(job_id, after)) is not None:
            is_over = seen.job.state in ("done", "failed", "cancelled") and not seen.more
            text = seen.events
            if is_over:
                text += event("end", seen.job.model_dump_json())
            elif seen.job != shown:
                text += event("job", seen.job.model_dump_json())
            after, shown = seen.last, seen.job
            if text:
                quiet_since = time.monotonic()
                yield text
            elif time.monotonic() - quiet_since > HEARTBEAT_SECONDS:
                quiet_since = time.monotonic()
                yield ": still here\n\n"
            if is_over:
                return
            if not seen.more:
                await asyncio.sleep(self._interval)

    def _read(self, job_id: str, after: int) -> Look | None:
        # The job first: when it is over by then, all its trials are there to be read.
        job = self._store.get_job(job_id)
        if job is None:
            return None
        trials = self._store.trial_page(job_id=job_id, after=after, limit=PAGE)
        events = "".join(_trial_event(trial) for trial in trials)
        return Look(tell_job(job), events, trials[-1].id if trials else after, len(trials) == PAGE)

    def _forget(self, now: float) -> None:
        if len(self._looks) >= MAX_LOOKS:
            self._looks = {key: look for key, look in self._looks.items() if now - look[0] < self._interval}


def _trial_event(stored: StoredTrial) -> str:
    return event("trial", tell_trial(stored).model_dump_json(), stored.id)


def event(kind: str, data: str, number: int | None = None) -> str:
    """A server-sent event."""
    # JSON of pydantic is one line, as an event's data must be.
    name = "" if number is None else f"id: {number}\n"
    return f"{name}event: {kind}\ndata: {data}\n\n"
