"""Kernels: the best one for a workload, records by id, and their source."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse

from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.device import named_device
from kernelwright.search import Answer
from kernelwright.service.answering import source_of_answer, source_of_record, tell, tell_record
from kernelwright.service.missing import NotFound
from kernelwright.service.problems import RESPONSES
from kernelwright.service.schemas import BestKernel, RecordOut, ShortText
from kernelwright.service.state import AppState, State
from kernelwright.service.workload_args import WorkloadArgs, add_dim, parse_epilogue, parse_shape
from kernelwright.types import DeviceSpec, TuningRecord, Workload

router = APIRouter(prefix="/v1/kernels", tags=["kernels"], responses=RESPONSES)

PARAMETERS = frozenset({"operator", "shape", "dtype", "layout", "epilogue", "out_dtype", "error_budget", "hardware"})
"""Query parameters of a question; any other one is the size of a dimension."""

MAX_DIM_NAME = 16

DIMS = {
    "parameters": [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1},
            "description": f"Size of dimension {name}, instead of `shape`.",
        }
        for name in ("M", "N", "K")
    ]
}
"""For the OpenAPI document: dimensions are read from the query by whatever names the operator has."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A checked workload and the GPU it is asked for."""

    workload: Workload
    device: DeviceSpec


def question(
    request: Request,
    operator: Annotated[ShortText, Query(description="Name of the operator.", examples=["matmul"])],
    hardware: Annotated[ShortText, Query(description="Name of the GPU.", examples=["h100"])],
    shape: Annotated[ShortText | None, Query(examples=["M=2048,N=4096,K=4096"])] = None,
    dtype: Annotated[ShortText, Query(description="Element type of the operands.")] = "bf16",
    layout: Annotated[ShortText, Query(description="nt (an nn.Linear), nn, tn or tt.")] = "nt",
    epilogue: Annotated[ShortText, Query(examples=["bias,gelu"])] = "",
    out_dtype: Annotated[ShortText | None, Query(description="Element type of the result, if another.")] = None,
    error_budget: Annotated[float | None, Query(description="Largest relative error allowed.")] = None,
) -> Question:
    """Read a question from the query parameters."""
    args = WorkloadArgs(
        operator, _dims(request, shape), dtype, layout, parse_epilogue(epilogue), out_dtype or None, error_budget
    )
    return Question(args.workload(), named_device(hardware))


def _dims(request: Request, shape: str | None) -> dict[str, int]:
    dims = parse_shape(shape) if shape else {}
    for name, value in request.query_params.multi_items():
        if name not in PARAMETERS:
            if len(name) > MAX_DIM_NAME:
                known = ", ".join(sorted(PARAMETERS))
                raise InvalidWorkload(f"parameter must be one of {known} or a dimension, got {name[:40]!r}")
            add_dim(dims, name, value)
    return dims


def _answer(state: AppState, asked: Question) -> Answer:
    answer = state.answers.best(asked.workload, asked.device)
    state.metrics.queries.labels(answer.how).inc()
    return answer


@router.get("/best", summary="The fastest known kernel for a workload on a GPU", openapi_extra=DIMS)
def best(state: State, asked: Annotated[Question, Depends(question)]) -> BestKernel:
    """Never an error for a miss: the answer says how it is known, down to "vendor"."""
    return tell(_answer(state, asked))


@router.get("/best/source", summary="Its standalone file", openapi_extra=DIMS, response_class=PlainTextResponse)
def best_source(state: State, asked: Annotated[Question, Depends(question)]) -> PlainTextResponse:
    """The kernel of the same question as a Python file that needs only torch and triton."""
    return _python(source_of_answer(_answer(state, asked)), f"{asked.workload.operator}_{asked.workload.key}")


@router.get("/{record_id}", summary="A tuning record")
def record(state: State, record_id: str) -> RecordOut:
    """The record in full, with the vendor call it was timed against."""
    return tell_record(_find(state, record_id))


@router.get("/{record_id}/source", summary="A record's kernel as a file", response_class=PlainTextResponse)
def source(state: State, record_id: str) -> PlainTextResponse:
    """A Python file that needs only torch and triton."""
    return _python(source_of_record(_find(state, record_id)), f"kernel_{record_id}")


def _find(state: AppState, record_id: str) -> TuningRecord:
    found = state.store.get_record(record_id)
    if found is None:
        raise NotFound(f"no record has the id {record_id[:80]!r}; GET /v1/kernels/best gives ids")
    return found


def _python(text: str, name: str) -> PlainTextResponse:
    headers = {"Content-Disposition": f'inline; filename="{name}.py"'}
    return PlainTextResponse(text, media_type="text/x-python", headers=headers)
