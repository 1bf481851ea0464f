"""Jobs: ask for a workload to be tuned, see how far it is, watch it live, cancel it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from kernelwright.db import Job, JobRequest, JobState
from kernelwright.errors import UnknownStrategy, UsageError
from kernelwright.search import STRATEGIES
from kernelwright.service.conditional import ETAG_HEADERS, IF_NONE_MATCH, next_page, told
from kernelwright.service.device_args import parse_device
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import NOT_MODIFIED, responses
from kernelwright.service.questions import args_in
from kernelwright.service.refusal import Refused
from kernelwright.service.routes.params import After, Id, Limit
from kernelwright.service.schemas import JobIn, JobList, JobOut
from kernelwright.service.state import AppState, State, Who
from kernelwright.service.telling import tell_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=responses(404))

_TAGGED: dict[str, Any] = {"parameters": [IF_NONE_MATCH]}
_OK: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG_HEADERS}, **NOT_MODIFIED}
_QUEUED: dict[int | str, dict[str, Any]] = {
    202: {"headers": {"Location": {"description": "The job's address.", "schema": {"type": "string"}}}},
    **responses(404, 413),
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events: trial, whose number is the event's id; job when it changed; end with its last state.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=100,
        pattern=r"^[!-~]+$",
        description="A name for this request, made by the client: sent again, it leads to the same job.",
        examples=["8e03978e-40d5-43dd-bc93-6894a57f9324"],
    ),
]


def request_of(body: JobIn) -> JobRequest:
    """The checked request; UsageError for what cannot be tuned."""
    if body.strategy not in STRATEGIES:
        raise UnknownStrategy(f"strategy must be one of {', '.join(STRATEGIES)}, got {body.strategy!r}")
    workload, device = args_in(body).workload(), str(parse_device(body.device))
    return JobRequest(workload, device, body.strategy, body.trials, body.seconds, body.seed)


@router.post("", status_code=202, summary="Ask for a workload to be tuned", responses=_QUEUED)
def submit(state: State, who: Who, body: JobIn, response: Response, idempotency_key: IdempotencyKey = None) -> JobOut:
    """The job is queued for a worker; its address is in the Location header."""
    name = None if idempotency_key is None else f"{who}:{idempotency_key}"
    job = state.store.submit(request_of(body), name)
    state.store.audit(who, "job.submit", job.id, f"{job.workload} on {job.device}")
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return tell_job(job)


@router.get("", summary="Jobs, newest first", response_model=JobList, responses=_OK, openapi_extra=_TAGGED)
def jobs(
    request: Request,
    state: State,
    only: Annotated[JobState | None, Query(alias="state", description="Only jobs in this state.")] = None,
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """All jobs, or those in one state."""
    found = state.store.jobs(state=only, limit=limit + 1, after=after)
    page = [tell_job(job) for job in found[:limit]]
    last = page[-1].id if len(found) > limit else None
    return told(request, JobList(jobs=page, next=next_page(request, last)))


@router.get("/{job_id}", summary="A job as it is now", response_model=JobOut, responses=_OK, openapi_extra=_TAGGED)
def job(request: Request, state: State, job_id: Id) -> Response:
    """State, progress, and the record once it is done."""
    return told(request, tell_job(_find(state, job_id)))


@router.post("/{job_id}/cancel", summary="Cancel a job", responses=responses(404, 409, 413))
def cancel(state: State, who: Who, job_id: Id) -> JobOut:
    """It stops after the trial that is being measured. Cancelling again changes nothing; 409 when it ended before."""
    found = _find(state, job_id)
    if state.store.cancel(job_id):
        state.store.audit(who, "job.cancel", job_id, str(found.workload))
    found = _find(state, job_id)
    if found.state is not JobState.CANCELLED:
        raise Refused(409, f"job {job_id} is {found.state.value} already and can no longer be cancelled")
    return tell_job(found)


@router.delete("/{job_id}", summary="Cancel a job", responses=responses(404, 409))
def delete(state: State, who: Who, job_id: Id) -> JobOut:
    """The same as cancelling: what was measured stays."""
    return cancel(state, who, job_id)


@router.get(
    "/{job_id}/events",
    summary="A job's progress as server-sent events",
    response_class=StreamingResponse,
    responses=_STREAM,
)
async def events(
    request: Request,
    state: State,
    job_id: Id,
    last_event_id: Annotated[
        str | None, Header(max_length=20, description="Number of the last trial that the client has seen.")
    ] = None,
) -> Response:
    """Begins with the trials that are stored already, or those past Last-Event-ID, and ends when the job does."""
    after = _number(last_event_id)
    if await state.feed.look(job_id, after) is None:
        raise _missing(job_id)
    stream = state.feed.events(job_id, after, state.stopping.is_set)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _number(text: str | None) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise UsageError(f"Last-Event-ID must be the id of an event, a whole number, got {text!r}")
    return int(text)


def _find(state: AppState, job_id: str) -> Job:
    found = state.store.get_job(job_id)
    if found is None:
        raise _missing(job_id)
    return found


def _missing(job_id: str) -> NotFound:
    return NotFound(f"no job has the id {job_id[:80]!r}; GET /v1/jobs lists them")
