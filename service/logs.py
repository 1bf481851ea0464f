"""Logs: plain text or one JSON object a line, each with the id of the request that it belongs to."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""The id of the request that is being served; empty outside of one."""

ACCESS = logging.getLogger("kernelwright.access")

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, request_id, what was given as `extra`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line for people, with the request's id where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        request_id = REQUEST_ID.get()
        return super().format(record) + (f" [{request_id}]" if request_id else "")


def configure_logs(level: str, form: str) -> None:
    """Log everything of this process to standard error from `level` on, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each request is one line of ours, which others would repeat; and that a schema is looked at is no news.
    for name in ("httpx", "uvicorn.access", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


class RequestLog:
    """Gives each request an id, the client's own X-Request-ID if it has one, and logs one line when it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(scope)
        REQUEST_ID.set(request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        status, start = 500, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            if ACCESS.isEnabledFor(logging.INFO):
                _log(scope, status, time.perf_counter() - start)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GIVEN_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(8)


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = scope["client"][0] if scope.get("client") else ""
    seen = {
        "method": scope["method"],
        # The path only: a query may hold what does not belong in logs.
        "path": scope["path"][:200],
        "status": status,
        "ms": round(1000 * seconds, 2),
        "client": client,
        "key": scope["state"].get("key_name", ""),
    }
    ACCESS.info("%s %r %d %.1f ms", seen["method"], seen["path"], status, seen["ms"], extra=seen)
