"""Batches, tables, listings, workloads with their trials and fronts, entity tags, pages, and answers kept in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kernelwright.db import Store
from kernelwright.errors import DatabaseUnavailable
from kernelwright.search import Budget, ReplayRunner
from kernelwright.service.answer_cache import AnswerCache, Given, etag_of
from kernelwright.service.client import Client
from kernelwright.service.together import Together
from kernelwright.service.tuning import TuneRequest, tune_and_store
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import Trial, TuningRecord

QUESTION = {"operator": "matmul", "shape": "M=2048,N=4096,K=4096", "hardware": "h100"}


@pytest.fixture
def record(app: FastAPI, store: Store, runner: ReplayRunner, args: WorkloadArgs) -> TuningRecord:
    request = TuneRequest(args.workload(), "exhaustive", Budget(trials=40))
    return tune_and_store(store, runner, request, lambda trial, progress: None).record


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks the cost model fails."""

    def refuse(operator: str) -> None:
        raise AssertionError("the cost model was asked")

    monkeypatch.setattr("kernelwright.service.answering.packaged_model", refuse)


def test_batch_gives_the_single_answers(http: httpx.Client, record: TuningRecord) -> None:
    asked = [{"shape": "M=2048,N=4096,K=4096"}, {"shape": "M=1"}, {"shape": {"M": 2048, "N": 4096, "K": 4096}}]
    results = http.post("/v1/kernels/best:batch", json={"hardware": "h100", "workloads": asked}).json()["results"]
    assert results[0]["best"] == results[2]["best"] == http.get("/v1/kernels/best", params=QUESTION).json()
    assert results[1]["best"] is None and "M, N, K" in results[1]["error"]


@pytest.mark.usefixtures("no_model")
def test_batch_leaves_the_cost_model_alone(http: httpx.Client, record: TuningRecord) -> None:
    asked = [{"shape": "M=2048,N=4096,K=5120"}, {"shape": "M=64,N=64,K=64", "dtype": "fp16"}]
    results = http.post("/v1/kernels/best:batch", json={"hardware": "h100", "workloads": asked}).json()["results"]
    assert [item["best"]["how"] for item in results] == ["nearest", "vendor"]


def test_batch_predicts_when_asked(http: httpx.Client) -> None:
    one = {"shape": "M=64,N=64,K=64"}
    body = {"hardware": "h100", "workloads": [one]}
    assert http.post("/v1/kernels/best:batch", json=body).json()["results"][0]["best"]["how"] == "vendor"
    predicted = http.post("/v1/kernels/best:batch", json=body | {"predict": True}).json()["results"][0]["best"]
    assert predicted["how"] == "predicted"
    assert http.get("/v1/kernels/best", params={**QUESTION, "shape": "M=64,N=64,K=64"}).json() == predicted
    assert (
        http.post("/v1/kernels/best:batch", json=body | {"predict": True, "workloads": [one] * 21}).status_code == 422
    )
    assert http.post("/v1/kernels/best:batch", json=body | {"workloads": [one] * 501}).status_code == 422


@pytest.mark.usefixtures("no_model")
def test_table_merges_what_is_answered_alike(http: httpx.Client, record: TuningRecord) -> None:
    asked = {**QUESTION, "shape": "N=4096,K=4096", "dim": "M", "values": "2048,1536,1792,16"}
    body = http.get("/v1/kernels/table", params=asked).json()
    rows = body["rows"]
    assert [(row["low"], row["high"], row["values"]) for row in rows] == [
        (16, 1535, [16]),
        (1536, None, [1536, 1792, 2048]),
    ]
    assert rows[0]["choice"] == "vendor" and rows[0]["schedule"] is None
    assert rows[1]["schedule"] == record.schedule.to_json() and rows[1]["how"] == ["nearest", "nearest", "measured"]
    assert body["fixed"] == {"N": 4096, "K": 4096}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": "1,x"}, "whole number"),
        ({"values": ",".join(map(str, range(1, 300)))}, "256"),
        ({"dim": "N"}, "given once"),
        ({"dim": "Q"}, "M, N, K"),
        ({"M": "3"}, "parameter must be one of"),
    ],
)
def test_tables_that_cannot_be(http: httpx.Client, change: dict[str, str], words: str) -> None:
    asked = {**QUESTION, "shape": "N=4096,K=4096", "dim": "M", "values": "1,2", **change}
    refused = http.get("/v1/kernels/table", params=asked)
    assert refused.status_code == 422 and (words in refused.json()["detail"] or "other dimensions" in refused.text)


def test_trials_come_in_pages(http: httpx.Client, client: Client, record: TuningRecord, trials: list[Trial]) -> None:
    (workload,) = http.get("/v1/workloads").json()["workloads"]
    assert workload["key"] == record.workload.key
    first = http.get(workload["links"]["trials"], params={"limit": 15, "hardware": "h100"})
    assert first.headers["link"] == f'<{first.json()["next"]}>; rel="next"'
    seen, page = list(first.json()["trials"]), first.json()
    while page["next"]:
        page = http.get(page["next"]).json()
        seen += page["trials"]
    numbers = [trial["number"] for trial in seen]
    assert numbers == sorted(set(numbers)) and len(seen) == 40
    failed = list(client.trials(record.workload.key, status="out_of_resources"))
    assert len(failed) == 4 and failed[0].message == "too much shared memory"
    assert http.get(f"/v1/workloads/{record.workload.key}").json() == workload
    assert http.get("/v1/workloads/none").status_code == 404


def test_front_of_time_and_error(client: Client, record: TuningRecord) -> None:
    points = client.pareto(record.workload.key, "h100")
    assert [point.median_us for point in points] == [100.0]


def test_records_come_in_pages(http: httpx.Client, client: Client, store: Store, record: TuningRecord) -> None:
    for hour in range(3):
        moment = f"2025-01-01T0{hour}:00:00+00:00"
        other = dataclasses.replace(record.toolchain, driver=f"{hour}")
        store.put_winner(dataclasses.replace(record, toolchain=other, created_at=moment))
    everything = http.get("/v1/kernels", params={"operator": "matmul"}).json()
    assert len(everything["records"]) == 4 and everything["next"] is None
    page = http.get("/v1/kernels", params={"limit": 3, "hardware": "h100"}).json()
    rest = http.get(page["next"]).json()
    assert page["records"] + rest["records"] == everything["records"] and rest["next"] is None
    assert [found.id for found in client.records()] == [found["id"] for found in everything["records"]]
    assert http.get("/v1/kernels", params={"hardware": "l4"}).json()["records"] == []


@pytest.mark.usefixtures("no_gpu")
def test_an_answer_that_the_client_has_is_not_sent_again(http: httpx.Client, record: TuningRecord) -> None:
    best = "/v1/kernels/best?operator=matmul&M=2048&N=4096&K=4096&hardware=h100"
    paths = (best, f"/v1/kernels/{record.key}", f"/v1/kernels/{record.key}/source", "/v1/jobs", "/v1/kernels")
    for path in (*paths, "/v1/devices", "/v1/operators", "/v1/workloads"):
        first = http.get(path)
        tag = first.headers["etag"]
        again = http.get(path, headers={"If-None-Match": f'"other", W/{tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag), path
        assert http.get(path, headers={"If-None-Match": '"other"'}).content == first.content
    assert http.get(best).headers["cache-control"] == "private, no-cache"


def test_own_writes_show_at_once(http: httpx.Client, app: FastAPI, store: Store, record: TuningRecord) -> None:
    first = http.get("/v1/kernels/best", params=QUESTION).json()
    faster = dataclasses.replace(record.measurement, median_us=50.0)
    app.state.shared.store.put_winner(dataclasses.replace(record, measurement=faster))
    again = http.get("/v1/kernels/best", params=QUESTION).json()
    assert (first["expected_us"], again["expected_us"]) == (100.0, 50.0)
    app.state.shared.store.quarantine(record.key, "wrong")
    assert http.get("/v1/kernels/best", params=QUESTION).json()["how"] != "measured"


def test_writes_of_others_show_when_the_time_is_up(
    http: httpx.Client, app: FastAPI, store: Store, record: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr("kernelwright.service.best.time.monotonic", lambda: now[0])
    faster = dataclasses.replace(record.measurement, median_us=50.0)
    seen = [http.get("/v1/kernels/best", params=QUESTION).json()["expected_us"]]
    store.put_winner(dataclasses.replace(record, measurement=faster))
    for moment in (0.9, 1.1):
        now[0] = 1e9 + moment
        seen.append(http.get("/v1/kernels/best", params=QUESTION).json()["expected_us"])
    assert seen == [100.0, 100.0, 50.0]


def test_an_answer_is_read_once_while_nothing_changes(
    http: httpx.Client, app: FastAPI, record: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.get("/v1/kernels/best", params=QUESTION)
    best = app.state.shared.best

    def gone(*_: Any) -> None:
        raise DatabaseUnavailable("the disk is away")

    monkeypatch.setattr(best._lookup, "find", gone)
    monkeypatch.setattr(best._lookup, "find_at_once", lambda *_: None)
    assert http.get("/v1/kernels/best", params=QUESTION).status_code == 200
    assert http.get("/v1/kernels/best", params={**QUESTION, "shape": "M=1,N=1,K=1"}).status_code == 503


def test_a_database_that_comes_back_is_used_again(
    http: httpx.Client, app: FastAPI, record: TuningRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def gone() -> None:
            raise DatabaseUnavailable("the disk is away")

        patch.setattr(app.state.shared.best._watch, "token", gone)
        app.state.shared.best._watch.written.set()
        assert http.get("/v1/kernels/best", params=QUESTION).status_code == 503
    assert http.get("/v1/kernels/best", params=QUESTION).json()["how"] == "measured"


def test_use_of_records_is_counted(http: httpx.Client, app: FastAPI, store: Store, record: TuningRecord) -> None:
    for _ in range(3):
        http.get("/v1/kernels/best", params=QUESTION)
    used = app.state.shared.best.take_used()
    assert used == [record.key] * 3 and app.state.shared.best.take_used() == []
    store.count_use(used)
    store.count_use(used[:1])
    state = store.record_state(record.key)
    assert state is not None and state.uses == 4


def test_cache_is_bounded_and_bound_to_the_token() -> None:
    def given(size: int) -> Given:
        return Given(b"x" * size, etag_of(b"x" * size), "measured", None)

    cache = AnswerCache(100)
    cache.put("a", "1", given(60))
    cache.put("b", "1", given(40))
    assert cache.get("a", "1") is not None and cache.get("a", "2") is None and cache.get("a", None) is None
    cache.put("c", "1", given(30))
    assert cache.get("b", "1") is None and cache.get("a", "1") is not None
    cache.put("a", "2", given(10))
    cache.put("d", "2", given(101))
    cache.put("e", None, given(1))
    assert cache.get("d", "2") is None and cache.get("e", None) is None and cache.get("c", "1") is not None


def test_questions_that_come_together_are_answered_together() -> None:
    lots: list[list[int]] = []
    asked_all = threading.Event()

    def work(asked: list[int]) -> list[int]:
        asked_all.wait(10)
        lots.append(asked)
        if 13 in asked:
            raise ValueError("thirteen")
        return [2 * number for number in asked]

    async def ask_all() -> list[Any]:
        together = Together(work, 4)
        try:
            asked = [asyncio.create_task(together.ask(number)) for number in (0, 1, 2, 13, 4, 5, 6)]
            await asyncio.sleep(0)
            asked_all.set()
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            together.close()

    answers = asyncio.run(ask_all())
    assert [str(answer) for answer in answers] == ["0", "2", "4", "thirteen", "8", "10", "12"]
    assert max(map(len, lots)) == 4


def test_whoever_asks_after_the_end_is_answered_too() -> None:
    together: Together[int, int] = Together(lambda asked: [-number for number in asked], 4)
    for number in (1, 2):
        assert asyncio.run(together.ask(number)) == -number
        together.close()
        together.close()


@pytest.fixture
def many(client: Client) -> Iterator[Callable[[list[WorkloadArgs]], list[Any]]]:
    yield lambda asked: client.best_of(asked, "h100")


def test_client_of_batch_and_table(
    client: Client, many: Callable[[list[WorkloadArgs]], list[Any]], record: TuningRecord, args: WorkloadArgs
) -> None:
    assert many([args, args])[1].best.record_id == record.key
    table = client.table(dataclasses.replace(args, dims={"N": 4096, "K": 4096}), "h100", "M", [2048, 1536])
    assert [row.low for row in table.rows] == [1536]
    assert [found.key for found in client.workloads("matmul")] == [record.workload.key]
