"""Every error as RFC 9457 problem details: one shape for misuse, missing things, bad bodies and faults of our own."""

from __future__ import annotations

import http
import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kernelwright.errors import (
    DatabaseError,
    KernelwrightError,
    MissingDependency,
    NothingRecorded,
    UnknownDevice,
    UnknownOperator,
    UsageError,
)
from kernelwright.service.missing import NotFound
from kernelwright.service.schemas import Problem

MEDIA_TYPE = "application/problem+json"

STATUS_OF: tuple[tuple[type[KernelwrightError], int], ...] = (
    (NotFound, 404),
    (UnknownOperator, 404),
    (UnknownDevice, 404),
    (NothingRecorded, 404),
    (UsageError, 422),
    (MissingDependency, 501),
    (DatabaseError, 503),
    (KernelwrightError, 500),
)
"""HTTP status by error class; the first that fits counts."""

_CONTENT = {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": http.HTTPStatus(status).phrase, "content": _CONTENT} for status in (404, 422, 503)
}
"""The errors that any route may answer with, for the OpenAPI document."""

logger = logging.getLogger(__name__)


def problem(request: Request, status: int, kind: str, detail: str, errors: Sequence[str] = ()) -> JSONResponse:
    """A problem document as a response; `kind` names the sort of error, such as "unknown-device"."""
    body = Problem(
        type=f"urn:kernelwright:{kind}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=request.url.path,
        errors=list(errors),
    )
    return JSONResponse(body.model_dump(), status, media_type=MEDIA_TYPE)


def install_handlers(app: FastAPI) -> None:
    """Make every error of the app a problem document."""
    app.add_exception_handler(KernelwrightError, _kernelwright_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)


def _kind(error: Exception) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()


async def _kernelwright_error(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in STATUS_OF if isinstance(error, kind))
    if status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    return problem(request, status, _kind(error), str(error))


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    complaints = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    return problem(request, 422, "invalid-request", "; ".join(complaints), complaints)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    response = problem(request, error.status_code, kind, detail)
    response.headers.update(error.headers or {})
    return response


async def _fault(request: Request, error: Exception) -> JSONResponse:
    logger.error("fault in %s %s", request.method, request.url.path, exc_info=error)
    return problem(request, 500, "fault", "the service failed to answer; its log has the reason")
