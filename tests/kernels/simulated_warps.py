"""Warps and barriers of a simulated multiprocessor: the partitions of a warp-specialised kernel run as threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

PATIENCE_S = 20.0


class Stuck(Exception):
    """No partition can go on."""


class Machine:
    """Runs partitions one operation at a time, in random order; copies land at random times, in random order.

    Every operation of a partition calls `pause` first, which returns when it is its turn and `ready()` holds.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.turn: int | None = None
        self.copies: list[Callable[[], None]] = []
        self.failure: BaseException | None = None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        me = threading.get_ident()
        with self.changed:
            self.waiting[me] = ready
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn == me or self.failure is not None, PATIENCE_S)
            if self.failure is not None or self.turn != me:
                raise Stuck
            self.turn = None

    def run(self, partitions: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._guarded, args=(x,), daemon=True) for x in partitions]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self._next(threads)
        for copy in self.copies:
            copy()
        if self.failure is not None:
            raise self.failure

    def _guarded(self, partition: Callable[[], None]) -> None:
        try:
            self.pause()
            partition()
        except Stuck:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            with self.changed:
                self.changed.notify_all()

    def _next(self, threads: list[threading.Thread]) -> None:
        """Let one partition do one operation, or one copy land, once all partitions have stopped at one."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.turn is None and len(self.waiting) == sum(t.is_alive() for t in threads), 0.05
            )
            if self.turn is not None or len(self.waiting) != sum(t.is_alive() for t in threads):
                return
            able = [who for who, ready in self.waiting.items() if ready()]
            if self.copies and (not able or self.rng.random() < 0.4):
                self.copies.pop(self.rng.randrange(len(self.copies)))()
            elif able:
                self.turn = self.rng.choice(able)
                del self.waiting[self.turn]
            elif self.waiting:
                self.failure = self.failure or Stuck("every partition waits")
            self.changed.notify_all()


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and every expected byte has come."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, count: int = 1) -> None:
        self.missing -= count
        self.settle()

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return (self.phase - 1) & 1 == parity
