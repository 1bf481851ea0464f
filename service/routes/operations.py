"""For those who run the service: is it well, what does it do, and who changed what."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kernelwright.db.engine import session_scope
from kernelwright.db.schema import current_revision
from kernelwright.service.conditional import ETAG_HEADERS, IF_NONE_MATCH, next_page, told
from kernelwright.service.problems import NOT_MODIFIED, responses
from kernelwright.service.routes.params import Limit
from kernelwright.service.schemas import AuditList, AuditOut, Health
from kernelwright.service.state import State, principal

router = APIRouter(tags=["operations"], responses=responses())

_TAGGED: dict[str, Any] = {"parameters": [IF_NONE_MATCH]}
_OK: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG_HEADERS}, **NOT_MODIFIED}
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/healthz", summary="Whether the service can do its work")
def healthz(request: Request, state: State) -> Health:
    """503 when the database cannot be reached. Asks for no key, and tells those without one the status only."""
    with session_scope(state.store.engine) as session:
        revision = current_revision(session.connection())
    if principal(request) is None:
        return Health(status="ok")
    return Health(
        status="ok",
        version=importlib.metadata.version("kernelwright"),
        database="reachable",
        schema_version=revision or "none",
        records=state.store.count_records(),
    )


@router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=_TEXT)
def metrics(state: State) -> Response:
    """Queries by how they were answered, latency by route, jobs by state, trials by status."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/v1/audit",
    summary="Who changed what, newest first",
    response_model=AuditList,
    responses=_OK,
    openapi_extra=_TAGGED,
)
def audit(
    request: Request,
    state: State,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="How many newer entries to pass over.")] = 0,
    limit: Limit = 100,
) -> Response:
    """The audit log: jobs submitted and cancelled, imports, keys made and revoked. Needs a key with the scope admin."""
    found = state.store.audit_entries(limit + 1, after)
    page = [AuditOut.model_validate(entry, from_attributes=True) for entry in found[:limit]]
    last = after + limit if len(found) > limit else None
    return told(request, AuditList(entries=page, next=next_page(request, last)))
