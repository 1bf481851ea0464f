"""Logs: JSON lines, request ids, one line a request; and the counts behind the metrics."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from kernelwright.db import Store
from kernelwright.service.logs import REQUEST_ID, JsonFormatter, TextFormatter
from kernelwright.service.metrics import StoreCounts
from kernelwright.types import Trial


def record_of(**extra: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "%s was there", "args": ("x",), **extra})


def test_json_lines() -> None:
    token = REQUEST_ID.set("abc")
    try:
        line = json.loads(JsonFormatter().format(record_of(path="/v1", number=3)))
        text = TextFormatter().format(record_of())
    finally:
        REQUEST_ID.reset(token)
    assert (line["level"], line["logger"], line["message"]) == ("info", "a", "x was there")
    assert (line["request_id"], line["path"], line["number"]) == ("abc", "/v1", 3)
    assert text.endswith("INFO x was there [abc]") and line["time"].endswith("+00:00")


def test_exceptions_stay_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = JsonFormatter().format(record_of(exc_info=(type(error), error, error.__traceback__)))
    assert "\n" not in line and "ValueError: two" in json.loads(line)["exception"]


def test_each_request_has_an_id_and_a_line(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kernelwright.access"):
        own = http.get("/v1/operators?secret=1", headers={"X-Request-ID": "mine-1"})
        made = http.get("/v1/nothing", headers={"X-Request-ID": "not\tgood"})
    assert own.headers["x-request-id"] == "mine-1"
    assert len(made.headers["x-request-id"]) == 16
    seen = [(line.path, line.status) for line in caplog.records if line.name == "kernelwright.access"]  # type: ignore[attr-defined]
    assert seen == [("/v1/operators", 200), ("/v1/nothing", 404)]
    assert "secret" not in caplog.text


def test_trials_are_counted_now_and_then(store: Store, trials: list[Trial]) -> None:
    now = [100.0]
    counts = StoreCounts(store, lambda: now[0])
    store.add_trials(trials[:10])
    assert (sum(counts().trials.values()), counts().trials_per_minute) == (10, 0.0)
    store.add_trials(trials[10:20])
    now[0] += 14
    assert sum(counts().trials.values()) == 10
    now[0] += 6
    assert (sum(counts().trials.values()), counts().trials_per_minute) == (20, 30.0)
