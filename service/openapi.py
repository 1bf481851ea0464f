"""The OpenAPI document: the form of errors, the ways to send a key, and an example of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from kernelwright.service.examples import model_examples, operation_examples, problem_example, text_examples
from kernelwright.service.problems import MEDIA_TYPE
from kernelwright.service.schemas import Problem

SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "Authorization: Bearer kw_..."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "basic": {"type": "http", "scheme": "basic", "description": "The key as the password, for browsers."},
}

OPEN = frozenset({"/healthz"})


def describe(app: FastAPI) -> None:
    """Complete the document that the framework makes of the routes."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            components = document.setdefault("components", {})
            components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
            components["securitySchemes"] = SCHEMES
            examples = {**model_examples(), **text_examples(), **operation_examples()}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _complete(method, path, operation, examples)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(method: str, path: str, operation: dict[str, Any], examples: Mapping[str, Any]) -> None:
    if path not in OPEN:
        # The empty one: a service without keys asks for none.
        operation["security"] = [*({name: []} for name in SCHEMES), {}]
    for status, answer in operation["responses"].items():
        if int(status) >= 400:
            # The framework adds its own form of 422 beside ours.
            content = {**answer["content"][MEDIA_TYPE], "example": problem_example(path, int(status))}
            answer["content"] = {MEDIA_TYPE: content}
            continue
        for media_type, content in answer.get("content", {}).items():
            form = content["schema"].get("$ref", "").rpartition("/")[2] or media_type
            content["example"] = examples.get(f"{method} {path}", examples[form])
