"""Questions that come while others are being answered wait and are answered together: one read serves them all."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """Answers questions of event loops in a thread of its own. A lone question does not wait for others.

    work: gives the answers to a list of questions, in their order. most: how many it gets at once. rests: how long the
    thread sleeps after each lot, in times of what that took, so that Python's lock is free for others.
    """

    def __init__(self, work: Callable[[list[Q]], list[A]], most: int, rests: float = 0.0) -> None:
        self._work = work
        self._most = most
        self._rests = rests
        self._waiting: queue.SimpleQueue[tuple[Q, asyncio.Future[A]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def ask(self, question: Q) -> A:
        """The answer; raises what `work` raises for this question."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.put((question, future))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kernelwright-reads", daemon=True)
            self._thread.start()
        return await future

    def close(self) -> None:
        """End the thread once what waits is answered; the next question starts another."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            lot = [first]
            with contextlib.suppress(queue.Empty):
                while len(lot) < self._most:
                    following = self._waiting.get_nowait()
                    if following is None:
                        self._waiting.put(None)
                        break
                    lot.append(following)
            began = time.monotonic()
            self._answer(lot)
            if self._rests:
                time.sleep(self._rests * (time.monotonic() - began))

    def _answer(self, lot: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = self._work([question for question, _ in lot])
        except Exception as error:
            if len(lot) == 1:
                _tell([(lot[0][1], error)])
                return
            # One that cannot be answered must not take the others with it.
            for one in lot:
                self._answer([one])
            return
        _tell([(future, answer) for (_, future), answer in zip(lot, answers, strict=True)])


def _tell(answers: Sequence[tuple[asyncio.Future[A], A | Exception]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[A], A | Exception]]] = {}
    for future, answer in answers:
        by_loop.setdefault(future.get_loop(), []).append((future, answer))
    for loop, settled in by_loop.items():
        # A loop that has ended meanwhile has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, settled)


def _settle(answers: Sequence[tuple[asyncio.Future[A], A | Exception]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
