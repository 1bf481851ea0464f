"""The cost model beside the service: in a process of its own, so that whoever is answered from records does not wait.

A prediction computes for a tenth of a second or more, most of it under Python's lock, which every other request needs.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from kernelwright.kernels import OPERATORS
from kernelwright.search.answer import Answer
from kernelwright.service.answering import Answers, NoRecords

MOST_WAITING = 4
"""Questions that wait for one process at most; they wait a second or so."""

_NICENESS = 10

logger = logging.getLogger(__name__)


class Predictor:
    """Completes answers with what the cost model knows. Threads may share it.

    processes: how many run beside this one, started when they are first needed; 0 asks in a thread of this process.
    """

    def __init__(self, answers: Answers, processes: int, models: Path | None = None) -> None:
        self._answers = answers
        self._processes = processes
        self._models = models
        self._executor: Executor | None = None
        self._coming: dict[tuple[str, ...], Future[Answer]] = {}
        self._lock = threading.Lock()

    def ask(self, answer: Answer, *, must: bool = False) -> Future[Answer] | None:
        """The completed answer, which is to come; None where as many wait as may, unless it must be.

        Those who ask the same meanwhile share it.
        """
        key = _key(answer)
        with self._lock:
            coming = self._coming.get(key)
            if coming is not None:
                return coming
            if len(self._coming) >= MOST_WAITING * max(1, self._processes) and not must:
                return None
            executor, coming = self._submit(answer)
            self._coming[key] = coming
        coming.add_done_callback(lambda done: self._forget(key, executor, done))
        return coming

    def begin(self) -> None:
        """Start a process, if it is to be one, and have it load the models; nobody waits for that."""
        if not self._processes:
            return
        with self._lock:
            self._executor = self._executor or self._start()
            for operator in OPERATORS:
                self._executor.submit(_load, self._models, operator)

    def close(self) -> None:
        """End the processes; what waits is given up."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self, answer: Answer) -> tuple[Executor, Future[Answer]]:
        for _ in range(2):
            executor = self._executor = self._executor or self._start()
            try:
                if self._processes:
                    return executor, executor.submit(_completed, self._models, answer)
                return executor, executor.submit(self._answers.completed, answer)
            except BrokenProcessPool:
                self._executor = None
        failed: Future[Answer] = Future()
        failed.set_exception(BrokenProcessPool("the cost model's process ends as soon as it begins"))
        return executor, failed

    def _start(self) -> Executor:
        if not self._processes:
            return ThreadPoolExecutor(1, "kernelwright-model")
        # Not forked: this process has threads and database connections.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, initializer=_begin)

    def _forget(self, key: tuple[str, ...], executor: Executor, done: Future[Answer]) -> None:
        broken = not done.cancelled() and isinstance(done.exception(), BrokenProcessPool)
        with self._lock:
            self._coming.pop(key, None)
            if broken and self._executor is executor:
                logger.error("the cost model's process ended by itself; the next question starts another")
                self._executor = None


def _key(answer: Answer) -> tuple[str, ...]:
    schedule = answer.schedule.key if answer.schedule else ""
    return (answer.how, answer.workload.key, answer.device.key, answer.device.slug, schedule)


def _begin() -> None:
    """In a new process: give way to the service, leave signals to it, and end when it has."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@functools.cache
def _answers_of(models: Path | None) -> Answers:
    return Answers(NoRecords(), models)


def _load(models: Path | None, operator: str) -> None:
    _answers_of(models).model(operator)


def _completed(models: Path | None, answer: Answer) -> Answer:
    return _answers_of(models).completed(answer)
