"""What every route of one app shares."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import Depends, Request

from kernelwright.db import Store
from kernelwright.service.answering import Answers
from kernelwright.service.metrics import Metrics
from kernelwright.service.settings import Settings


@dataclasses.dataclass(frozen=True)
class AppState:
    """The store, who answers from it, and the counters."""

    settings: Settings
    store: Store
    answers: Answers
    metrics: Metrics


def app_state(request: Request) -> AppState:
    """The state of the app that serves the request."""
    state: AppState = request.app.state.shared
    return state


State = Annotated[AppState, Depends(app_state)]
"""A route's parameter of this type gets the app's state."""
