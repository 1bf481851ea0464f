"""What a process does that times pieces on the CPU, with a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kernelwright.compiler.piece_job import PieceJob, PieceReply, measure, warm_up
from kernelwright.search.timing import Effort


class Clock:
    """The first two calls are a piece as it is, all others take 1 us."""

    def __init__(self, theirs_us: float) -> None:
        self._theirs_us = theirs_us

    def samples(self, calls: Sequence[Callable[[], Any]], effort: Effort) -> list[list[float]]:
        return [[self._theirs_us if place < 2 else 1.0] * effort.rounds for place in range(len(calls))]


def start(theirs_us: float) -> Callable[[PieceJob], PieceReply]:
    return lambda job: measure(job, Clock(theirs_us), "cpu")


def start_meter(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], PieceReply | None]:
    return lambda job: warm_up("cpu") if job is None else measure(job, Clock(2.0), "cpu")


def start_hanging(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], None]:
    return lambda job: time.sleep(600)
