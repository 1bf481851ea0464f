"""A fleet behind the contract of a single runner, so that a search need not know how many devices it has."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernelwright.errors import DeviceLost
from kernelwright.kernels import get_operator
from kernelwright.kernels.space import FiniteSpace, Space
from kernelwright.search.failures import failed
from kernelwright.search.fleet import Fleet
from kernelwright.search.fleet_batch import Batch, Builders
from kernelwright.search.measure_job import KEPT_WORKLOADS
from kernelwright.search.runner import Finals, WarmsUp
from kernelwright.search.station import fingerprints
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Toolchain, Workload

FAILED_NOISE = 0.02

SIDE_BY_SIDE = KEPT_WORKLOADS
"""Searches on one device at a time: while the compilers work for some of them, another's schedules are measured."""

_WITHOUT_COMPILERS = 2
"""Where nothing is compiled, a second search is there for while the first one chooses."""


class FleetRunner:
    """Implements `Runner` and `RecordedCode` on the devices of one kind of a fleet; each search has one of its own.

    A device is taken for what is ready to be measured and for a final round, and given back between: searches side by
    side keep it busy. builders: compilers shared by the fleet; None where the stations compile for themselves. width:
    most devices that measure one batch together; 1 keeps a workload's times on one device as far as possible.
    """

    def __init__(self, fleet: Fleet, slug: str, *, builders: Builders | None = None, width: int = 1) -> None:
        self._fleet, self._slug, self._builders, self._width = fleet, slug, builders, width
        self._about = fleet.about(slug)
        self._last = ""
        self._spaces: dict[Workload, Space] = {}
        self._prints: dict[Workload, Mapping[str, str]] = {}
        self.device: DeviceSpec = self._about.device
        self.toolchain: Toolchain = self._about.toolchain

    def space(self, workload: Workload) -> Space:
        """Every legal schedule, or those that were recorded; the errors of the stations' runners."""
        if not self._about.recorded:
            return get_operator(workload.operator).space(workload, self.device)
        if workload not in self._spaces:
            self._spaces[workload] = FiniteSpace(list(self._ask_until_told("offered", workload)))
        return self._spaces[workload]

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """Measurements as they come, from one device or several; DeviceLost when none of the kind is left."""
        if not schedules or (deadline is not None and time.monotonic() >= deadline):
            return
        batch = Batch(
            self._fleet,
            self._slug,
            workload,
            schedules,
            builders=self._builders,
            width=self._width,
            prefer=self._device(),
            deadline=deadline,
        )
        results = batch.results()
        try:
            yield from results
        finally:
            results.close()
            self._last = batch.used

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """The final round, whole on one device; a round that takes devices down fails as one."""
        reason = ""
        for _ in range(self._fleet.rules.tries):
            try:
                finals: Finals = self._ask("finals", workload, tuple(schedules), own=True)
                return finals
            except _Gone as error:
                reason = str(error)
        outcome = failed(Status.CRASHED, f"every device was lost that tried the final round; the last: {reason}")
        return Finals(tuple((schedule, outcome) for schedule in schedules), "", None, FAILED_NOISE, None)

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        """Digest of each template's source that the times belong to."""
        if not self._about.recorded:
            return fingerprints(workload)
        if workload not in self._prints:
            self._prints[workload] = self._ask_until_told("fingerprints", workload)
        return self._prints[workload]

    def close(self) -> None:
        """Nothing is held between two calls: the devices belong to the fleet."""

    def warm_up(self) -> None:
        """Wait until compilers for all devices are up; the measuring processes are since the fleet was opened."""
        if isinstance(self._builders, WarmsUp):
            self._builders.warm_up()

    def _device(self) -> str:
        """Name of the device to go to: the search's own, or for a search over several that of its last batch."""
        return self._last if self._width > 1 else self._fleet.settle(self, self._slug)

    def _ask_until_told(self, method: str, workload: Workload) -> Any:
        while True:
            try:
                return self._ask(method, workload)
            except _Gone:
                continue

    def _ask(self, method: str, *args: Any, own: bool = False) -> Any:
        """What a device answers; own: the one where the search is, whose operands lie there."""
        prefer = self._device() if own else self._last
        member = self._fleet.take(self._slug, prefer, stay=own and self._width == 1)
        assert member is not None
        timeout_s = self._fleet.rules.finals_s if method == "finals" else None
        try:
            result = self._fleet.ask(member, method, *args, timeout_s=timeout_s)
        except DeviceLost as error:
            self._fleet.lost(member, str(error))
            raise _Gone(str(error)) from error
        except BaseException:
            self._fleet.give(member)
            raise
        self._last, member.losses = member.name, 0
        self._fleet.give(member)
        return result


def side_by_side(builders: Builders | None) -> int:
    """How many searches a device of such a fleet should have, each with a runner of its own."""
    return _WITHOUT_COMPILERS if builders is None else SIDE_BY_SIDE


class _Gone(DeviceLost):
    """This device was lost, and another may do."""
