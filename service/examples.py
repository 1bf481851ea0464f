"""Examples for the OpenAPI document, made by what makes the answers, so that they look like them."""

from __future__ import annotations

import dataclasses
import http
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from kernelwright.db import Job, JobState, StoredTrial
from kernelwright.kernels.device import named_device
from kernelwright.search import Answer
from kernelwright.service.answer_json import tell
from kernelwright.service.answering import fingerprints, tell_record
from kernelwright.service.catalog import list_devices, list_operators
from kernelwright.service.job_feed import event
from kernelwright.service.schemas import (
    AuditList,
    AuditOut,
    BatchItem,
    BatchOut,
    DeviceList,
    Health,
    JobList,
    OperatorList,
    ParetoOut,
    Problem,
    RecordList,
    TableOut,
    TrialList,
    WorkloadList,
)
from kernelwright.service.table import merged_rows
from kernelwright.service.telling import tell_job, tell_point, tell_trial, tell_workload
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, Toolchain, Trial, TuningRecord

H100 = named_device("h100")
WORKLOAD = WorkloadArgs("matmul", {"M": 2048, "N": 4096, "K": 4096}).workload()
TOOLCHAIN = Toolchain("3.6.0", "2.11.0", "580.82", "ptxas 12.8.93", 1)
MOMENT = "2026-03-01T12:00:00+00:00"
SCHEDULE = Schedule(
    "pointer",
    FrozenMap({"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4, "precision": "bf16"}),
)
MEASURED = Measurement(Status.OK, 112.4, error=0.0017, registers=168, spills=0, shared_bytes=131072, compile_s=1.9)

SOURCE = '"""One kernel, with what is known of it; needs torch and triton."""\n\nimport torch\nimport triton\n'
METRICS = (
    "# HELP kernelwright_queries_total Queries for a best kernel, by their answer.\n"
    "# TYPE kernelwright_queries_total counter\n"
    'kernelwright_queries_total{how="measured"} 42.0\n'
)

_BAD = {
    400: "Content-Length must be a whole number, got 'ten'",
    401: "a key is needed; send one as Authorization: Bearer <key>, from: kernelwright keys create",
    403: "this needs a key with the scope tune, the key 'laptop' has read",
    404: "device must be one of h100, h200, l4, got 'h1000'; did you mean 'h100'?",
    409: "job 0123456789abcdef is done already and can no longer be cancelled",
    413: "a body may have 1048576 bytes; send less, or in parts",
    414: "path and query may have 8192 bytes; put long questions into a batch",
    422: "shape of matmul must give M, N, K, got M=1; try M=1024,N=1024,K=1024",
    429: "no more than 100 requests a second, 200 at once; wait 1 s",
    431: "the headers may have 16384 bytes together; send fewer or shorter ones",
    503: "the database postgresql://db/tuning could not be used: connection refused; check that it runs",
}
_KINDS = {404: "unknown-device", 422: "invalid-workload", 503: "database-unavailable"}
_MISSING = {
    "record_id": ("0123456789abcdef0123", "no record has the id '0123456789abcdef0123'; GET /v1/kernels lists them"),
    "key": ("0123456789abcdef0123", "no workload has the key '0123456789abcdef0123'; GET /v1/workloads lists them"),
    "job_id": ("0123456789abcdef", "no job has the id '0123456789abcdef'; GET /v1/jobs lists them"),
}


def problem_example(path: str, status: int) -> dict[str, Any]:
    """An error of this status, as an answer to a request of this path."""
    title = http.HTTPStatus(status).phrase
    kind, detail = _KINDS.get(status, title.lower().replace(" ", "-")), _BAD[status]
    for name, (value, missing) in _MISSING.items():
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", value)
            kind, detail = ("not-found", missing) if status == 404 else (kind, detail)
    problem = Problem(type=f"urn:kernelwright:{kind}", title=title, status=status, detail=detail, instance=path)
    return problem.model_dump(mode="json")


def operation_examples() -> dict[str, Any]:
    """Answers of single operations, by method and path, where the form's own example would not fit."""
    queued = dataclasses.replace(_job(), state=JobState.QUEUED, worker=None, record_id=None, done=0, total=None)
    cancelled = dataclasses.replace(_job(), state=JobState.CANCELLED, record_id=None, done=17)
    jobs = {
        "post /v1/jobs": queued,
        "post /v1/jobs/{job_id}/cancel": cancelled,
        "delete /v1/jobs/{job_id}": cancelled,
    }
    return {operation: tell_job(job).model_dump(mode="json") for operation, job in jobs.items()}


def text_examples() -> Mapping[str, str]:
    """An answer of each kind of text, by media type."""
    events = event("trial", tell_trial(_trial()).model_dump_json(), 7)
    events += event("end", tell_job(_job()).model_dump_json())
    return {"text/x-python": SOURCE, "text/plain": METRICS, "text/event-stream": events}


def model_examples() -> dict[str, Any]:
    """An answer of each form, by the name of its model."""
    best, job, trial = tell(_answer()), tell_job(_job()), tell_trial(_trial())
    record, workload = tell_record(_record()), tell_workload(WORKLOAD)
    entry = AuditOut(id=3, at=MOMENT, who="k3", action="job.submit", subject=job.id, detail=f"{WORKLOAD} on cuda")
    failed = BatchItem(best=None, error=_BAD[422])
    found: list[BaseModel] = [
        best,
        BatchOut(results=[BatchItem(best=best, error=None), failed]),
        _table(),
        record,
        RecordList(records=[record]),
        workload,
        WorkloadList(workloads=[workload]),
        TrialList(trials=[trial], next=f"/v1/workloads/{WORKLOAD.key}/trials?limit=1&after={trial.number}"),
        ParetoOut(points=[tell_point(_trial().trial)]),
        job,
        JobList(jobs=[job]),
        DeviceList(devices=[device for device in list_devices() if device.slug == H100.slug]),
        OperatorList(operators=list_operators()),
        Health(status="ok", version="0.1.0", database="reachable", schema_version="0001", records=1),
        AuditList(entries=[entry]),
    ]
    return {type(model).__name__: model.model_dump(mode="json") for model in found}


def _record() -> TuningRecord:
    return TuningRecord(
        WORKLOAD,
        H100,
        TOOLCHAIN,
        SCHEDULE,
        MEASURED,
        fingerprints(WORKLOAD.operator)[SCHEDULE.template],
        "tune",
        MOMENT,
        vendor="torch.mm",
        vendor_us=118.9,
        aa_ratio=1.001,
        roofline=0.62,
        trials=64,
    )


def _answer() -> Answer:
    record = _record()
    return Answer(
        "measured",
        WORKLOAD,
        H100,
        SCHEDULE,
        record.winner,
        MEASURED.median_us,
        record.vendor,
        record.vendor_us,
        record.roofline,
        record,
        note="measured on this very workload",
    )


def _table() -> TableOut:
    best = tell(_answer())
    rows = merged_rows([2048], [_answer()])
    return TableOut(
        operator=WORKLOAD.operator, hardware=best.hardware, dim="M", fixed={"N": 4096, "K": 4096}, rows=rows
    )


def _trial() -> StoredTrial:
    print_of = fingerprints(WORKLOAD.operator)[SCHEDULE.template]
    return StoredTrial(7, Trial(WORKLOAD, H100, TOOLCHAIN, SCHEDULE, MEASURED, "tune", print_of, MOMENT))


def _job() -> Job:
    return Job(
        id="0123456789abcdef",
        state=JobState.DONE,
        workload=WORKLOAD,
        device="cuda",
        strategy="model",
        trials=64,
        seconds=None,
        seed=0,
        worker="gpu-7:4121",
        attempts=1,
        heartbeat_at=MOMENT,
        created_at="2026-03-01T11:58:40+00:00",
        updated_at=MOMENT,
        message="",
        record_id=_record().key,
        done=64,
        total=64,
    )
