"""The REST API: `create_app(settings)` puts store, routes, guard, metrics and error handling together."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

from anyio import to_thread
from fastapi import FastAPI

from kernelwright.db import Store
from kernelwright.errors import DatabaseError
from kernelwright.service import dashboard
from kernelwright.service.answering import Answers
from kernelwright.service.auth import KeyRing
from kernelwright.service.best import BestKernels
from kernelwright.service.guard import Guard
from kernelwright.service.job_feed import JobFeed
from kernelwright.service.logs import RequestLog
from kernelwright.service.metrics import LatencyMiddleware, Metrics, StoreCounts
from kernelwright.service.openapi import describe
from kernelwright.service.opening import open_store
from kernelwright.service.problems import install_handlers
from kernelwright.service.routes import catalog, jobs, kernels, operations, workloads
from kernelwright.service.settings import Settings
from kernelwright.service.state import AppState

ROUTERS = (kernels.router, workloads.router, jobs.router, catalog.router, operations.router)
"""Every route of the API."""

NOTE_SECONDS = 300.0
"""Between two notes in the database of what was used. Each one makes it look changed, so that answers are read anew."""

_PAGE = 500

logger = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The app over the database that the settings name; raises DatabaseError when it cannot be opened."""
    store = open_store(settings)
    state = _state(settings, store)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.best.begin()
        noting = asyncio.create_task(_note_uses(state))
        yield
        noting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await noting
        await to_thread.run_sync(_note, state)
        state.best.close()
        store.close()

    app = FastAPI(
        title="Kernelwright",
        summary="The fastest correct kernel for an operator, a shape and a GPU.",
        version=importlib.metadata.version("kernelwright"),
        lifespan=lifespan,
    )
    app.state.shared = state
    install_handlers(app)
    # The last one is the outermost: every request has an id and is counted, refused or not.
    app.add_middleware(Guard, settings=settings, keys=state.keys)
    app.add_middleware(LatencyMiddleware, metrics=state.metrics)
    app.add_middleware(RequestLog)
    for router in ROUTERS:
        app.include_router(router)
    dashboard.install(app)
    describe(app)
    return app


def _state(settings: Settings, store: Store) -> AppState:
    answers = Answers(store, settings.models)
    metrics = Metrics(StoreCounts(store))
    return AppState(
        settings,
        store,
        answers,
        BestKernels(settings, store, answers, metrics),
        JobFeed(store, settings.event_seconds),
        KeyRing(store, settings.require_keys),
        metrics,
    )


async def _note_uses(state: AppState) -> None:
    while True:
        await asyncio.sleep(NOTE_SECONDS)
        await to_thread.run_sync(_note, state)


def _note(state: AppState) -> None:
    """Tell the store which records and keys were used; a database that fails loses the note, never an answer."""
    used, keys = sorted(state.best.take_used()), state.keys.take_used()
    try:
        # Short transactions: a writer elsewhere waits for each of them.
        pages: Any = iter(used)
        while page := list(itertools.islice(pages, _PAGE)):
            state.store.count_use(page)
        if keys:
            state.store.touch_key(keys)
    except DatabaseError as error:
        logger.warning("what was used could not be noted: %s", error)
