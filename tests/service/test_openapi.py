"""What the OpenAPI document promises is what the API does: schemathesis asks it anything the document allows, and more.

Few questions each time; `scripts/fuzz-api` asks many.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kernelwright.db import Store
from kernelwright.search import Budget, ReplayRunner
from kernelwright.service.app import create_app
from kernelwright.service.problems import MEDIA_TYPE
from kernelwright.service.routes.jobs import request_of
from kernelwright.service.schemas import JobIn
from kernelwright.service.settings import Settings
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import DeviceSpec, Trial
from tests.service.conftest import AppTransport

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
BODIES = int(os.environ.get("FUZZ_BODIES", "60"))

GOOD = {
    "operator": "matmul",
    "hardware": "h100",
    "shape": "M=2048,N=4096,K=4096",
    "dtype": "bf16",
    "layout": "nt",
    "epilogue": "",
    "out_dtype": "bf16",
    "error_budget": 0.1,
}
JOB = {"shape": "M=2048,N=4096,K=4096", "device": "replay:h100", "strategy": "random"}

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)

FUZZ = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def served(
    recorded: Path, trials: list[Trial], device: DeviceSpec, args: WorkloadArgs, tmp_path_factory: Any
) -> Iterator[FastAPI]:
    """An app over a database with one record, its trials and a job."""
    url = f"sqlite:///{tmp_path_factory.mktemp('fuzz') / 'fuzz.db'}"
    app = create_app(
        Settings(db=url, recorded=recorded, pretuned=False, event_seconds=0.05, trusted_hosts="testserver")
    )
    with Store.open(url) as store:
        request = TuneRequest(args.workload(), "random", Budget(8))
        tune_and_store(store, ReplayRunner(trials, device), request, lambda *_: None)
    # No stream may go on for as long as a job that nobody takes waits.
    app.state.shared.stopping.set()
    yield app
    app.state.shared.store.close()


def operations(app: FastAPI) -> list[Any]:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    return [found.ok() for found in schema.get_all_operations()]


def make_sensible(case: Any, ids: dict[str, str]) -> None:
    """Put what there is in place of random names, so that more than the errors is seen."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = ids[name]
    if isinstance(case.query, dict):
        case.query = {name: value for name, value in case.query.items() if name not in ("M", "N", "K")}
        case.query |= {name: value for name, value in GOOD.items() if name in case.query}
        if {"operator", "hardware"} <= case.query.keys():
            case.query["shape"] = GOOD["shape"]
        if "dim" in case.query:
            case.query |= {"shape": "N=4096,K=4096", "dim": "M", "values": "16,2048"}
    if isinstance(case.body, dict):
        case.body |= {name: value for name, value in (GOOD | JOB).items() if name in case.body}
        if "workloads" in case.body:
            case.body["workloads"] = [{"shape": JOB["shape"]}, {"shape": "M=1"}]


def test_every_operation_keeps_its_promises(served: FastAPI, args: WorkloadArgs) -> None:
    found = operations(served)
    assert len(found) > 15
    store = served.state.shared.store
    record = next(record for record in store.records(limit=None) if record.workload == args.workload())
    ids = {"record_id": record.key, "key": record.workload.key, "job_id": store.submit(request_of(JobIn(**JOB))).id}
    for operation in found:

        @settings(max_examples=EXAMPLES, **FUZZ)
        @given(operation.as_strategy(), st.booleans())
        def ask(case: Any, sensible: bool) -> None:
            if sensible:
                make_sensible(case, ids)
            case.call_and_validate(checks=CHECKS)

        ask()


def test_every_operation_is_described(served: FastAPI) -> None:
    document = served.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation["summary"] and operation["description"], where
            for status in ("401", "403", "422", "429", "503"):
                assert MEDIA_TYPE in operation["responses"][status]["content"], where
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), f"{where}: {parameter['name']}"
            assert any(int(status) < 400 for status in operation["responses"]), where


def test_every_answer_has_an_example_of_its_form(served: FastAPI) -> None:
    document = json.loads(json.dumps(served.openapi()))
    checked = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for status, answer in operation["responses"].items():
                where = f"{method} {path} {status}"
                assert status == "304" or answer["content"], where
                for media_type, content in answer.get("content", {}).items():
                    schema = {**content["schema"], "components": document["components"]}
                    jsonschema_rs.validate(schema, content["example"])
                    if int(status) >= 400:
                        assert media_type == MEDIA_TYPE and content["example"]["status"] == int(status), where
                        assert "{" not in content["example"]["instance"], where
                    checked += 1
    assert checked > 200


def test_examples_are_what_the_service_understands(served: FastAPI) -> None:
    document = served.openapi()
    operations = document["paths"]
    best = operations["/v1/kernels/best"]["get"]["responses"]["200"]["content"]["application/json"]["example"]
    job = operations["/v1/jobs"]["post"]["responses"]["202"]["content"]["application/json"]["example"]
    assert job["state"] == "queued"
    with httpx.Client(transport=AppTransport(served), base_url="http://127.0.0.1") as http:
        answer = http.get(best["links"]["workload"]).json()
        assert answer["workload"] == best["workload"] and answer.keys() == best.keys()
        batch = document["components"]["schemas"]["BatchIn"]["examples"][0]
        assert http.post("/v1/kernels/best:batch", json=batch).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["operator", "shape", "dtype", "layout", "epilogue", "device", "trials", "hardware", "workloads", "predict"]
)
BODY = st.dictionaries(NAMES, JSON, max_size=6) | JSON


@settings(max_examples=BODIES, **FUZZ)
@given(body=BODY, raw=st.binary(max_size=64) | st.none(), path=st.sampled_from(["/v1/jobs", "/v1/kernels/best:batch"]))
def test_any_body_leaves_it_alive(served: FastAPI, body: Any, raw: bytes | None, path: str) -> None:
    content = raw if raw is not None else json.dumps(body).encode()
    with httpx.Client(transport=AppTransport(served), base_url="http://127.0.0.1") as http:
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, answer.text
