"""What stands beside one device of a fleet, in an actor elsewhere or in this process, and does what it is asked."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from kernelwright.errors import KernelwrightError
from kernelwright.kernels import OPERATORS, get_operator
from kernelwright.kernels.build import BuildReport
from kernelwright.search.device_guard import Probe
from kernelwright.search.runner import Finals, RecordedCode, Runner
from kernelwright.types import DeviceSpec, Measurement, Schedule, Toolchain, Workload, digest


@runtime_checkable
class MeasuresBuilt(Protocol):
    """What a runner adds that can measure a schedule which somebody else has compiled already."""

    def measure_built(self, workload: Workload, schedule: Schedule, built: BuildReport) -> Measurement:
        """The measurement of a schedule whose machine code lies in Triton's cache of this machine."""
        ...


@runtime_checkable
class Probed(Protocol):
    """What a runner adds that can say how its device is doing."""

    def probe(self) -> Probe:
        """Times of the probe kernels and the clocks; DeviceLost when the device does not run them."""
        ...


@dataclasses.dataclass(frozen=True)
class Description:
    """Who answers. code: digest of the kernel sources installed there. recorded: times come from a recording.
    host, pid: the machine's name and the process."""

    device: DeviceSpec
    toolchain: Toolchain
    code: str
    recorded: bool
    host: str
    pid: int


class Station:
    """One runner, asked from elsewhere: one schedule at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def answer(self, method: str, *args: Any) -> tuple[bool, Any]:
        """(True, result) of a method, or (False, error) for an error of ours, which so survives any transport."""
        try:
            return True, getattr(self, method)(*args)
        except KernelwrightError as error:
            return False, error

    def describe(self) -> Description:
        """The device, and what its times belong to."""
        runner = self._runner
        recorded = isinstance(runner, RecordedCode)
        return Description(
            runner.device, runner.toolchain, installed_code(), recorded, socket.gethostname(), os.getpid()
        )

    def offered(self, workload: Workload) -> tuple[Schedule, ...]:
        """The members of the runner's space; the errors of `Runner.space`."""
        return tuple(self._runner.space(workload))

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        """Digest of each template's source that the times belong to."""
        runner = self._runner
        return dict(runner.fingerprints(workload)) if isinstance(runner, RecordedCode) else fingerprints(workload)

    def measure(self, workload: Workload, schedule: Schedule, built: BuildReport | None = None) -> Measurement:
        """One schedule's measurement; built: what the compiler said of it, where it was compiled already."""
        if built is not None and isinstance(self._runner, MeasuresBuilt):
            return self._runner.measure_built(workload, schedule, built)
        ((_, measurement),) = self._runner.measure(workload, [schedule])
        return measurement

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """The final round."""
        return self._runner.finals(workload, schedules)

    def probe(self) -> Probe | None:
        """How the device is doing; None where it cannot tell."""
        return self._runner.probe() if isinstance(self._runner, Probed) else None

    def close(self) -> None:
        """Give the device back."""
        self._runner.close()


def fingerprints(workload: Workload) -> dict[str, str]:
    """Digest of each installed template's source."""
    return {name: template.fingerprint for name, template in get_operator(workload.operator).templates.items()}


def installed_code() -> str:
    """Digest of all kernel sources installed here: machines that agree in it run the same kernels."""
    prints = {
        name: {template: one.fingerprint for template, one in operator.templates.items()}
        for name, operator in OPERATORS.items()
    }
    return digest(prints)
