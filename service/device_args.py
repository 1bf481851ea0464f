"""A device as people type it: "replay:h100" is recorded trials, "cuda", "gpu" or "cuda:1" the GPU in this machine."""

from __future__ import annotations

import dataclasses
import re

from kernelwright.errors import UnknownDevice, UsageError
from kernelwright.kernels.device import named_device, present_device
from kernelwright.types import DeviceSpec

GPU = re.compile(r"(?:cuda|gpu|rocm|hip)(?::[0-9]{1,4})?")
"""How a GPU of this machine is written."""


@dataclasses.dataclass(frozen=True)
class DeviceArgs:
    """A device specification taken apart: the slug of a replay device, or the index of a GPU here."""

    replay: str | None
    index: int = 0

    def __str__(self) -> str:
        """The one way to write this device, which jobs are filed under."""
        if self.replay is not None:
            return f"replay:{self.replay}"
        return f"cuda:{self.index}" if self.index else "cuda"

    def spec(self) -> DeviceSpec:
        """What the GPU is; UnknownDevice when there is none of that name, or none in this machine."""
        return named_device(self.replay) if self.replay is not None else present_device(self.index)


def parse_device(text: str) -> DeviceArgs:
    """Take a specification apart; UnknownDevice when it reads otherwise or names no known GPU to replay."""
    kind, _, rest = text.strip().lower().partition(":")
    if kind == "replay":
        return DeviceArgs(named_device(rest).slug)
    if GPU.fullmatch(text.strip().lower()):
        return DeviceArgs(None, int(rest or 0))
    raise UnknownDevice(f"device must be cuda, cuda:<index> or replay:<name> such as replay:h100, got {text[:80]!r}")


def device_for_query(hardware: str | None, device: str | None) -> DeviceSpec:
    """The GPU a query is about, by name, by device specification, or the one present; UsageError when two differ."""
    if hardware is None:
        return parse_device(device or "cuda").spec()
    named = named_device(hardware)
    if device is not None and parse_device(device).spec().key != named.key:
        raise UsageError(f"hardware and device must be the same GPU, got {hardware!r} and {device!r}; give one of them")
    return named
