"""What there is to choose from: named GPUs and operators."""

from __future__ import annotations

from pathlib import Path

from kernelwright.kernels.device import gpu_count, present_device
from kernelwright.kernels.device_table import NAMED_DEVICES
from kernelwright.search.recorded import recorded_devices
from kernelwright.service.answering import fingerprints
from kernelwright.service.schemas import DeviceOut, OperatorOut
from kernelwright.service.workload_args import FORMS
from kernelwright.types import DeviceSpec


def list_devices(recorded: Path | None = None, *, look: bool = False) -> list[DeviceOut]:
    """Every named GPU, and which can be replayed.

    look: tell which are in this machine too, and those that have no name; that loads torch, if it is installed.
    """
    present, replayed = present_devices() if look else [], recorded_devices(recorded)
    known = {**{spec.slug: spec for spec in present}, **NAMED_DEVICES}
    keys = {spec.key for spec in present}
    return [
        DeviceOut(
            slug=slug,
            key=spec.key,
            present=spec.key in keys if look else None,
            replay=slug in replayed,
            spec=spec.to_json(),
        )
        for slug, spec in known.items()
    ]


def present_devices() -> list[DeviceSpec]:
    """The GPUs in this machine, one of each kind; empty without torch."""
    specs = [present_device(index) for index in range(gpu_count())]
    return list({spec.key: spec for spec in specs}.values())


def list_operators() -> list[OperatorOut]:
    """Every operator whose workloads can be typed, how its workloads are typed, and its templates."""
    return [OperatorOut(name=name, dims=list(FORMS[name].dims), templates=fingerprints(name)) for name in FORMS]
