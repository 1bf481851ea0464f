"""Answers with an entity tag, so that a client gets none twice, and pages with a link to the next."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import Request, Response
from pydantic import BaseModel

from kernelwright.service.answer_cache import etag_of

JSON = "application/json"

ETAG_HEADERS = {
    "ETag": {"description": "Tag of this very answer, for If-None-Match.", "schema": {"type": "string"}},
}

IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "Tag of an answer that the client has: the answer is an empty 304 while it is current.",
}


def tagged(request: Request, body: bytes, etag: str = "", media_type: str = JSON) -> Response:
    """The body with its tag, or 304 without it when the client has this very one."""
    etag = etag or etag_of(body)
    # Kept by the client, asked about each time; never by a proxy, which does not know whose key it is for.
    headers = {"etag": etag, "cache-control": "private, no-cache"}
    asked = request.headers.get("if-none-match")
    if asked is not None and _names(asked, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def told(request: Request, model: BaseModel) -> Response:
    """A model as JSON with its tag; the next page, if it has one, is in the Link header too."""
    response = tagged(request, model.model_dump_json().encode())
    if following := getattr(model, "next", None):
        response.headers["link"] = f'<{following}>; rel="next"'
    return response


def next_page(request: Request, last: str | int | None) -> str | None:
    """The path of the page after the one that ends with `last`; None where that is None."""
    if last is None:
        return None
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
    return f"{request.url.path}?{urlencode([*query, ('after', str(last))])}"


def _names(asked: str, etag: str) -> bool:
    tags = (tag.strip() for tag in asked.split(","))
    return any(tag == "*" or tag.removeprefix("W/") == etag for tag in tags)
