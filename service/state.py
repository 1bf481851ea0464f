"""What every route of one app shares."""

from __future__ import annotations

import dataclasses
import threading
from typing import Annotated

from fastapi import Depends, Request

from kernelwright.db import Store
from kernelwright.service.answering import Answers
from kernelwright.service.auth import KeyRing, Principal
from kernelwright.service.best import BestKernels
from kernelwright.service.job_feed import JobFeed
from kernelwright.service.metrics import Metrics
from kernelwright.service.settings import Settings


@dataclasses.dataclass(frozen=True)
class AppState:
    """The store, who answers from it, who watches jobs, the keys, and the counters.

    stopping: set when the process is told to end, so that streams do.
    """

    settings: Settings
    store: Store
    answers: Answers
    best: BestKernels
    feed: JobFeed
    keys: KeyRing
    metrics: Metrics
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)


def app_state(request: Request) -> AppState:
    """The state of the app that serves the request."""
    state: AppState = request.app.state.shared
    return state


def principal(request: Request) -> Principal | None:
    """Who asks; None for somebody without a key at an open path of a service that asks for keys."""
    found: Principal | None = request.scope.get("state", {}).get("principal")
    return found


def who(request: Request) -> str:
    """Who asks, for the audit log: the id of a key, or "open"."""
    found = principal(request)
    return "open" if found is None or found.id.startswith("open:") else found.id


State = Annotated[AppState, Depends(app_state)]
"""A route's parameter of this type gets the app's state."""

Who = Annotated[str, Depends(who)]
"""A route's parameter of this type gets who asks."""
