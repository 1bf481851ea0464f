"""A made-up GPU: times from a formula of its own, with noise and failures, so that models have something to find."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Toolchain, Trial, Workload

TOOLCHAIN = Toolchain("3.6.0", "2.11.0", "580", "ptxas 12.8", 1)

SHAPES = (
    (4096, 4096, 4096),
    (2048, 4096, 4096),
    (1024, 1024, 1024),
    (16, 4096, 4096),
    (16, 4096, 14336),
    (1, 6144, 4096),
    (256, 256, 65536),
    (1000, 1000, 1000),
)


def device(slug: str = "h100", multiprocessors: int = 132) -> DeviceSpec:
    rates = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "ieee": 67.0}
    return DeviceSpec(slug, slug, "nvidia", "sm_90", multiprocessors, 232448, 50 << 20, 80 << 30, 3352.0, rates)


def matmul(m: int, n: int, k: int, **changes: object) -> Workload:
    dtypes = {"a": "bf16", "b": "bf16", "out": "bf16"}
    fields: dict[str, object] = {"dtypes": dtypes, "layouts": {"a": "row", "b": "col", "out": "row"}, **changes}
    return Workload("matmul", {"M": m, "N": n, "K": k}, **fields)  # type: ignore[arg-type]


def schedules() -> list[Schedule]:
    pointer = itertools.product((32, 64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 4), (1, 4))
    out = [
        Schedule("pointer", _knobs(m, n, k, warps, stages) | {"group_m": 8, "split_k": split})
        for m, n, k, warps, stages, split in pointer
    ]
    tma = itertools.product((64, 128), (128, 256), (64, 128), (4, 8), (2, 3), (1, 2))
    out += [
        Schedule("persistent_tma", _knobs(m, n, k, warps, stages) | {"group_m": 8, "subtile": subtile, "repack": 0})
        for m, n, k, warps, stages, subtile in tma
    ]
    skinny = itertools.product((16, 32), (64, 128), (64, 128), (4,), (3, 5), (1, 2, 8))
    out += [
        Schedule("skinny", _knobs(m, n, k, warps, stages) | {"split_k": split})
        for m, n, k, warps, stages, split in skinny
    ]
    return out


def _knobs(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, int | str]:
    tile = {"block_m": m, "block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages}
    return {**tile, "precision": "bf16"}


def true_us(workload: Workload, gpu: DeviceSpec, schedule: Schedule) -> float:
    """The made-up truth; it knows effects that the analytic estimate does not, such as a dislike of 4 warps."""
    m, n, k = (workload.dims[name] for name in "MNK")
    knobs = schedule.knobs
    split = int(knobs.get("split_k", 1))
    tiles = math.ceil(m / int(knobs["block_m"])) * math.ceil(n / int(knobs["block_n"])) * split
    rounds = math.ceil(tiles / gpu.multiprocessors)
    area = int(knobs["block_m"]) * int(knobs["block_n"])
    speed = area / (area + 6000) * {"pointer": 0.7, "persistent_tma": 0.9, "skinny": 0.8}[schedule.template]
    speed *= 0.75 if knobs["num_warps"] == 4 and area > 8192 else 1.0
    speed *= 1.15 if knobs["block_k"] == 64 else 1.0
    compute = rounds * area * math.ceil(k / split) * 2 / (speed * gpu.peak_tflops["bf16"] * 1e6 / gpu.multiprocessors)
    memory = 2 * (m * k + n * k + m * n * (1 if split == 1 else 3 * split)) / (gpu.bandwidth_gbs * 1e3)
    latency = rounds * math.ceil(k / int(knobs["block_k"]) / split) * 0.9 / int(knobs["num_stages"])
    return max(compute, memory, latency) + 3 + (2.5 if split > 1 else 0)


def trials(
    shapes: Sequence[tuple[int, int, int]] = SHAPES, gpu: DeviceSpec | None = None, seed: int = 0, keep: float = 0.6
) -> list[Trial]:
    """Recorded trials with 2 % noise; tiles too large for four warps fail now and then, and so do some by chance."""
    rng = random.Random(seed)
    gpu = gpu or device()
    out = []
    for shape in shapes:
        workload = matmul(*shape)
        for schedule in schedules():
            if rng.random() < keep:
                out.append(trial(workload, gpu, schedule, rng))
    return out


def trial(workload: Workload, gpu: DeviceSpec, schedule: Schedule, rng: random.Random) -> Trial:
    knobs = schedule.knobs
    area = int(knobs["block_m"]) * int(knobs["block_n"])
    if (area == 32768 and knobs["num_warps"] == 4) or rng.random() < 0.02:
        measurement = Measurement(Status.OUT_OF_RESOURCES, message="made up")
    else:
        time = true_us(workload, gpu, schedule) * math.exp(rng.gauss(0, 0.02))
        measurement = Measurement(Status.OK, time, compile_s=0.5)
    return Trial(workload, gpu, TOOLCHAIN, schedule, measurement, "test")


@pytest.fixture(scope="session")
def recorded() -> list[Trial]:
    """Trials of eight workloads on the made-up H100, about 150 each."""
    return trials()


@pytest.fixture(scope="session")
def candidates() -> list[Schedule]:
    """Every schedule of the made-up spaces."""
    return schedules()


@pytest.fixture(scope="session")
def h100() -> DeviceSpec:
    """The made-up H100."""
    return device()


@pytest.fixture(scope="session")
def make_matmul() -> Callable[..., Workload]:
    """From M, N, K and changed fields to a bf16 workload in nn.Linear's layout."""
    return matmul


@pytest.fixture(scope="session")
def make_trials() -> Callable[..., list[Trial]]:
    """From shapes, GPU, seed and kept share to trials."""
    return trials


@pytest.fixture(scope="session")
def truth() -> Callable[[Workload, DeviceSpec, Schedule], float]:
    """The made-up time in microseconds, without noise."""
    return true_us
