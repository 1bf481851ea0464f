"""Token buckets: each client may send so many requests a second, and a burst after a pause."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

MAX_CLIENTS = 10_000


class RateLimit:
    """A bucket for each client: it holds up to `burst` tokens and gains `rate` a second; a request takes one.

    Remembers the last MAX_CLIENTS clients; one that is forgotten starts with a full bucket. rate 0 means no limit.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, client: str, tokens: float = 1.0) -> float:
        """0.0 when the client may go on, otherwise the seconds that it should wait first."""
        if not self.rate:
            return 0.0
        now = self._clock()
        held, since = self._buckets.pop(client, (float(self.burst), now))
        held = min(float(self.burst), held + (now - since) * self.rate)
        wait = 0.0 if held >= tokens else (tokens - held) / self.rate
        self._buckets[client] = (held - tokens if wait == 0.0 else held, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


def retry_after(seconds: float) -> str:
    """The value of a Retry-After header: whole seconds, at least 1."""
    return str(max(1, math.ceil(seconds)))
