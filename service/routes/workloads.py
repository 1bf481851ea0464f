"""Workloads that were asked for: what was tried on each, and which trials no other beats."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from kernelwright.db.workload_search import find_workload, workload_page
from kernelwright.kernels.device import named_device
from kernelwright.service.conditional import ETAG_HEADERS, IF_NONE_MATCH, next_page, told
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import NOT_MODIFIED, responses
from kernelwright.service.routes.params import After, Hardware, Id, Limit, Operator
from kernelwright.service.schemas import (
    ParetoOut,
    ShortText,
    TrialList,
    TrialStatus,
    WorkloadList,
    WorkloadOut,
)
from kernelwright.service.state import AppState, State
from kernelwright.service.telling import tell_point, tell_trial, tell_workload
from kernelwright.types import Workload

router = APIRouter(prefix="/v1/workloads", tags=["workloads"], responses=responses(404))

_TAGGED: dict[str, Any] = {"parameters": [IF_NONE_MATCH]}
_OK: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG_HEADERS}, **NOT_MODIFIED}

AfterNumber = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="Only trials with larger numbers, such as the last one of a page.")
]


@router.get("", summary="Workloads by key", response_model=WorkloadList, responses=_OK, openapi_extra=_TAGGED)
def workloads(
    request: Request, state: State, operator: Operator = None, after: After = None, limit: Limit = 100
) -> Response:
    """Every workload that a job, trial or record exists for."""
    found = workload_page(state.store.engine, operator or None, after or "", limit + 1)
    page = [tell_workload(workload) for workload in found[:limit]]
    last = page[-1].key if len(found) > limit else None
    return told(request, WorkloadList(workloads=page, next=next_page(request, last)))


@router.get("/{key}", summary="A workload", response_model=WorkloadOut, responses=_OK, openapi_extra=_TAGGED)
def workload(request: Request, state: State, key: Id) -> Response:
    """The workload in its canonical form."""
    return told(request, tell_workload(_find(state, key)))


@router.get(
    "/{key}/trials",
    summary="What was tried on a workload, oldest first",
    response_model=TrialList,
    responses=_OK,
    openapi_extra=_TAGGED,
)
def trials(
    request: Request,
    state: State,
    key: Id,
    hardware: Hardware = None,
    status: Annotated[TrialStatus | None, Query(description="Only trials that ended so.")] = None,
    after: AfterNumber = 0,
    limit: Limit = 100,
) -> Response:
    """Every trial with its schedule and what came of it, failures included."""
    wanted = _find(state, key)
    device_key = named_device(hardware).key if hardware else None
    found = state.store.trial_page(
        workload_key=wanted.key, device_key=device_key, status=status, after=after, limit=limit + 1
    )
    page = [tell_trial(stored) for stored in found[:limit]]
    last = page[-1].number if len(found) > limit else None
    return told(request, TrialList(trials=page, next=next_page(request, last)))


@router.get(
    "/{key}/pareto",
    summary="The trials that no other beats in time and error",
    response_model=ParetoOut,
    responses=_OK,
    openapi_extra=_TAGGED,
)
def pareto(
    request: Request,
    state: State,
    key: Id,
    hardware: Annotated[ShortText, Query(description="Name of the GPU.", examples=["h100"])],
) -> Response:
    """Fastest first; of the toolchain that was measured with last."""
    front = state.store.pareto(_find(state, key).key, named_device(hardware).key)
    return told(request, ParetoOut(points=[tell_point(trial) for trial in front]))


def _find(state: AppState, key: str) -> Workload:
    found = find_workload(state.store.engine, key)
    if found is None:
        raise NotFound(f"no workload has the key {key[:80]!r}; GET /v1/workloads lists them")
    return found
