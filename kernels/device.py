"""GPUs as DeviceSpecs: one of the known ones by name, or the one in this machine."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from typing import Any

from kernelwright.errors import UnknownDevice
from kernelwright.kernels.cuda_driver import DriverGpu, driver_gpus
from kernelwright.kernels.device_table import NAMED_DEVICES, SHARED_MEMORY_BYTES
from kernelwright.types import DeviceSpec, FrozenMap

_SAME_MEMORY = 0.1
"""Memory sizes closer than this share are taken as equal: drivers and ECC keep some of what the datasheet says."""

_GUESSED_BANDWIDTH_GBS = 300.0
_GUESSED_CLOCK_HZ = 1.4e9


def named_device(name: str) -> DeviceSpec:
    """The known GPU of that slug, in any case; UnknownDevice lists the names and the nearest one."""
    slug = re.sub(r"[\s_]+", "-", name.strip().lower())
    if slug not in NAMED_DEVICES:
        near = difflib.get_close_matches(slug, NAMED_DEVICES, 1, 0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownDevice(f"device must be one of {', '.join(NAMED_DEVICES)}, got {name[:80]!r}{hint}")
    return NAMED_DEVICES[slug]


def gpu_count() -> int:
    """How many GPUs torch sees in this machine; 0 without torch."""
    listed = _listed()
    if listed is not None:
        return len(listed)
    torch = _torch()
    return int(torch.cuda.device_count()) if torch is not None else 0


def gpu_uuid(index: int) -> str:
    """What tells an NVIDIA GPU from all others, as its driver spells it ("GPU-..."); "" where torch does not say."""
    listed = _listed()
    if listed is not None:
        return f"GPU-{listed[index].uuid}" if 0 <= index < len(listed) else ""
    if not 0 <= index < gpu_count() or _torch().version.hip:
        return ""
    uuid = getattr(_torch().cuda.get_device_properties(index), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def present_device(index: int = 0) -> DeviceSpec:
    """The GPU of that index in this machine; UnknownDevice when there is none.

    A GPU that is known by name gives the named spec, so that two of one kind have one key.
    """
    listed = _listed()
    if listed is not None and 0 <= index < len(listed):
        known = _known(listed[index], f"sm_{listed[index].major}{listed[index].minor}")
        if known is not None:
            return known
    count = gpu_count()
    if not 0 <= index < count:
        if count:
            raise UnknownDevice(f"this machine has {count} GPUs, numbered from 0; there is no number {index}")
        reason = "torch is not installed" if _torch() is None else "torch sees none"
        raise UnknownDevice(
            f"there is no GPU in this machine ({reason}); name a known one, such as h100, or replay:h100 to tune on "
            "recorded trials"
        )
    return device_from_properties(_torch().cuda.get_device_properties(index))


def device_from_properties(properties: Any) -> DeviceSpec:
    """The spec of a GPU that torch describes (what `torch.cuda.get_device_properties` returns)."""
    architecture = _architecture(properties)
    return _known(properties, architecture) or _unnamed(properties, architecture)


def _known(properties: Any, architecture: str) -> DeviceSpec | None:
    for known in NAMED_DEVICES.values():
        same = (known.architecture, known.multiprocessors) == (architecture, properties.multi_processor_count)
        if same and abs(properties.total_memory / known.memory_bytes - 1) < _SAME_MEMORY:
            return known
    return None


def _listed() -> tuple[DriverGpu, ...] | None:
    """The GPUs as the driver tells them, as long as nobody has imported torch, which would have to be asked first."""
    return None if "torch" in sys.modules else driver_gpus()


def _torch() -> Any:
    """The torch module, or None: it is not needed to describe GPUs by name."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _architecture(properties: Any) -> str:
    amd = getattr(properties, "gcnArchName", "")
    if amd.startswith("gfx"):
        return str(amd.partition(":")[0])
    return f"sm_{properties.major}{properties.minor}"


def _unnamed(properties: Any, architecture: str) -> DeviceSpec:
    """A spec from what torch tells; rates are scaled from a known GPU of the nearest architecture."""
    amd = architecture.startswith("gfx")
    cousin = _cousin(architecture)
    bandwidth, bandwidth_source = _bandwidth(properties, cousin)
    rates, rates_source = _rates(properties, cousin)
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return DeviceSpec(
        slug=re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-"),
        name=properties.name,
        vendor="amd" if amd else "nvidia",
        architecture=architecture,
        multiprocessors=properties.multi_processor_count,
        shared_memory_bytes=int(shared or SHARED_MEMORY_BYTES.get(architecture, 65536 if amd else 49152)),
        l2_bytes=int(getattr(properties, "L2_cache_size", 0) or 4 * 2**20),
        memory_bytes=int(properties.total_memory),
        bandwidth_gbs=bandwidth,
        peak_tflops=rates,
        registers=int(getattr(properties, "regs_per_multiprocessor", 65536)),
        warp_size=int(getattr(properties, "warp_size", 64 if amd else 32)),
        source=f"limits as torch reports them; bandwidth {bandwidth_source}; rates {rates_source}",
    )


def _cousin(architecture: str) -> DeviceSpec | None:
    """A known GPU of the same architecture, else of the same family (sm_9x, gfx94x), else None."""
    for length in (len(architecture), len(architecture) - 1):
        family = [d for d in NAMED_DEVICES.values() if d.architecture[:length] == architecture[:length]]
        same_length = [d for d in family if len(d.architecture) == len(architecture)]
        if same_length:
            return min(same_length, key=lambda d: d.bandwidth_gbs)
    return None


def _bandwidth(properties: Any, cousin: DeviceSpec | None) -> tuple[float, str]:
    """GB/s and where it comes from: double data rate times clock (kHz) times bus width (bits), or a low guess."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    if clock and width:
        return round(2 * clock * 1e3 * width / 8 / 1e9, 1), "from memory clock and bus width"
    if cousin is not None:
        return cousin.bandwidth_gbs, f"guessed: as low as that of {cousin.name}"
    return _GUESSED_BANDWIDTH_GBS, "guessed"


def _rates(properties: Any, cousin: DeviceSpec | None) -> tuple[FrozenMap[float], str]:
    """Dense rates and where they come from."""
    units = properties.multi_processor_count
    if cousin is not None:
        scale = units / cousin.multiprocessors
        scaled = {name: round(rate * scale, 2) for name, rate in cousin.peak_tflops.items()}
        return FrozenMap(scaled), f"scaled from {cousin.name} by multiprocessors"
    plain = round(units * 128 * 2 * _GUESSED_CLOCK_HZ / 1e12, 2)
    return FrozenMap({"fp64": plain / 32, "ieee": plain, "fp16": 4 * plain, "bf16": 4 * plain}), "guessed"
