"""GPUs by name, with the figures of their makers' datasheets and architecture papers.

Rates are dense (no sparsity), in 10^12 operations a second, with fp32 sums for fp8, fp16, bf16 and tf32 products.
"ieee" is plain fp32 arithmetic. Where the matrix units compute fp64 faster than the plain ones, their rate is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernelwright.types import DeviceSpec, FrozenMap

_GIB = 2**30
_MIB = 2**20

SHARED_MEMORY_BYTES: Mapping[str, int] = {
    "sm_70": 98304,
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx950": 163840,
}
"""The most shared memory that one block may ask for, by architecture (CUDA: the opt-in limit; AMD: LDS of a unit)."""


def _gpu(
    slug: str, name: str, architecture: str, units: tuple[int, float, int, float], rates: dict[str, float], source: str
) -> DeviceSpec:
    """units: multiprocessors, L2 in MiB, memory in GiB, bandwidth in GB/s."""
    multiprocessors, l2_mib, memory_gib, bandwidth_gbs = units
    amd = architecture.startswith("gfx")
    return DeviceSpec(
        slug=slug,
        name=name,
        vendor="amd" if amd else "nvidia",
        architecture=architecture,
        multiprocessors=multiprocessors,
        shared_memory_bytes=SHARED_MEMORY_BYTES[architecture],
        l2_bytes=int(l2_mib * _MIB),
        memory_bytes=memory_gib * _GIB,
        bandwidth_gbs=bandwidth_gbs,
        peak_tflops=FrozenMap(rates),
        registers=131072 if amd else 65536,
        warp_size=64 if amd else 32,
        source=source,
    )


_V100 = {"fp64": 7.8, "ieee": 15.7, "fp16": 125.0}
_A100 = {"fp64": 19.5, "ieee": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0, "int8": 624.0}
_H100 = {"fp64": 66.9, "ieee": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}

_DEVICES = (
    _gpu("v100", "NVIDIA V100 SXM2 16 GB", "sm_70", (80, 6, 16, 900.0), _V100, "NVIDIA Tesla V100 whitepaper"),
    _gpu("v100-32", "NVIDIA V100 SXM2 32 GB", "sm_70", (80, 6, 32, 900.0), _V100, "NVIDIA V100 datasheet"),
    _gpu(
        "t4", "NVIDIA T4", "sm_75", (40, 4, 16, 320.0),
        {"fp64": 0.25, "ieee": 8.1, "fp16": 65.0, "int8": 130.0}, "NVIDIA T4 datasheet",
    ),
    _gpu("a100", "NVIDIA A100 SXM4 40 GB", "sm_80", (108, 40, 40, 1555.0), _A100, "NVIDIA A100 whitepaper"),
    _gpu("a100-80", "NVIDIA A100 SXM4 80 GB", "sm_80", (108, 40, 80, 2039.0), _A100, "NVIDIA A100 80 GB datasheet"),
    _gpu(
        "a10", "NVIDIA A10", "sm_86", (72, 6, 24, 600.0),
        {"fp64": 0.98, "ieee": 31.2, "tf32": 62.5, "fp16": 125.0, "bf16": 125.0, "int8": 250.0}, "NVIDIA A10 datasheet",
    ),
    _gpu(
        "rtx3090", "NVIDIA GeForce RTX 3090", "sm_86", (82, 6, 24, 936.0),
        {"fp64": 0.56, "ieee": 35.6, "tf32": 35.6, "fp16": 71.0, "bf16": 71.0, "int8": 284.0},
        "NVIDIA GA102 whitepaper",
    ),
    _gpu(
        "l4", "NVIDIA L4", "sm_89", (58, 48, 24, 300.0),
        {"fp64": 0.49, "ieee": 30.3, "tf32": 60.0, "fp16": 121.0, "bf16": 121.0, "fp8": 242.0, "int8": 242.0},
        "NVIDIA L4 datasheet, Ada whitepaper",
    ),
    _gpu(
        "l40s", "NVIDIA L40S", "sm_89", (142, 96, 48, 864.0),
        {"fp64": 1.4, "ieee": 91.6, "tf32": 183.0, "fp16": 362.0, "bf16": 362.0, "fp8": 733.0, "int8": 733.0},
        "NVIDIA L40S datasheet",
    ),
    _gpu(
        "rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", (128, 72, 24, 1008.0),
        {"fp64": 1.3, "ieee": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3, "int8": 660.6},
        "NVIDIA Ada whitepaper",
    ),
    _gpu("h100", "NVIDIA H100 SXM5 80 GB", "sm_90", (132, 50, 80, 3350.0), _H100, "NVIDIA H100 whitepaper, datasheet"),
    _gpu(
        "h100-pcie", "NVIDIA H100 PCIe 80 GB", "sm_90", (114, 50, 80, 2000.0),
        {"fp64": 51.2, "ieee": 51.2, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0, "fp8": 1513.0, "int8": 1513.0},
        "NVIDIA H100 whitepaper",
    ),
    _gpu("h200", "NVIDIA H200 SXM 141 GB", "sm_90", (132, 50, 141, 4800.0), _H100, "NVIDIA H200 datasheet"),
    _gpu(
        "b200", "NVIDIA B200 SXM 180 GB", "sm_100", (148, 126, 180, 8000.0),
        {
            "fp64": 40.0, "ieee": 80.0, "tf32": 1100.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0,
            "int8": 4500.0, "fp4": 9000.0,
        },
        "NVIDIA Blackwell technical brief (HGX B200); multiprocessors and L2 as CUDA reports them",
    ),
    _gpu(
        "rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", (170, 96, 32, 1792.0),
        {
            "fp64": 1.6, "ieee": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419.0,
            "int8": 838.0, "fp4": 1676.0,
        },
        "NVIDIA RTX Blackwell whitepaper",
    ),
    _gpu(
        "mi250x", "AMD Instinct MI250X (one of its two compute dies)", "gfx90a", (110, 8, 64, 1638.0),
        {"fp64": 47.9, "ieee": 47.9, "fp16": 191.5, "bf16": 191.5, "int8": 191.5},
        "AMD Instinct MI250X datasheet, halved; ROCm GPU specifications",
    ),
    _gpu(
        "mi300x", "AMD Instinct MI300X", "gfx942", (304, 32, 192, 5300.0),
        {
            "fp64": 163.4, "ieee": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9,
            "int8": 2614.9,
        },
        "AMD Instinct MI300X datasheet; ROCm GPU specifications",
    ),
    _gpu(
        "mi355x", "AMD Instinct MI355X", "gfx950", (256, 32, 288, 8000.0),
        {
            "fp64": 78.6, "ieee": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2, "int8": 5033.2,
            "fp4": 10066.3,
        },
        "AMD CDNA 4 whitepaper, MI355X datasheet; ROCm GPU specifications",
    ),
)  # fmt: skip

NAMED_DEVICES: dict[str, DeviceSpec] = {device.slug: device for device in _DEVICES}
"""Every GPU known by name."""
