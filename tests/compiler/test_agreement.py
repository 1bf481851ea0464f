"""Ranks of one job choose the same kernels, whatever each of them knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as distributed

from kernelwright.compiler import agreement
from kernelwright.compiler.agreement import AgreedAnswers, Job, current_job
from kernelwright.compiler.dispatch import RecordedAnswers
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import TuningRecord, Workload

H100 = named_device("h100")
TOOLCHAIN = current_toolchain(TIMER_VERSION)
WORKLOAD = matmul_workload(2048, 4096, 4096)
Maker = Callable[..., TuningRecord]


def answers(*records: TuningRecord) -> RecordedAnswers:
    return RecordedAnswers(records, H100, TOOLCHAIN)


def test_the_first_answer_is_everybodys(record_of: Maker) -> None:
    store = distributed.HashStore()
    ranks = [AgreedAnswers(known, store) for known in (answers(record_of(WORKLOAD)), answers())]
    first, second = (rank(WORKLOAD) for rank in ranks)
    assert first.choice == "kernel" and second == dataclasses.replace(first, record=None, roofline=None)


def test_what_was_not_measured_holds_for_the_graph_that_asked(record_of: Maker) -> None:
    store, known = distributed.HashStore(), answers(record_of(WORKLOAD))
    early, late = AgreedAnswers(answers(), store), AgreedAnswers(known, store)
    asked = [WORKLOAD, matmul_workload(16, 16, 16)]
    early.prepare(asked)
    late.prepare(asked)
    assert [rank(WORKLOAD).choice for rank in (early, late)] == ["vendor", "vendor"]
    # in the next graph one of them has tuned it, and all take that
    for rank in (late, early):
        rank.prepare([WORKLOAD])
        assert rank(WORKLOAD).choice == "kernel"
    # whoever compiles the first graph only now does as the others did
    third = AgreedAnswers(known, store)
    third.prepare(asked[::-1])
    assert third(WORKLOAD).choice == "vendor"


def test_another_gpu_has_answers_of_its_own(record_of: Maker) -> None:
    store = distributed.HashStore()
    other = RecordedAnswers([], named_device("h200"), TOOLCHAIN)
    assert AgreedAnswers(answers(record_of(WORKLOAD)), store)(WORKLOAD).choice == "kernel"
    assert AgreedAnswers(other, store)(WORKLOAD).choice == "vendor"


def test_a_store_that_fails_leaves_a_rank_its_own_answers(record_of: Maker, caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            raise RuntimeError("connection lost")

        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection lost")

    assert AgreedAnswers(answers(record_of(WORKLOAD)), Gone())(WORKLOAD).choice == "kernel"
    assert not Job(Gone(), 2).all_know("state")
    assert caplog.text.count("connection lost") >= 2


def test_questions_are_passed_on() -> None:
    class Source:
        asked: Sequence[Workload] = ()

        def prepare(self, workloads: Sequence[Workload]) -> None:
            self.asked = workloads

        def __call__(self, workload: Workload) -> Answer:
            return Answer("vendor", workload, H100)

    source = Source()
    AgreedAnswers(source, distributed.HashStore()).prepare([WORKLOAD])
    assert source.asked == [WORKLOAD]


def test_a_source_that_fails_leaves_a_rank_in_the_job(record_of: Maker, caplog: pytest.LogCaptureFixture) -> None:
    class Source:
        def prepare(self, workloads: Sequence[Workload]) -> None:
            raise OSError("no room left")

        def tune(self, calls: dict[Workload, int]) -> None:
            raise OSError("no room left")

        def __call__(self, workload: Workload) -> Answer:
            return Answer("vendor", workload, H100)

    store = distributed.HashStore()
    first, failing = AgreedAnswers(answers(record_of(WORKLOAD)), store), AgreedAnswers(Source(), store)
    for rank in (first, failing):
        rank.prepare([WORKLOAD])
        rank.tune({WORKLOAD: 1})
        assert rank(WORKLOAD).choice == "kernel"
    assert caplog.text.count("no room left") == 2


def test_all_know_what_every_rank_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.1)
    # as every process has a store of its own
    stores = [distributed.PrefixStore("", shared) for shared in [distributed.HashStore()] * 2]
    one, other = (Job(store, 2) for store in stores)
    assert not one.all_know("a") and not one.all_know("a") and not other.all_know("b")
    assert other.all_know("a") and one.all_know("a") and one.all_know("b")


def test_a_rank_waits_once_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = distributed.HashStore()
    one, other = (Job(distributed.PrefixStore("", shared), 2) for _ in range(2))
    monkeypatch.setattr(agreement, "PATIENCE_S", 60.0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(one.all_know, "a")
        assert other.all_know("a") and waiting.result(60.0)
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.0)
    assert not one.all_know("b")
    monkeypatch.setattr(agreement, "PATIENCE_S", math.inf)
    assert not one.all_know("b")


def test_what_a_job_has_read_it_reads_no_more() -> None:
    store, read = distributed.HashStore(), iter(range(9))
    assert [Job(store, 2).once(what, lambda: next(read)) for what in ("a", "b", "a")] == [0, 1, 0]
    assert Job(distributed.HashStore(), 2).once("a", lambda: next(read)) == 2


def test_without_a_job_there_is_nobody_to_agree_with() -> None:
    assert current_job() is None
