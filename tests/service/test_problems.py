"""Every error of the API is a problem document of one shape, whatever went wrong."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kernelwright.errors import DatabaseUnavailable
from kernelwright.service.problems import MEDIA_TYPE

GOOD = {"operator": "matmul", "shape": "M=64,N=64,K=64", "hardware": "h100"}

JOB = {"shape": "M=64,N=64,K=64", "device": "replay:h100"}


def assert_problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The body of a response, which must be a problem document with this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "title", "status", "detail", "instance", "errors"}
    assert body["status"] == status and body["detail"] and body["type"].startswith("urn:kernelwright:")
    assert body["instance"] == response.request.url.path
    return body


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"operator": "matmull"}, 404, "unknown-operator", "matmul"),
        ({"hardware": "h1000"}, 404, "unknown-device", "did you mean 'h100'"),
        ({"dtype": "bf17"}, 422, "unsupported-dtype", "bf17"),
        ({"layout": "xy"}, 422, "invalid-workload", "nt, nn, tn, tt"),
        ({"shape": "M=64"}, 422, "invalid-workload", "M, N, K"),
        ({"shape": "M=0,N=1,K=1"}, 422, "invalid-workload", "between 1 and"),
        ({"shape": "huge"}, 422, "invalid-workload", "NAME=SIZE"),
        ({"colour": "7"}, 422, "invalid-workload", "colour"),
        ({"M": "64"}, 422, "invalid-workload", "given once"),
        ({"a_parameter_that_is_not_there": "1"}, 422, "invalid-workload", "parameter must be one of"),
        ({"epilogue": "gelu,squash"}, 422, "invalid-workload", "epilogue"),
        ({"error_budget": "2"}, 422, "invalid-workload", "error_budget"),
        ({"error_budget": "nan"}, 422, "invalid-workload", "error_budget"),
        ({"attributes": "causal=top_left"}, 422, "invalid-workload", "causal"),
        ({"attributes": "=1"}, 422, "invalid-workload", "NAME=VALUE"),
        ({"error_budget": "much"}, 422, "invalid-request", "query.error_budget"),
    ],
)
def test_misuse_of_best(http: httpx.Client, change: dict[str, str], status: int, kind: str, words: str) -> None:
    for path in ("/v1/kernels/best", "/v1/kernels/best/source"):
        body = assert_problem(http.get(path, params={**GOOD, **change}), status)
        assert body["type"] == f"urn:kernelwright:{kind}" and words in body["detail"]


def test_what_is_missing_is_named(http: httpx.Client) -> None:
    body = assert_problem(http.get("/v1/kernels/best"), 422)
    assert {"query.operator: Field required", "query.hardware: Field required"} <= set(body["errors"])


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"operator": "conv9d"}, 404, "matmul"),
        ({"device": "h100"}, 404, "replay:h100"),
        ({"device": "replay:h1000"}, 404, "h100"),
        ({"strategy": "guess"}, 422, "random"),
        ({"shape": {"M": 1}}, 422, "M, N, K"),
        ({"shape": None}, 422, "shape"),
        ({"trials": 0}, 422, "trials"),
        ({"seconds": -1}, 422, "seconds"),
        ({"seconds": 1e300}, 422, "seconds"),
        ({"seed": 2**80}, 422, "seed"),
        ({"colour": "red"}, 422, "colour"),
        ({"dtype": "x" * 5000}, 422, "dtype"),
    ],
)
def test_misuse_of_jobs(http: httpx.Client, change: dict[str, Any], status: int, words: str) -> None:
    body = assert_problem(http.post("/v1/jobs", json={**JOB, **change}), status)
    assert words in body["detail"]
    assert http.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"shape": NaN}'])
def test_body_that_is_no_job(http: httpx.Client, content: bytes) -> None:
    response = http.post("/v1/jobs", content=content, headers={"content-type": "application/json"})
    assert_problem(response, response.status_code)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize("path", ["/v1/kernels/no-such", "/v1/kernels/no-such/source", "/v1/jobs/no-such"])
def test_unknown_ids(http: httpx.Client, path: str) -> None:
    assert "no-such" in assert_problem(http.get(path), 404)["detail"]


def test_pages_and_methods_that_are_not_there(http: httpx.Client) -> None:
    assert_problem(http.get("/v2/nothing"), 404)
    refused = http.delete("/v1/jobs")
    assert_problem(refused, 405)
    assert set(refused.headers["allow"].replace(" ", "").split(",")) <= {"GET", "POST"}
    assert_problem(http.get("/v1/jobs", params={"state": "asleep"}), 422)


def test_no_kernel_to_show(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwright.service.answering.packaged_model", lambda operator: None)
    body = assert_problem(http.get("/v1/kernels/best/source", params=GOOD), 404)
    assert "tune it first" in body["detail"]


def test_database_that_is_gone(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> int:
        raise DatabaseUnavailable("the disk is away")

    monkeypatch.setattr(app.state.shared.store, "count_records", gone)
    assert "the disk is away" in assert_problem(http.get("/healthz"), 503)["detail"]


def test_fault_tells_nothing_of_the_inside(http: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> int:
        raise RuntimeError("password=1234")

    monkeypatch.setattr(app.state.shared.store, "count_records", fault)
    assert "1234" not in assert_problem(http.get("/healthz"), 500)["detail"]


def test_errors_are_in_the_openapi_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert MEDIA_TYPE in operation["responses"]["422"]["content"], path


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*GOOD, "dtype", "epilogue", "M", "error_budget"]), st.text(max_size=20)))
def test_any_question_is_answered_or_refused(http: httpx.Client, change: dict[str, str]) -> None:
    response = http.get("/v1/kernels/best", params={**GOOD, **change})
    assert response.status_code < 500, response.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*JOB, "epilogue", "trials", "seconds", "seed", "error_budget"]), JSON))
def test_any_body_is_taken_or_refused(http: httpx.Client, change: dict[str, Any]) -> None:
    response = http.post("/v1/jobs", json={**JOB, **change})
    assert response.status_code < 500, response.text
