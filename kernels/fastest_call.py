"""Which of several calls of torch is the fastest on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, Callable[[], Any]]
"""A name and what runs it."""

WARM_UPS, TIMINGS = 3, 5


def fastest(calls: Sequence[Call]) -> Call:
    """The call with the least median time on the present GPU; those that the library refuses are left out."""
    import torch

    times: list[tuple[float, int]] = []
    for place, (_, run) in enumerate(calls):
        try:
            for _ in range(WARM_UPS):
                run()
            samples = []
            for _ in range(TIMINGS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                run()
                end.record()
                end.synchronize()
                samples.append(start.elapsed_time(end))
        except RuntimeError:
            # a format, size or fusion that this build of the library does not take
            continue
        times.append((statistics.median(samples), place))
    return calls[min(times)[1]] if times else calls[0]
