"""How long a GPU call takes: L2 emptied before every call, launch gaps taken out, contenders taking turns.

A CUDA graph of [flush, call] x n is replayed beside a graph of [flush] x n; the difference over n is one reading. The
flush writes more bytes than the L2 cache holds, so every call finds its operands in device memory. Because clocks and
power drift within seconds, contenders that are to be compared are replayed in turns inside each round.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

TIMER_VERSION = 1
"""Raised whenever times of the old protocol can no longer be compared with times of the new one."""

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure: calls in a graph last about `graph_ms` together; `rounds` readings are taken."""

    graph_ms: float
    rounds: int
    most_calls: int = 20


SCREEN = Effort(graph_ms=1.5, rounds=5)
"""For ranking many candidates: about 15 ms each."""

FINAL = Effort(graph_ms=4.0, rounds=25)
"""For comparing finalists with the vendor call."""


class Timer:
    """Times calls on the current CUDA device. Holds the flush buffer and the graphs of bare flushes."""

    def __init__(self, l2_bytes: int) -> None:
        import torch

        self._torch = torch
        self._buffer = torch.empty(max(2 * l2_bytes, 2**26) // 4, dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()
        # one for all graphs: they are replayed one after another, and nobody reads what a call allocates
        self._pool = torch.cuda.graph_pool_handle()
        self._bare: dict[int, Any] = {}
        self._flush_us = self._once_us(lambda: None)

    def samples(self, calls: Sequence[Call], effort: Effort) -> list[list[float]]:
        """Readings in microseconds, one list a call; reading i of every call was taken in round i."""
        counts = [self._count(call, effort) for call in calls]
        graphs = [self._graph(call, count) for call, count in zip(calls, counts, strict=True)]
        readings: list[list[float]] = [[] for _ in calls]
        for turn in range(effort.rounds):
            for place in range(len(calls)):
                at = (place + turn) % len(calls)
                bare = self._replay_us(self._bare_graph(counts[at]))
                full = self._replay_us(graphs[at])
                readings[at].append(max(full - bare, 0.0) / counts[at])
        return readings

    def _flush(self) -> None:
        self._buffer.zero_()

    def _once_us(self, call: Call) -> float:
        """A rough time of flush and call together: the least of three."""
        torch = self._torch
        best = float("inf")
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                self._flush()
                call()
                end.record()
                end.synchronize()
                best = min(best, begin.elapsed_time(end) * 1e3)
        return best

    def _count(self, call: Call, effort: Effort) -> int:
        return max(2, min(effort.most_calls, int(effort.graph_ms * 1e3 / self._once_us(call))))

    def _graph(self, call: Call, count: int) -> Any:
        torch = self._torch
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            for _ in range(count):
                self._flush()
                call()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def _bare_graph(self, count: int) -> Any:
        if count not in self._bare:
            self._bare[count] = self._graph(lambda: None, count)
        return self._bare[count]

    def _replay_us(self, graph: Any) -> float:
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1e3)


def median(samples: Sequence[float]) -> float:
    """The median reading."""
    return statistics.median(samples)


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of over[i] / under[i]: drift that hits both in a round falls out."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True) if b > 0)


LEAST_NOISE = 0.01
"""No two times nearer than this are told apart, whatever the control says."""


def noise_band(control: Sequence[float], again: Sequence[float]) -> float:
    """Relative band inside which times count as equal: twice what the A/A control is off, within 1 % and 10 %."""
    return min(0.1, max(LEAST_NOISE, 2 * abs(paired_ratio(control, again) - 1)))
