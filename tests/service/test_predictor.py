"""The cost model beside the service: in a process of its own, shared by those who ask the same, with a short queue."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from kernelwright.db import Store
from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search import Answer
from kernelwright.service import best as best_module
from kernelwright.service import predictor as predictor_module
from kernelwright.service.answering import Answers, NoRecords
from kernelwright.service.best import BestKernels
from kernelwright.service.metrics import Metrics, StoreCounts
from kernelwright.service.predictor import Predictor
from kernelwright.service.settings import Settings
from kernelwright.types import DeviceSpec, Workload
from tests.db.values import record

SMALL = matmul_workload(64, 64, 64)


def nothing(workload: Workload, device: DeviceSpec) -> Answer:
    return Answer("vendor", workload, device)


class SlowAnswers(Answers):
    """Completes an answer when it may go on."""

    def __init__(self, records: NoRecords | Store) -> None:
        super().__init__(records)
        self.go_on = threading.Event()
        self.asked: list[Workload] = []

    def completed(self, answer: Answer) -> Answer:
        self.go_on.wait(10)
        self.asked.append(answer.workload)
        how = "predicted" if answer.how == "vendor" else answer.how
        return dataclasses.replace(answer, how=how, regret=0.25)


def test_a_process_says_what_the_model_here_does(device: DeviceSpec, tmp_path: Path) -> None:
    answers = Answers(NoRecords(), tmp_path)
    with contextlib.closing(Predictor(answers, 1, tmp_path)) as predictor:
        coming = predictor.ask(nothing(SMALL, device))
        assert coming is not None
        assert coming.result(60) == answers.best(SMALL, device) and coming.result().how == "predicted"
        pids = list(predictor._executor._processes)  # type: ignore[union-attr]
        assert pids and os.getpid() not in pids


def test_a_process_that_is_killed_is_replaced(device: DeviceSpec) -> None:
    with contextlib.closing(Predictor(Answers(NoRecords()), 1)) as predictor:
        first = predictor.ask(nothing(SMALL, device))
        assert first is not None and first.result(60).how == "predicted"
        for pid in list(predictor._executor._processes):  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(BrokenProcessPool):
            asked = predictor.ask(nothing(matmul_workload(32, 64, 64), device))
            assert asked is not None
            asked.result(60)
        again = predictor.ask(nothing(matmul_workload(16, 64, 64), device))
        assert again is not None and again.result(60).how == "predicted"


ORPHAN = """
import time
from kernelwright.service.answering import Answers, NoRecords
from kernelwright.service.predictor import Predictor
if __name__ == "__main__":
    predictor = Predictor(Answers(NoRecords()), 1)
    predictor.begin()
    print(*predictor._executor._processes, flush=True)
    time.sleep(60)
"""


def test_the_process_ends_with_a_service_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    # Gone, or dead and waiting for somebody to take note of it.
    for _ in range(300):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the process outlived the one that it was started by")


def test_who_asks_the_same_shares_it_and_the_queue_has_an_end(device: DeviceSpec) -> None:
    answers = SlowAnswers(NoRecords())
    with contextlib.closing(Predictor(answers, 0)) as predictor:
        most = predictor_module.MOST_WAITING
        asked = [predictor.ask(nothing(matmul_workload(m + 1, 64, 64), device)) for m in range(most)]
        assert predictor.ask(nothing(matmul_workload(1, 64, 64), device)) is asked[0]
        assert predictor.ask(nothing(SMALL, device)) is None
        must = predictor.ask(nothing(SMALL, device), must=True)
        answers.go_on.set()
        assert must is not None and must.result(10).how == "predicted"
        assert len(answers.asked) == most + 1
        assert predictor.ask(nothing(SMALL, device)) is not None


@pytest.fixture
def answers(store: Store) -> SlowAnswers:
    return SlowAnswers(store)


@pytest.fixture
def best(store: Store, answers: SlowAnswers) -> Iterator[BestKernels]:
    made = BestKernels(Settings(model_processes=0), store, answers, Metrics(StoreCounts(store)))
    yield made
    answers.go_on.set()
    made.close()


def test_a_neighbour_is_given_at_once_and_its_regret_later(
    best: BestKernels, answers: SlowAnswers, store: Store, device: DeviceSpec
) -> None:
    known = record(matmul_workload(2048, 4096, 4096))
    schedule = next(iter(get_operator("matmul").space(known.workload, device)))
    store.put_winner(dataclasses.replace(known, device=device, schedule=schedule))
    near = matmul_workload(2048, 4096, 5120)

    async def ask() -> None:
        first = await best.one(near, device, b"words")
        assert (first.how, first.final) == ("nearest", False) and b'"regret":null' in first.body
        # Nobody waits for the model, and nobody works it out again.
        assert best.remembered(b"words") is first
        answers.go_on.set()
        while best._finishing is not None and not best._finishing.done():
            await asyncio.sleep(0.01)
        later = best.remembered(b"words")
        assert later is not None and later.final and b'"regret":0.25' in later.body
        assert await best.one(near, device) is later

    asyncio.run(ask())
    assert answers.asked == [near]


def test_a_crowd_of_misses_is_answered_without_the_model(
    best: BestKernels, answers: SlowAnswers, device: DeviceSpec
) -> None:
    async def ask() -> None:
        waiting = [
            asyncio.create_task(best.one(matmul_workload(m + 1, 64, 64), device))
            for m in range(predictor_module.MOST_WAITING)
        ]
        while len(best._predictor._coming) < predictor_module.MOST_WAITING:
            await asyncio.sleep(0.01)
        busy = await best.one(SMALL, device, b"words")
        assert (busy.how, busy.final) == ("vendor", False) and best_module.BUSY.encode() in busy.body
        assert best.remembered(b"words") is None
        answers.go_on.set()
        assert {given.how for given in await asyncio.gather(*waiting)} == {"predicted"}
        assert (await best.one(SMALL, device)).how == "predicted"

    asyncio.run(ask())


def test_a_process_that_cannot_be_had_costs_the_prediction_only(
    best: BestKernels, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(answer: Answer) -> Answer:
        raise BrokenProcessPool("killed")

    monkeypatch.setattr(best._answers, "completed", broken)
    assert asyncio.run(best.one(SMALL, device)).how == "vendor"
    assert best.whole(SMALL, device).how == "vendor"
