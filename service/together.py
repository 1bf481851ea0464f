"""Questions that come while others are being answered wait and are answered together: one read serves them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from anyio import to_thread

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    """Answers questions in a thread, never two lots at once. A lone question does not wait for others.

    work: gives the answers to a list of questions, in their order. most: how many it gets at once.
    """

    def __init__(self, work: Callable[[list[Q]], list[A]], most: int) -> None:
        self._work = work
        self._most = most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """The answer; raises what `work` raises for this question."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                lot, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._answer(lot)
        finally:
            self._running = None

    async def _answer(self, lot: list[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await to_thread.run_sync(self._work, [question for question, _ in lot])
        except Exception as error:
            if len(lot) == 1:
                _settle(lot[0][1], error)
                return
            # One that cannot be answered must not take the others with it.
            for one in lot:
                await self._answer([one])
            return
        for (_, future), answer in zip(lot, answers, strict=True):
            if not future.done():
                future.set_result(answer)


def _settle(future: asyncio.Future[A], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
