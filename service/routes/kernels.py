"""Kernels: the best one for a workload, for many, or by size; records by id, and their source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.service.answer_cache import Given
from kernelwright.service.answer_json import tell_hardware
from kernelwright.service.answering import source_of_answer, source_of_record, tell_record
from kernelwright.service.conditional import ETAG_HEADERS, IF_NONE_MATCH, next_page, tagged, told
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import NOT_MODIFIED, responses
from kernelwright.service.questions import QuestionIn, parameters_of, read_question, try_workloads
from kernelwright.service.routes.params import After, Hardware, Id, Limit, Operator
from kernelwright.service.schemas import BatchIn, BatchOut, BestKernel, RecordList, RecordOut, TableOut
from kernelwright.service.state import AppState, State
from kernelwright.service.table import TableIn, merged_rows, table_questions
from kernelwright.types import TuningRecord, Workload

router = APIRouter(prefix="/v1/kernels", tags=["kernels"], responses=responses(404))

MAX_PREDICTED = 20

PYTHON = "text/x-python"

_QUESTION = {"parameters": [*parameters_of(QuestionIn, "M", "N", "K"), IF_NONE_MATCH]}
_TABLE = {"parameters": [*parameters_of(TableIn), IF_NONE_MATCH]}
_TAGGED: dict[str, Any] = {"parameters": [IF_NONE_MATCH]}
_OK: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG_HEADERS}, **NOT_MODIFIED}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {"headers": ETAG_HEADERS, "content": {PYTHON: {"schema": {"type": "string"}}}},
    **NOT_MODIFIED,
}


class PythonFile(PlainTextResponse):
    """A file in Python."""

    media_type = PYTHON


@router.get(
    "/best",
    summary="The fastest known kernel for a workload on a GPU",
    response_model=BestKernel,
    responses=_OK,
    openapi_extra=_QUESTION,
)
async def best(request: Request) -> Response:
    """Never an error for a miss: the answer says how it is known, down to "vendor"."""
    state: AppState = request.app.state.shared
    query: bytes = request.scope["query_string"]
    given = state.best.remembered(query)
    if given is None:
        asked = read_question(request)
        given = await state.best.one(asked.workload, asked.device, query)
    return tagged(request, given.body, given.etag)


@router.post(
    "/best:batch",
    summary="The fastest known kernels for many workloads",
    response_model=BatchOut,
    responses=responses(404, 413),
)
async def batch(state: State, body: BatchIn) -> Response:
    """Answers in the order of the workloads, from one read of the database. A workload that cannot be does not keep
    the others from their answers. Without `predict` an answer is "vendor" where nothing near was measured."""
    most = min(state.settings.max_batch, MAX_PREDICTED if body.predict else state.settings.max_batch)
    if len(body.workloads) > most:
        raise UsageError(f"a batch may have {most} workloads, got {len(body.workloads)}; ask in parts")
    device = named_device(body.hardware)
    asked = await to_thread.run_sync(try_workloads, body.workloads)
    workloads = [item for item in asked if isinstance(item, Workload)]
    given = iter(await state.best.many(workloads, device, body.predict))
    return Response(_batch_body(asked, given), media_type="application/json")


@router.get(
    "/table",
    summary="A dispatch table: the best schedule by size",
    response_model=TableOut,
    responses=_OK,
    openapi_extra=_TABLE,
)
async def table(request: Request) -> Response:
    """For each size of one dimension the best that the records tell; neighbouring sizes with one answer are merged."""
    state: AppState = request.app.state.shared
    asked = await to_thread.run_sync(table_questions, request)
    answers = await state.best.answers(asked.workloads, asked.device)
    out = TableOut(
        operator=asked.workloads[0].operator,
        hardware=tell_hardware(asked.device),
        dim=asked.dim,
        fixed=asked.fixed,
        rows=merged_rows(asked.values, answers),
    )
    return told(request, out)


@router.get("", summary="Tuning records, newest first", response_model=RecordList, responses=_OK, openapi_extra=_TAGGED)
def records(
    request: Request,
    state: State,
    operator: Operator = None,
    hardware: Hardware = None,
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """All records, or those of one operator or GPU; those in quarantine are left out."""
    device_key = named_device(hardware).key if hardware else None
    found = state.store.records(operator or None, device_key, limit + 1, after=after)
    page = [tell_record(record) for record in found[:limit]]
    last = page[-1].id if len(found) > limit else None
    return told(request, RecordList(records=page, next=next_page(request, last)))


@router.get(
    "/best/source",
    summary="Its standalone file",
    response_class=PythonFile,
    responses=_FILE,
    openapi_extra=_QUESTION,
)
def best_source(request: Request) -> Response:
    """The kernel of the same question as a Python file that needs only torch and triton."""
    state: AppState = request.app.state.shared
    asked = read_question(request)
    answer = state.best.whole(asked.workload, asked.device)
    state.metrics.queries.labels(answer.how).inc()
    return _python(request, source_of_answer(answer), f"{asked.workload.operator}_{asked.workload.key}")


@router.get("/{record_id}", summary="A tuning record", response_model=RecordOut, responses=_OK, openapi_extra=_TAGGED)
def record(request: Request, state: State, record_id: Id) -> Response:
    """The record in full, with the vendor call it was timed against."""
    return told(request, tell_record(_find(state, record_id)))


@router.get(
    "/{record_id}/source",
    summary="A record's kernel as a file",
    response_class=PythonFile,
    responses=_FILE,
    openapi_extra=_TAGGED,
)
def source(request: Request, state: State, record_id: Id) -> Response:
    """A Python file that needs only torch and triton, rendered from the templates of the running version."""
    found = _find(state, record_id)
    return _python(request, source_of_record(found), f"kernel_{found.key}")


def _batch_body(asked: Sequence[Workload | str], found: Iterator[Given]) -> bytes:
    """JSON of a BatchOut, put together from answers that are JSON already."""
    parts = (
        b'{"best":null,"error":' + json.dumps(item).encode() + b"}"
        if isinstance(item, str)
        else b'{"best":' + next(found).body + b',"error":null}'
        for item in asked
    )
    return b'{"results":[' + b",".join(parts) + b"]}"


def _find(state: AppState, record_id: str) -> TuningRecord:
    found = state.store.get_record(record_id)
    if found is None:
        raise NotFound(f"no record has the id {record_id[:80]!r}; GET /v1/kernels lists them")
    return found


def _python(request: Request, text: str, name: str) -> Response:
    response = tagged(request, text.encode(), media_type=PYTHON)
    response.headers["content-disposition"] = f'inline; filename="{name}.py"'
    return response
