"""Jobs: a tuning request, and the states that it goes through."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from kernelwright.errors import UsageError
from kernelwright.types import Workload


class JobState(enum.StrEnum):
    """Where a job is. DONE, FAILED and CANCELLED are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen to the job."""
        return not TRANSITIONS[self]


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.DONE, JobState.FAILED, JobState.CANCELLED}),
    JobState.DONE: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""The states that may follow each state. A running job goes back to the queue when its worker died."""


def states_before(state: JobState) -> list[JobState]:
    """The states from which a job may go to `state`."""
    return [before for before, after in TRANSITIONS.items() if state in after]


@dataclasses.dataclass(frozen=True)
class JobRequest:
    """What to tune.

    device: as the user typed it, such as "replay:h100" or "cuda:1". trials, seconds: the budget, None means no limit
    of that sort. UsageError when a limit is not above 0.
    """

    workload: Workload
    device: str
    strategy: str = "model"
    trials: int | None = None
    seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.device:
            raise UsageError("a job needs a device, got an empty name; try replay:h100 or cuda")
        for name, limit in (("trials", self.trials), ("seconds", self.seconds)):
            if limit is not None and not limit > 0:
                raise UsageError(f"{name} must be above 0, got {limit}; leave it out for no limit")


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as it was when it was read. Moments are UTC, ISO 8601, by the database's clock.

    worker: who runs it, or ran it last; None while it is queued. attempts: how often it was claimed.
    done, total: progress in trials. message: why it failed. record_id: the winner that it found.
    """

    id: str
    state: JobState
    workload: Workload
    device: str
    strategy: str
    trials: int | None
    seconds: float | None
    seed: int
    worker: str | None
    attempts: int
    heartbeat_at: str | None
    created_at: str
    updated_at: str
    message: str
    record_id: str | None
    done: int
    total: int | None

    def request(self) -> JobRequest:
        """What was asked for."""
        names = (field.name for field in dataclasses.fields(JobRequest))
        return JobRequest(**{name: getattr(self, name) for name in names})
