"""Jobs over the API: idempotent, cancelled, in pages, and watched live."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kernelwright.db import Job, Store
from kernelwright.errors import ServiceError
from kernelwright.service.client import Client
from kernelwright.service.job_feed import JobFeed
from kernelwright.service.schemas import JobOut, TrialOut
from kernelwright.service.worker import Worker, WorkerOptions
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import Trial

JOB = {"shape": "M=2048,N=4096,K=4096", "device": "replay:h100", "strategy": "random", "trials": 8}


@pytest.fixture
def job(http: httpx.Client) -> str:
    return str(http.post("/v1/jobs", json=JOB).json()["id"])


def events_of(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Kind, id and data of each event."""
    out = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            out.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return out


def test_the_same_request_makes_one_job(http: httpx.Client) -> None:
    name = {"Idempotency-Key": "8e03978e"}
    first, again = (http.post("/v1/jobs", json=JOB, headers=name) for _ in range(2))
    assert first.status_code == again.status_code == 202 and first.json() == again.json()
    other = http.post("/v1/jobs", json={**JOB, "seed": 1}, headers=name)
    assert other.status_code == 422 and "another request" in other.json()["detail"]
    assert http.post("/v1/jobs", json=JOB).json()["id"] != first.json()["id"]
    assert http.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "x" * 101}).status_code == 422


@pytest.mark.parametrize(("method", "tail"), [("POST", "/cancel"), ("DELETE", "")])
def test_cancel(http: httpx.Client, store: Store, job: str, method: str, tail: str) -> None:
    for _ in range(2):
        answer = http.request(method, f"/v1/jobs/{job}{tail}")
        assert answer.status_code == 200 and answer.json()["state"] == "cancelled"
    assert store.claim("one") is None
    assert http.request(method, f"/v1/jobs/none{tail}").status_code == 404


def test_what_ended_cannot_be_cancelled(http: httpx.Client, client: Client, store: Store, job: str) -> None:
    store.claim("one")
    store.fail(job, "one", "no luck")
    refused = http.delete(f"/v1/jobs/{job}")
    assert refused.status_code == 409 and "failed already" in refused.json()["detail"]
    with pytest.raises(ServiceError, match="409"):
        client.cancel(job)


def test_jobs_come_in_pages(http: httpx.Client, client: Client) -> None:
    made = [http.post("/v1/jobs", json=JOB).json()["id"] for _ in range(5)][::-1]
    page = http.get("/v1/jobs", params={"limit": 2, "state": "queued"}).json()
    seen = [entry["id"] for entry in page["jobs"]]
    while page["next"]:
        page = http.get(page["next"]).json()
        seen += [entry["id"] for entry in page["jobs"]]
    assert seen == made == [found.id for found in client.jobs("queued")]


def test_events_of_a_job_that_is_over(http: httpx.Client, store: Store, open_recorded: Any, job: str) -> None:
    Worker(store, WorkerOptions(), open_recorded).run_once()
    answer = http.get(f"/v1/jobs/{job}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    trials = [event for event in events if event[0] == "trial"]
    assert len(trials) >= 8 and events[-1][0] == "end"
    assert events[-1][2] == http.get(f"/v1/jobs/{job}").json() and events[-1][2]["state"] == "done"
    assert [int(number) for _, number, _ in trials] == [data["number"] for _, _, data in trials]

    rest = events_of(http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": trials[4][1]}).text)
    assert rest == events[events.index(trials[5]) :]
    assert http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "five"}).status_code == 422
    assert http.get("/v1/jobs/none/events").status_code == 404


def test_events_come_while_the_job_runs(
    app: FastAPI, store: Store, trials: list[Trial], args: WorkloadArgs, job: str
) -> None:
    feed = JobFeed(store, 0.02)

    async def watch() -> list[tuple[str, str, dict[str, Any]]]:
        text = ""
        async for part in feed.events(job, 0, lambda: False):
            text += part
            kinds = [kind for kind, _, _ in events_of(text)]
            if kinds == ["job"]:
                store.claim("one")
                store.add_trial(trials[0], job)
                store.progress(job, "one", 1, 8)
            elif kinds[-2:] == ["trial", "job"] and kinds.count("trial") == 1:
                store.add_trial(trials[1], job)
                store.finish(job, "one", "record")
        return events_of(text)

    seen = asyncio.run(asyncio.wait_for(watch(), 20))
    assert [kind for kind, _, _ in seen] == ["job", "trial", "job", "trial", "end"]
    assert [data["state"] for kind, _, data in seen if kind != "trial"] == ["queued", "running", "done"]
    assert seen[2][2]["done"] == 1


def test_many_watchers_share_a_look(store: Store, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(job_id: str) -> Job | None:
        looks.append(job_id)
        return Store.get_job(store, job_id)

    monkeypatch.setattr(store, "get_job", counted)
    feed = JobFeed(store, 30.0)

    async def watch_all() -> list[Any]:
        return await asyncio.gather(*(feed.look(job, 0) for _ in range(50)))

    seen = asyncio.run(watch_all())
    assert len(looks) == 1 and all(look is seen[0] for look in seen)


def test_streams_end_when_the_service_does(store: Store, job: str) -> None:
    async def watch() -> int:
        rounds = 0

        def ended() -> bool:
            nonlocal rounds
            rounds += 1
            return rounds > 3

        return len([part async for part in JobFeed(store, 0.01).events(job, 0, ended)])

    assert asyncio.run(watch()) == 2


def test_quiet_lines_are_kept_open(store: Store, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwright.service.job_feed.HEARTBEAT_SECONDS", 0.0)

    async def watch() -> str:
        stream = JobFeed(store, 0.01).events(job, 0, lambda: False)
        return [await anext(stream) for _ in range(3)][-1]

    assert asyncio.run(watch()).startswith(":")


def test_client_follows_a_job(client: Client, store: Store, open_recorded: Callable[[str], Any], job: str) -> None:
    thread = threading.Thread(target=Worker(store, WorkerOptions(), open_recorded).run_once)
    thread.start()
    thread.join()
    seen = list(client.events(job))
    assert isinstance(seen[-1], JobOut) and seen[-1].state == "done"
    trials = [event for event in seen if isinstance(event, TrialOut)]
    assert len(list(client.events(job, after=trials[-2].number))) == 2
    with pytest.raises(ServiceError, match="404"):
        list(client.events("none"))
