"""The GPUs here as NVIDIA's driver tells them: importing torch for that would take seconds.

Only what tells one known GPU from another is asked for; `device` asks torch where this is not enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import re
import uuid
from pathlib import Path
from typing import Any

_LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS = 16
_MAJOR = 75
_MINOR = 76
_NAME_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class DriverGpu:
    """One GPU, with the names that torch has for the same properties. uuid: as in "GPU-<uuid>"."""

    name: str
    uuid: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int


@functools.cache
def driver_gpus() -> tuple[DriverGpu, ...] | None:
    """The GPUs that a process may use, in CUDA's order; None where the driver does not tell, or torch could not use
    them."""
    if not _torch_has_cuda():
        return None
    with contextlib.suppress(OSError, AttributeError, _DriverError, UnicodeDecodeError):
        library = ctypes.CDLL(_LIBRARY)
        _ask(library.cuInit, 0)
        count = ctypes.c_int()
        _ask(library.cuDeviceGetCount, ctypes.byref(count))
        return tuple(_describe(library, index) for index in range(count.value))
    return None


class _DriverError(Exception):
    """A call of the driver that failed."""


def _ask(function: Any, *args: Any) -> None:
    if function(*args) != 0:
        raise _DriverError(getattr(function, "__name__", "call"))


def _describe(library: Any, index: int) -> DriverGpu:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name, number = ctypes.create_string_buffer(_NAME_LENGTH), ctypes.create_string_buffer(16)
    _ask(library.cuDeviceGet, ctypes.byref(device), index)
    _ask(library.cuDeviceGetName, name, _NAME_LENGTH, device)
    # the second version tells a slice of a GPU from the whole one
    _ask(library.cuDeviceGetUuid_v2, number, device)
    _ask(library.cuDeviceTotalMem_v2, ctypes.byref(memory), device)
    values = []
    for attribute in (_MAJOR, _MINOR, _MULTIPROCESSORS):
        value = ctypes.c_int()
        _ask(library.cuDeviceGetAttribute, ctypes.byref(value), attribute, device)
        values.append(value.value)
    major, minor, units = values
    return DriverGpu(name.value.decode(), str(uuid.UUID(bytes=number.raw[:16])), major, minor, units, memory.value)


def _torch_has_cuda() -> bool:
    """Whether torch is installed and built for CUDA, read from its source."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return False
    with contextlib.suppress(OSError):
        text = (Path(found.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
        return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None
    return False
