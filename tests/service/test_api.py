"""The REST API, in the process: answers, records, source, jobs, catalog and operation."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kernelwright.db import Store
from kernelwright.search import Budget, ReplayRunner, open_runner
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.worker import Worker, WorkerOptions
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import TuningRecord

QUESTION = {"operator": "matmul", "shape": "M=2048,N=4096,K=4096", "dtype": "bf16", "hardware": "h100"}


@pytest.fixture
def record(app: FastAPI, store: Store, runner: ReplayRunner, args: WorkloadArgs) -> TuningRecord:
    request = TuneRequest(args.workload(), "exhaustive", Budget(trials=40))
    return tune_and_store(store, runner, request, lambda trial, progress: None).record


def metric(http: httpx.Client, line_start: str) -> float:
    """The value of the one sample whose line begins so."""
    (value,) = [
        line.rpartition(" ")[2] for line in http.get("/metrics").text.splitlines() if line.startswith(line_start)
    ]
    return float(value)


def test_best_is_measured_after_tuning(http: httpx.Client, record: TuningRecord) -> None:
    body = http.get("/v1/kernels/best", params=QUESTION).json()
    assert body["how"] == "measured" and body["choice"] == "kernel"
    assert body["schedule"] == record.schedule.to_json()
    assert body["expected_us"] == record.measurement.median_us
    assert (body["vendor"], body["vendor_us"]) == ("torch.mm", 200.0)
    assert body["speedup"] == pytest.approx(200.0 / record.measurement.median_us)
    assert 0 < body["roofline_percent"] <= 100
    assert body["record_id"] == record.key and body["trials"] == 40
    assert body["measured_at"] == record.created_at
    assert body["toolchain"] == record.toolchain.to_json()
    assert body["hardware"]["slug"] == "h100" and body["workload_key"] == record.workload.key


def test_links_lead_on(http: httpx.Client, record: TuningRecord) -> None:
    body = http.get("/v1/kernels/best", params=QUESTION).json()
    links = body["links"]
    assert http.get(links["self"]).json()["record"] == record.to_json()
    assert http.get(links["workload"]).json() == body
    source = http.get(links["source"])
    assert source.headers["content-type"].startswith("text/x-python")
    assert "import triton" in source.text and record.key in source.text


def test_dims_may_be_parameters(http: httpx.Client, record: TuningRecord) -> None:
    typed: dict[str, str | int] = {"operator": "matmul", "M": 2048, "N": 4096, "K": 4096, "hardware": "H100"}
    assert http.get("/v1/kernels/best", params=typed).json()["record_id"] == record.key


def test_neighbour_and_its_source(http: httpx.Client, record: TuningRecord) -> None:
    near = {**QUESTION, "shape": "M=2048,N=4096,K=5120"}
    body = http.get("/v1/kernels/best", params=near).json()
    assert body["how"] == "nearest" and body["record_id"] == record.key
    source = http.get(body["links"]["source"])
    assert source.status_code == 200 and "5120" in source.text


def test_miss_is_an_answer(http: httpx.Client) -> None:
    body = http.get("/v1/kernels/best", params={**QUESTION, "shape": "M=64,N=64,K=64", "hardware": "l4"}).json()
    assert body["how"] in ("predicted", "vendor") and body["choice"] == "vendor"
    assert body["record_id"] is None and body["links"]["self"] is None


def test_job_from_request_to_source(http: httpx.Client, store: Store, settings: Any) -> None:
    asked = {"shape": {"M": 2048, "N": 4096, "K": 4096}, "device": "replay:h100", "strategy": "random", "trials": 8}
    answer = http.post("/v1/jobs", json=asked)
    assert answer.status_code == 202
    place = answer.headers["location"]
    assert http.get(place).json() == answer.json() and answer.json()["state"] == "queued"
    assert metric(http, 'kernelwright_jobs{state="queued"}') == 1

    Worker(store, WorkerOptions(), lambda spec: open_runner(spec, recorded=settings.recorded)).run_once()
    job = http.get(place).json()
    assert job["state"] == "done" and job["done"] >= 8
    assert http.get(job["links"]["source"]).status_code == 200
    assert http.get(job["links"]["record"]).json()["id"] == job["record_id"]
    assert [entry["id"] for entry in http.get("/v1/jobs").json()["jobs"]] == [job["id"]]
    assert http.get("/v1/jobs", params={"state": "queued"}).json()["jobs"] == []


@pytest.mark.usefixtures("no_gpu")
def test_catalog(http: httpx.Client) -> None:
    devices = {device["slug"]: device for device in http.get("/v1/devices").json()["devices"]}
    assert devices["h100"]["replay"] and not devices["l4"]["replay"]
    assert devices["h100"]["spec"]["architecture"] == "sm_90"
    operators = {operator["name"]: operator for operator in http.get("/v1/operators").json()["operators"]}
    assert list(operators) == ["matmul", "attention", "conv2d"]
    assert operators["matmul"]["dims"] == ["M", "N", "K"] and "pointer" in operators["matmul"]["templates"]


def test_health_counts_records(http: httpx.Client, record: TuningRecord) -> None:
    body = http.get("/healthz").json()
    assert (body["status"], body["records"], body["database"]) == ("ok", 1, "reachable")
    assert body["schema_version"]


def test_metrics_tell_how_queries_were_answered(http: httpx.Client, record: TuningRecord) -> None:
    for _ in range(2):
        http.get("/v1/kernels/best", params=QUESTION)
    http.get("/v1/kernels/0123")
    assert metric(http, 'kernelwright_queries_total{how="measured"}') == 2
    assert metric(http, 'kernelwright_trials_total{status="ok"}') == 36
    route = 'kernelwright_request_seconds_count{method="GET",route="/v1/kernels/best",status="200"}'
    assert metric(http, route) == 2
    assert metric(http, 'kernelwright_request_seconds_count{method="GET",route="/v1/kernels/{record_id}"') == 1


def test_raw_paths_never_become_labels(http: httpx.Client) -> None:
    http.get("/secret/path")
    http.request("BREW", "/v1/jobs")
    text = http.get("/metrics").text
    assert "secret" not in text and "BREW" not in text
    assert 'method="GET",route="none",status="404"' in text
