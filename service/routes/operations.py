"""For those who run the service: is it well, and what does it do."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kernelwright.db.engine import session_scope
from kernelwright.db.schema import current_revision
from kernelwright.service.problems import RESPONSES
from kernelwright.service.schemas import Health
from kernelwright.service.state import State

router = APIRouter(tags=["operations"], responses=RESPONSES)


@router.get("/healthz", summary="Whether the service can do its work")
def healthz(state: State) -> Health:
    """503 when the database cannot be reached."""
    with session_scope(state.store.engine) as session:
        revision = current_revision(session.connection())
    return Health(
        status="ok",
        version=importlib.metadata.version("kernelwright"),
        database="reachable",
        schema_version=revision or "none",
        records=state.store.count_records(),
    )


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
def metrics(state: State) -> Response:
    """Queries by how they were answered, latency by route, jobs by state, trials stored."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)
