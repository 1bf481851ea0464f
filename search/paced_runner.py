"""A runner whose measurements take time, so that a recorded GPU is as slow as the real one was."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from kernelwright.kernels.space import Space
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.search.runner import Finals
from kernelwright.types import Measurement, Schedule, Workload

TRIAL_S = 0.018
"""Median seconds between two trials of the recorded sweep of an H100, where compilers worked ahead."""

FINALS_S = 0.8
"""25 rounds of four contenders, 4 ms of calls and 4 ms of bare flushes each."""

COMPILERS = 2
"""A trial costs its compile time divided by these: so the mean is that of the recorded sweep, 0.127 s a trial."""


class PacedRunner:
    """A replay in which every trial takes `pace` times what it took on the GPU; pace 0 takes no time."""

    def __init__(self, inner: ReplayRunner, pace: float = 1.0) -> None:
        self._inner, self._pace = inner, pace
        self.device, self.toolchain = inner.device, inner.toolchain

    def space(self, workload: Workload) -> Space:
        """The recorded schedules."""
        return self._inner.space(workload)

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """What was recorded, each after the time that it takes."""
        for schedule, measurement in self._inner.measure(workload, schedules, deadline):
            time.sleep(self._pace * seconds_of(measurement))
            yield schedule, measurement

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """What was recorded, after the time of a final round."""
        time.sleep(self._pace * FINALS_S)
        return self._inner.finals(workload, schedules)

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        """Digest of each template's source as it was when the workload was recorded."""
        return self._inner.fingerprints(workload)

    def close(self) -> None:
        """Nothing is held."""


def seconds_of(measurement: Measurement) -> float:
    """What a trial costs a GPU, in seconds."""
    return TRIAL_S + (measurement.compile_s or 0.0) / COMPILERS
