"""Answers of a service: believed when they fit, waited for no longer than told, and never able to break a compile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler import ops, service_answers
from kernelwright.compiler.backend import kernelwright as backend
from kernelwright.compiler.dispatch import MostCertain, RecordedAnswers
from kernelwright.compiler.report import Report
from kernelwright.compiler.service_answers import ServiceAnswers, Source
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.service.answer_json import tell
from kernelwright.service.questions import args_in
from kernelwright.service.schemas import WorkloadIn
from kernelwright.types import TuningRecord

H100 = named_device("h100")
TOOLCHAIN = current_toolchain(TIMER_VERSION)
WORKLOAD = matmul_workload(64, 48, 32, "fp32", epilogue=("bias",))
Maker = Callable[..., TuningRecord]
Spoil = Callable[[dict[str, Any]], Any]


class Service:
    """A service that answers from records, or as `behave` does. asked: how many workloads each request had."""

    def __init__(self) -> None:
        self.records: list[TuningRecord] = []
        self.behave: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.spoil: Spoil = lambda best: best
        self.asked: list[int] = []
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.asked.append(len(body["workloads"]))
        if self.behave is not None:
            self.behave(handler)
            return
        answers = RecordedAnswers(self.records, H100, TOOLCHAIN)
        workloads = [args_in(WorkloadIn.model_validate(sent)).workload() for sent in body["workloads"]]
        results = [self.spoil(tell(answers(workload)).model_dump(mode="json", by_alias=True)) for workload in workloads]
        send(handler, json.dumps({"results": [{"best": best, "error": None} for best in results]}).encode())


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    with contextlib.suppress(OSError):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """An answer that never ends: each byte comes in time for the client's own limit."""
    with contextlib.suppress(OSError):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for _ in range(1200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)


@pytest.fixture
def service() -> Iterator[Service]:
    found = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def source(service: Service, tmp_path: Path) -> Source:
    return Source(service.url, H100, TOOLCHAIN, seconds=10.0, folder=tmp_path)


def test_an_answer_of_the_service_is_ours(service: Service, source: Source, record_of: Maker) -> None:
    service.records = [record_of(WORKLOAD)]
    answer = ServiceAnswers(source)(WORKLOAD)
    assert (answer.how, answer.choice, answer.schedule) == ("measured", "kernel", service.records[0].schedule)
    assert (answer.expected_us, answer.vendor_us) == (50.0, 100.0)


def test_many_are_asked_at_once_and_remembered_by_the_next_process(service: Service, source: Source) -> None:
    workloads = [matmul_workload(m, 48, 32) for m in range(1, 301)]
    answers = ServiceAnswers(source)
    answers.prepare(workloads)
    answers.prepare(workloads)
    assert {answers(workload).how for workload in workloads} == {"vendor"}
    assert service.asked == [200, 100]
    again = ServiceAnswers(source)
    again.prepare(workloads)
    assert service.asked == [200, 100] and again.state == answers.state


def test_other_software_has_answers_of_its_own(service: Service, source: Source, record_of: Maker) -> None:
    """What is remembered of one torch says nothing of the next one, with which the same times are stale."""
    service.records = [record_of(WORKLOAD)]
    newer = dataclasses.replace(source, toolchain=dataclasses.replace(TOOLCHAIN, torch="99.0"))
    assert [ServiceAnswers(one)(WORKLOAD).how for one in (source, newer, source)] == ["measured", "stale", "measured"]
    assert service.asked == [1, 1]


def test_an_old_answer_is_asked_again(
    service: Service, source: Source, record_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServiceAnswers(source)(WORKLOAD).choice == "vendor"
    service.records = [record_of(WORKLOAD)]
    before = ServiceAnswers(source)
    assert before(WORKLOAD).choice == "vendor"
    monkeypatch.setattr(service_answers, "FRESH_SECONDS", 0.0)
    later = ServiceAnswers(source)
    later.prepare([WORKLOAD])
    assert later(WORKLOAD).choice == "kernel" and later.state != before.state


def test_a_service_that_fails_leaves_what_was_known(
    service: Service, source: Source, record_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.records = [record_of(WORKLOAD)]
    assert ServiceAnswers(source)(WORKLOAD).choice == "kernel"
    monkeypatch.setattr(service_answers, "FRESH_SECONDS", 0.0)
    service.behave = lambda handler: send(handler, b"{}", 503)
    answers = ServiceAnswers(source)
    answers.prepare([WORKLOAD])
    assert answers(WORKLOAD).choice == "kernel" and "503" in answers.warnings[0]


def test_what_a_failure_left_out_is_told_from_an_answer(service: Service, source: Source) -> None:
    """Or a graph that was compiled while the service was down would be taken from Inductor's cache for ever."""
    service.behave = lambda handler: send(handler, b"", 500)
    down = ServiceAnswers(source)
    down(WORKLOAD)
    service.behave = None
    up = ServiceAnswers(source)
    up.prepare([WORKLOAD])
    assert down.state != up.state


@pytest.mark.parametrize(
    "behave",
    [
        lambda handler: send(handler, b"{}", 503),
        lambda handler: send(handler, b"<html>It works!</html>"),
        lambda handler: send(handler, b'{"results": []}'),
        lambda handler: send(handler, b'{"results": [{"best": 7, "error": null}]}'),
        lambda handler: send(handler, b"\xff" * 1000),
        lambda handler: handler.connection.close(),
        lambda handler: time.sleep(60),
        drip,
    ],
    ids=["error", "page", "too few", "no answer", "bytes", "closed", "slow", "drip"],
)
def test_a_service_that_fails_is_waited_for_once_and_no_longer_than_told(
    service: Service, source: Source, behave: Callable[[BaseHTTPRequestHandler], None], caplog: pytest.LogCaptureFixture
) -> None:
    service.behave = behave
    answers = ServiceAnswers(dataclasses.replace(source, seconds=0.3))
    started = time.monotonic()
    for m in (8, 16, 24):
        answers.prepare([matmul_workload(m, 48, 32)])
        assert answers(matmul_workload(m, 48, 32)).choice == "vendor"
    assert time.monotonic() - started < 30
    assert len(service.asked) == 1 and len(answers.warnings) == 1 and len(caplog.records) == 1


def test_a_service_that_is_not_there_is_one_warning(tmp_path: Path) -> None:
    answers = ServiceAnswers(Source("http://127.0.0.1:9", H100, TOOLCHAIN, folder=tmp_path))
    assert answers(WORKLOAD).choice == "vendor"
    assert "no answer from the service" in answers.warnings[0]


def test_an_address_that_is_none_is_misuse(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="address must be a URL"):
        ServiceAnswers(Source("nonsense", H100, TOOLCHAIN, folder=tmp_path))


def changed(**change: Any) -> Spoil:
    return lambda best: {**best, **change}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (changed(workload_key="0" * 20), "it is about"),
        (lambda best: {**best, "hardware": {**best["hardware"], "key": "x"}}, "it is about"),
        (changed(schedule=None), "a kernel without a schedule"),
        (changed(schedule={"template": "pointer", "knobs": {"block_m": 7}}), "is not legal"),
        (changed(schedule={"template": "rm -rf", "knobs": {}}), "is not legal"),
        (changed(expected_us=-1.0), "expected_us is -1.0"),
        (changed(vendor_us=0.0), "vendor_us is 0.0"),
    ],
)
def test_an_answer_that_does_not_fit_is_none(
    service: Service, source: Source, record_of: Maker, spoil: Spoil, words: str
) -> None:
    service.records, service.spoil = [record_of(WORKLOAD)], spoil
    answer = ServiceAnswers(source)(WORKLOAD)
    assert (answer.how, answer.choice, answer.schedule) == ("vendor", "vendor", None) and words in answer.note


def test_a_time_of_another_toolchain_is_stale(service: Service, source: Source, record_of: Maker) -> None:
    service.records = [record_of(WORKLOAD)]
    newer = dataclasses.replace(TOOLCHAIN, driver="999.0")
    assert ServiceAnswers(dataclasses.replace(source, toolchain=newer))(WORKLOAD).how == "stale"


@pytest.mark.parametrize("text", ["", "[]", '{"x": 1}', '{"KEY": {"at": 1e18, "answer": {"how": "measured"}}}'])
def test_a_damaged_file_is_forgotten(service: Service, source: Source, record_of: Maker, text: str) -> None:
    service.records = [record_of(WORKLOAD)]
    source.file.parent.mkdir(parents=True, exist_ok=True)
    source.file.write_text(text.replace("KEY", WORKLOAD.key), encoding="utf-8")
    answers = ServiceAnswers(source)
    answers.prepare([WORKLOAD])
    assert answers(WORKLOAD).choice == "kernel"


def test_workloads_that_cannot_be_typed_are_not_asked_for(service: Service, source: Source) -> None:
    layouts = {"a": "row:80", "b": "col", "out": "row"}
    strided = dataclasses.replace(matmul_workload(64, 64, 64), layouts=layouts)
    assert ServiceAnswers(source)(strided).choice == "vendor" and service.asked == []


def test_the_most_certain_answer_counts(service: Service, source: Source, record_of: Maker) -> None:
    near, exact = matmul_workload(4096, 4096, 4096), matmul_workload(2048, 4096, 4096)
    local = RecordedAnswers([record_of(near)], H100, TOOLCHAIN)
    service.records = [record_of(exact, ours_us=40.0), record_of(near, ours_us=30.0)]
    both = MostCertain([local, ServiceAnswers(source)])
    both.prepare([exact, near])
    assert (both(exact).how, both(exact).expected_us) == ("measured", 40.0)
    assert both(near).expected_us == 50.0
    assert service.asked == [2]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 16))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    service_answers.service_answers.cache_clear()
    yield
    torch._dynamo.reset()
    service_answers.service_answers.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_model_is_compiled_with_the_kernels_of_the_service(
    service: Service, record_of: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = ops.by_torch
    monkeypatch.setattr(ops, "by_torch", lambda *args: seen.append(args[3]) or real(*args))  # type: ignore[func-returns-value]
    monkeypatch.setenv("KERNELWRIGHT_URL", service.url)
    service.records = [record_of(WORKLOAD)]
    report, x = Report(), torch.randn(64, 32)
    options = {"device": "h100", "devices": ("cpu",), "report": report, "wait": 20.0}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model(), backend=backend, options=options)(x), model()(x))
    assert seen == ["bias"] and len(report.replaced) == 1 and len(service.asked) == 1


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("behave", [drip, lambda handler: send(handler, b"[]")], ids=["drip", "nonsense"])
def test_a_bad_service_leaves_the_model_to_inductor(
    service: Service, behave: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    service.behave = behave
    report, x = Report(), torch.randn(64, 32)
    options = {"url": service.url, "device": "h100", "devices": ("cpu",), "report": report, "wait": 0.3}
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model(), backend=backend, options=options)(x), model()(x))
    assert report.replaced == [] and len(report.decisions) == 2 and len(service.asked) == 1
