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
from starlette.types import Scope

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
from kernelwright.service.refusal import Refused
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

_CONTENT = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}

_MEANING = {
    400: "The request cannot be read: a broken body or Content-Length.",
    401: "A key is needed, and none or no good one came.",
    403: "The key lacks the scope, or the request comes from a foreign page or host name.",
    404: "There is nothing of this id or name.",
    409: "It has changed in the meantime, or it cannot be done in this state.",
    413: "The body is larger than the service takes.",
    414: "Path and query are longer than the service takes.",
    422: "What is asked cannot be: the detail says what was wanted, what came and what to try.",
    429: "Too many requests: wait for the seconds in Retry-After.",
    431: "The headers are larger than the service takes.",
    501: "The service lacks an optional package for this.",
    503: "The database cannot be reached.",
}

_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for the OpenAPI document: these, and those that any route may answer with."""
    out: dict[int | str, dict[str, Any]] = {}
    for status in sorted({400, 401, 403, 414, 422, 429, 431, 503, *statuses}):
        out[status] = {"description": _MEANING[status], "content": _CONTENT}
    out[401]["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    out[429]["headers"] = _RETRY
    return out


NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "What If-None-Match names is still current."}}

logger = logging.getLogger(__name__)


def problem(path: str, status: int, kind: str, detail: str, errors: Sequence[str] = ()) -> JSONResponse:
    """A problem document as a response; `kind` names the sort of error, such as "unknown-device"."""
    body = Problem(
        type=f"urn:kernelwright:{kind}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=path,
        errors=list(errors),
    )
    return JSONResponse(body.model_dump(), status, media_type=MEDIA_TYPE)


def answer_to_error(scope: Scope, error: KernelwrightError) -> JSONResponse:
    """An error of ours as a response to the request of this scope."""
    if isinstance(error, Refused):
        kind = http.HTTPStatus(error.status).phrase.lower().replace(" ", "-")
        response = problem(scope["path"], error.status, kind, str(error))
        response.headers.update(error.headers)
        return response
    status = status_of(error)
    if status >= 500:
        logger.error("%s %s: %s", scope["method"], scope["path"], error)
    return problem(scope["path"], status, kind_of(error), str(error))


def status_of(error: KernelwrightError) -> int:
    """The HTTP status that tells an error of ours."""
    if isinstance(error, Refused):
        return error.status
    return next(status for kind, status in STATUS_OF if isinstance(error, kind))


def install_handlers(app: FastAPI) -> None:
    """Make every error of the app a problem document."""
    app.add_exception_handler(KernelwrightError, _kernelwright_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)


def kind_of(error: Exception) -> str:
    """The name of a sort of error in problem documents, such as "unknown-device"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()


async def _kernelwright_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KernelwrightError)
    return answer_to_error(request.scope, error)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    complaints = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    return problem(request.url.path, 422, "invalid-request", "; ".join(complaints), complaints)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    response = problem(request.url.path, error.status_code, kind, detail)
    response.headers.update(error.headers or {})
    return response


async def _fault(request: Request, error: Exception) -> JSONResponse:
    logger.error("fault in %s %s", request.method, request.url.path, exc_info=error)
    return problem(request.url.path, 500, "fault", "the service failed to answer; its log has the reason")
