"""Which schedules Triton's cache on this machine holds compiled, by small files beside it: asking the cache itself
takes the whole front end of the compiler."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kernelwright.kernels import OPERATORS, triton_adapter
from kernelwright.types import DeviceSpec, Schedule, Workload, digest

KEYS = "settled"
"""How kernels come to their keys in Triton's cache (`triton_adapter.with_settled_keys`); what was compiled under others
is not found there."""


def is_built(workload: Workload, schedule: Schedule, device: DeviceSpec) -> bool:
    """Whether this schedule was compiled into the present cache, from the source and by the compiler of today."""
    return _marker(workload, schedule, device).exists()


def note_built(workload: Workload, schedule: Schedule, device: DeviceSpec) -> None:
    """Remember that it was. A folder that cannot be written to forgets."""
    with contextlib.suppress(OSError):
        marker = _marker(workload, schedule, device)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _marker(workload: Workload, schedule: Schedule, device: DeviceSpec) -> Path:
    operator = OPERATORS.get(workload.operator)
    template = None if operator is None else operator.templates.get(schedule.template)
    source = "" if template is None else template.fingerprint
    toolchain = triton_adapter.current_toolchain(0, device.architecture)
    parts = [workload.key, schedule.key, device.key, source, toolchain.triton, toolchain.compiler, KEYS]
    # gone whenever the cache is emptied
    return triton_adapter.cache_folder() / "kernelwright" / digest(parts)
