"""The pages without a browser: what they say, what they escape, whom they let in."""

from __future__ import annotations

import dataclasses
import html

import httpx
import pytest
from fastapi import FastAPI

from kernelwright.db import JobRequest, Store
from kernelwright.search import Budget, ReplayRunner
from kernelwright.service.auth import COOKIE, make_key
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import DeviceSpec, FrozenMap, Schedule, TuningRecord

NASTY = "<script>alert(1)</script>'\"&<img src=x onerror=alert(2)>"
QUESTION = {"operator": "matmul", "shape": "M=2048,N=4096,K=4096", "dtype": "bf16", "layout": "nt", "hardware": "h100"}
PAGES = ("/", "/winners", "/jobs", "/hardware", "/model", "/roofline", "/api", "/login")


@pytest.fixture
def record(store: Store, runner: ReplayRunner, args: WorkloadArgs) -> TuningRecord:
    request = TuneRequest(args.workload(), "random", Budget(trials=30))
    return tune_and_store(store, runner, request, lambda *_: None).record


@pytest.mark.parametrize("path", PAGES)
def test_every_page_opens_on_an_empty_database(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text.replace("http://www.w3.org", "")


def test_a_winner_with_its_plots(http: httpx.Client, record: TuningRecord) -> None:
    text = http.get("/workload", params=QUESTION).text
    assert "measured on this very workload" in text
    assert f"{record.measurement.median_us:,.2f} µs" in text
    assert f"{record.speedup:.2f}\N{MULTIPLICATION SIGN}" in text
    assert str(record.schedule.knobs["block_m"]) in text
    for part in ("convergence", "pareto", "statuses"):
        assert f'id="{part}"' in text
    assert f"/v1/kernels/{record.key}/source" in text
    assert http.get(f"/records/{record.key}").text == text


def test_list_filters_and_roofline(http: httpx.Client, record: TuningRecord) -> None:
    assert f"/records/{record.key}" in http.get("/winners").text
    assert f"/records/{record.key}" in http.get("/winners?hardware=h100&dtype=bf16&layout=nt&shape=M=2048").text
    assert f"/records/{record.key}" not in http.get("/winners?shape=M=204").text
    assert "shape must read" in http.get("/winners?shape=M").text
    assert "device must be" in http.get("/winners?hardware=nothing").text
    assert 'id="roofline"' in http.get("/roofline").text
    assert "No record of this device" in http.get("/roofline?hardware=a100").text
    assert '<td class="num">1</td>' in http.get("/hardware").text


def test_mistakes_are_told_on_the_page(http: httpx.Client) -> None:
    for query, told in (
        (QUESTION | {"shape": NASTY}, "dimension &lt;script"),
        (QUESTION | {"hardware": "h1"}, "device must"),
    ):
        answer = http.get("/workload", params=query)
        assert answer.status_code == 422
        assert told in answer.text
    for path in ("/records/none", "/jobs/none", "/model?operator=none"):
        answer = http.get(path)
        assert answer.status_code == 404
        assert "That did not work" in answer.text


def test_hostile_names_come_out_as_text(
    http: httpx.Client, store: Store, record: TuningRecord, device: DeviceSpec
) -> None:
    bad = dataclasses.replace(device, slug=NASTY, name=NASTY, source=NASTY)
    schedule = Schedule(NASTY, FrozenMap({NASTY: NASTY}))
    store.put_winner(dataclasses.replace(record, device=bad, schedule=schedule, vendor=NASTY, template_fingerprint=""))
    job = store.submit(JobRequest(record.workload, NASTY, NASTY))
    store.claim(NASTY)
    store.fail(job.id, NASTY, NASTY)
    hostile = {"shape": NASTY, "dtype": NASTY, "epilogue": NASTY, "hardware": NASTY, "operator": NASTY, "next": NASTY}
    pages = [http.get(path) for path in (*PAGES, f"/jobs/{job.id}")]
    pages += [
        http.get(path, params=hostile) for path in ("/workload", "/winners", "/jobs", "/roofline", "/model", "/login")
    ]
    pages += [http.get(f"/records/{NASTY}")]
    assert any(html.escape(NASTY, quote=False).split("'")[0] in page.text for page in pages)
    for page in pages:
        assert page.status_code < 500
        markup = page.text if page.headers["content-type"].startswith("text/html") else ""
        for live in ("<script>alert", "<img src=x", "onerror=alert(2)>"):
            assert live not in markup


def test_a_job_is_submitted_and_shown(http: httpx.Client, store: Store) -> None:
    fields = {"operator": "matmul", "shape": QUESTION["shape"], "device": "replay:h100", "trials": "8", "epilogue": ""}
    answer = http.post("/jobs", data=fields)
    assert answer.status_code == 303
    (job,) = store.jobs()
    assert answer.headers["location"] == f"/jobs/{job.id}"
    assert (job.device, job.trials) == ("replay:h100", 8)
    assert f'data-job="{job.id}"' in http.get(f"/jobs/{job.id}").text
    assert job.id in http.get("/jobs?state=queued").text
    assert job.id not in http.get("/jobs?state=done").text
    for wrong in ({"trials": "0"}, {"device": "toaster"}, {"shape": ""}, {"strategy": "luck"}):
        answer = http.post("/jobs", data=fields | wrong)
        assert answer.status_code == 422
        assert 'role="alert"' in answer.text
    assert len(store.jobs()) == 1


def test_a_foreign_page_cannot_submit(http: httpx.Client, store: Store) -> None:
    fields = {"shape": QUESTION["shape"], "device": "replay:h100"}
    assert http.post("/jobs", data=fields, headers={"origin": "http://evil.example"}).status_code == 403
    assert store.jobs() == []


def test_with_keys_on_a_page_asks_for_one(http: httpx.Client, app: FastAPI, store: Store) -> None:
    _, key = make_key(store, "reader", ("read",))
    browser = {"accept": "text/html"}
    asked = http.get("/winners?page=2", headers=browser)
    assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=%2Fwinners%3Fpage%3D2")
    assert http.get("/v1/jobs", headers=browser).status_code == 401
    assert http.get("/login").status_code == http.get("/static/style.css").status_code == 200
    assert http.post("/login", data={"key": "kw_" + "x" * 43, "next": "/"}).status_code == 401
    entered = http.post("/login", data={"key": key, "next": "/winners?page=2"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/winners?page=2")
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}={key};") and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert http.get("/winners").status_code == http.get("/v1/jobs").status_code == 200
    assert http.post("/jobs", data={"shape": QUESTION["shape"], "device": "replay:h100"}).status_code == 403
    assert http.post("/logout").status_code == 303
    assert http.get("/winners", headers=browser).status_code == 303


@pytest.mark.parametrize(
    "onward", ["//evil.example", "https://evil.example", "/\\evil.example", "/\n/evil.example", ""]
)
def test_signing_in_leads_nowhere_else(http: httpx.Client, onward: str) -> None:
    assert http.post("/login", data={"key": "", "next": onward}).headers["location"] == "/"
