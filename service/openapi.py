"""The OpenAPI document: the form of errors, the ways to send a key, and 405 for what a path cannot do."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from kernelwright.service.problems import MEDIA_TYPE
from kernelwright.service.schemas import Problem

SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer kw_..."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key as the password, for browsers."},
}

OPEN = frozenset({"/healthz"})

EXAMPLE = {
    "type": "urn:kernelwright:unknown-device",
    "title": "Not Found",
    "status": 404,
    "detail": "device must be one of ..., got 'h1000'; did you mean 'h100'?",
    "instance": "/v1/kernels/best",
    "errors": [],
}


def describe(app: FastAPI) -> None:
    """Complete the document that the framework makes of the routes."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            components = document.setdefault("components", {})
            problem = Problem.model_json_schema() | {"example": EXAMPLE}
            components.setdefault("schemas", {})["Problem"] = problem
            components["securitySchemes"] = SCHEMES
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _complete(path, operation)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(path: str, operation: dict[str, Any]) -> None:
    if path not in OPEN:
        # The empty one: a service without keys asks for none.
        operation["security"] = [*({name: []} for name in SCHEMES), {}]
    for status, answer in operation["responses"].items():
        if int(status) >= 400:
            # The framework adds its own form of 422 beside ours.
            answer["content"] = {MEDIA_TYPE: answer["content"][MEDIA_TYPE]}
