"""The REST API: `create_app(settings)` puts store, routes, metrics and error handling together."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI

from kernelwright.db import Store
from kernelwright.service.answering import Answers
from kernelwright.service.metrics import LatencyMiddleware, Metrics
from kernelwright.service.problems import install_handlers
from kernelwright.service.routes import catalog, jobs, kernels, operations
from kernelwright.service.settings import Settings
from kernelwright.service.state import AppState

ROUTERS = (kernels.router, jobs.router, catalog.router, operations.router)
"""Every route of the API."""


def create_app(settings: Settings) -> FastAPI:
    """The app over the database that the settings name; raises DatabaseError when it cannot be opened."""
    store = Store.open(settings.db)
    state = AppState(settings, store, Answers(store), Metrics(lambda: _counts(store)))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        store.close()

    app = FastAPI(
        title="Kernelwright",
        summary="The fastest correct kernel for an operator, a shape and a GPU.",
        version=importlib.metadata.version("kernelwright"),
        lifespan=lifespan,
    )
    app.state.shared = state
    install_handlers(app)
    app.add_middleware(LatencyMiddleware, metrics=state.metrics)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _counts(store: Store) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return store.count_jobs(), store.count_trials()
