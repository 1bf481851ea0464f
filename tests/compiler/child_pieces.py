"""What a process does that times pieces on the CPU, with a clock of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # what hangs or dies needs no torch, which takes seconds to import
    from kernelwright.compiler.piece_job import PieceJob, PieceReply
    from kernelwright.search.timing import Effort


class Clock:
    """The first two calls are a piece as it is, all others take 1 us."""

    def __init__(self, theirs_us: float) -> None:
        self._theirs_us = theirs_us

    def samples(self, calls: Sequence[Callable[[], Any]], effort: Effort) -> list[list[float]]:
        return [[self._theirs_us if place < 2 else 1.0] * effort.rounds for place in range(len(calls))]


def start(theirs_us: float) -> Callable[[PieceJob], PieceReply]:
    from kernelwright.compiler.piece_job import measure

    return lambda job: measure(job, Clock(theirs_us), "cpu")


def start_noting(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], PieceReply | None]:
    """Notes what it does in a file; warming up goes on until its caller says that it has gone on, too."""
    from kernelwright.compiler.piece_job import PieceReply

    folder = Path(os.environ["KW_NOTES"])

    def note(word: str) -> None:
        with (folder / "notes").open("a") as file:
            file.write(f"{word}\n")

    def work(job: PieceJob | None) -> PieceReply | None:
        note("warming up" if job is None else "timing")
        end = time.monotonic() + 120
        while job is None and not (folder / "gone on").exists() and time.monotonic() < end:
            time.sleep(0.01)
        note("warm" if job is None else "timed")
        return None if job is None else PieceReply(2.0, {}, {}, 0.01)

    return work


def start_hanging(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], None]:
    return lambda job: time.sleep(600)


def start_dying(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], None]:
    os.abort()


def start_warm(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], None]:
    """Every piece hangs."""
    return lambda job: job and time.sleep(600)
