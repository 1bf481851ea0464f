"""Jobs: ask for a workload to be tuned, and see how far it is."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from kernelwright.db import Job, JobRequest, JobState
from kernelwright.errors import UnknownStrategy
from kernelwright.search import STRATEGIES
from kernelwright.service.device_args import parse_device
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import RESPONSES
from kernelwright.service.schemas import JobIn, JobList, JobOut
from kernelwright.service.state import State
from kernelwright.service.workload_args import WorkloadArgs, parse_epilogue, parse_shape

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=RESPONSES)


def request_of(body: JobIn) -> JobRequest:
    """The checked request; UsageError for what cannot be tuned."""
    dims = parse_shape(body.shape) if isinstance(body.shape, str) else dict(body.shape)
    args = WorkloadArgs(
        body.operator,
        dims,
        body.dtype,
        body.layout,
        parse_epilogue(body.epilogue),
        body.out_dtype,
        body.error_budget,
    )
    if body.strategy not in STRATEGIES:
        raise UnknownStrategy(f"strategy must be one of {', '.join(STRATEGIES)}, got {body.strategy!r}")
    device = str(parse_device(body.device))
    return JobRequest(args.workload(), device, body.strategy, body.trials, body.seconds, body.seed)


def tell_job(job: Job) -> JobOut:
    """The job in the form of the API."""
    links = {"self": f"/v1/jobs/{job.id}"}
    if job.record_id is not None:
        links["record"] = f"/v1/kernels/{job.record_id}"
        links["source"] = f"/v1/kernels/{job.record_id}/source"
    return JobOut(
        id=job.id,
        state=job.state.value,
        workload=job.workload.to_json(),
        label=str(job.workload),
        device=job.device,
        strategy=job.strategy,
        trials=job.trials,
        seconds=job.seconds,
        seed=job.seed,
        done=job.done,
        total=job.total,
        worker=job.worker,
        created_at=job.created_at,
        updated_at=job.updated_at,
        message=job.message,
        record_id=job.record_id,
        links=links,
    )


@router.post("", status_code=202, summary="Ask for a workload to be tuned")
def submit(state: State, body: JobIn, response: Response) -> JobOut:
    """The job is queued for a worker; its address is in the Location header."""
    job = state.store.submit(request_of(body))
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return tell_job(job)


@router.get("", summary="Jobs, newest first")
def jobs(state: State, only: Annotated[JobState | None, Query(alias="state")] = None) -> JobList:
    """All jobs, or those in one state."""
    return JobList(jobs=[tell_job(job) for job in state.store.jobs(state=only)])


@router.get("/{job_id}", summary="A job as it is now")
def job(state: State, job_id: str) -> JobOut:
    """State, progress, and the record once it is done."""
    found = state.store.get_job(job_id)
    if found is None:
        raise NotFound(f"no job has the id {job_id[:80]!r}; GET /v1/jobs lists them")
    return tell_job(found)
