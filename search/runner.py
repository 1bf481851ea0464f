"""What measures schedules: a GPU through a child process, or a record of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from kernelwright.kernels.space import Space
from kernelwright.types import DeviceSpec, Measurement, Schedule, Toolchain, Workload


@dataclasses.dataclass(frozen=True)
class Finals:
    """The final round: finalists and the vendor library timed again, taking turns.

    measurements: one a finalist, failures included. vendor: the library call, "" if there is none; vendor_us: its
    median in microseconds. noise: relative band inside which two times count as equal. aa_ratio: the vendor call
    against itself in the same round, 1.0 is perfect.
    """

    measurements: tuple[tuple[Schedule, Measurement], ...]
    vendor: str
    vendor_us: float | None
    noise: float
    aa_ratio: float | None


class Runner(Protocol):
    """One device that schedules can be measured on. A bad schedule never raises: it comes back as a failure."""

    @property
    def device(self) -> DeviceSpec:
        """What is measured on."""
        ...

    @property
    def toolchain(self) -> Toolchain:
        """The software that the times belong to."""
        ...

    def space(self, workload: Workload) -> Space:
        """The schedules that may be proposed here; UsageError for a workload that this runner cannot have."""
        ...

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """Measurements in the order they finish, each schedule once; those that would come after the deadline
        (a reading of `time.monotonic`) are left out."""
        ...

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """The given schedules and the vendor call verified and timed again, taking turns."""
        ...

    def close(self) -> None:
        """Give the device back; closing twice is harmless."""
        ...


Feed = Callable[[], Sequence[Schedule]]
"""Asked after each measurement what else to measure."""


@runtime_checkable
class TakesMore(Protocol):
    """What a runner adds that takes more schedules while it measures: no compiler waits for the slowest one."""

    def measure_fed(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None, feed: Feed
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """As `Runner.measure`; what `feed` gives is measured, too."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """What a runner adds that has processes to start before it can measure."""

    def warm_up(self) -> None:
        """Wait until a search can begin; at once where it could already."""
        ...


@runtime_checkable
class RecordedCode(Protocol):
    """What a runner adds whose times were taken from kernel sources other than today's."""

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        """Digest of the kernel source by template, as it was when the workload was measured."""
        ...
