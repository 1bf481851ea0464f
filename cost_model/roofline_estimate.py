"""An analytic estimate of a kernel's time from its geometry: rates, waves, latencies. No measurement goes in."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from kernelwright.cost_model.geometry import Array, Geometry
from kernelwright.types import FrozenMap, Scalar, Schedule

_L2_BYTES_US = 90e3
"""Bytes a microsecond that one multiprocessor gets from L2 (64 a clock at most)."""

_MEMORY_SHARE = 0.9
"""Of the datasheet's bandwidth, what a copy reaches."""

_POINTER_SHARE = 0.85
"""Of the speed that a tile reaches with TMA, what it reaches with pointer loads."""

_LOAD_US = 0.8
"""From asking for a tile in device memory until it lies in shared memory."""

_PROLOGUE_US, _EPILOGUE_US = 1.0, 0.7
_LAUNCH_US = 2.0
_ARRIVAL_US = 0.7
"""For the last program of a split to see that it is the last; it then sums the parts without a second launch."""

_SOFT_MAX = 6.0
_SPILL_SLOWDOWN = 4.0
_REGISTER_LIMIT = 215.0
"""Accumulator registers a thread above which the rest of the kernel no longer fits into 255."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Microseconds by cause, each of shape [n]; `total` joins them, overlapping where the hardware does.

    ideal: least time at the datasheet's rates. reference: total of the best of a fixed list of schedules; dividing by
    it tells how a schedule compares with what the workload allows, whichever schedules are looked at together.
    """

    compute: Array
    l2: Array
    memory: Array
    latency: Array
    extra: Array
    ideal: Array
    reference: float = 1.0

    @property
    def total(self) -> Array:
        overlapped = sum((part**_SOFT_MAX for part in (self.compute, self.l2, self.memory, self.latency)), np.zeros(1))
        return np.asarray(overlapped ** (1 / _SOFT_MAX) + self.extra)


def estimate(g: Geometry) -> Estimate:
    """The expected time of every schedule, by cause."""
    bandwidth = g.device.bandwidth_gbs * 1e3 * _MEMORY_SHARE
    least_bytes = g.problem.operand_bytes + g.problem.result_bytes
    ideal = np.maximum(g.problem.flops / (g.peak_tflops * 1e6), least_bytes / (g.device.bandwidth_gbs * 1e3))
    pointer_cost = 1 + (1 - g.bulk_copies) * (load_slowdown(g) - 1)
    return Estimate(
        compute=_compute_us(g),
        l2=g.rounds * g.k_iterations * g.iteration_bytes * pointer_cost / _L2_BYTES_US,
        memory=g.memory_bytes / bandwidth,
        latency=_latency_us(g, pointer_cost),
        extra=_LAUNCH_US + _extra_us(g, bandwidth),
        ideal=np.maximum(ideal, 1e-3),
    )


def load_slowdown(g: Geometry) -> float:
    """How much slower pointer loads are when leading strides only allow narrow ones; 1 when both are aligned."""
    narrow = np.array([g.problem.a_alignment, g.problem.b_alignment])
    return float(np.mean((16 / narrow) ** 0.3))


def tile_efficiency(g: Geometry) -> Array:
    """Share of the tensor cores' peak that a tile can keep busy, in (0, 1]."""
    rows = np.where(g.swapped > 0, g.tile_n, g.tile_m)
    columns = np.where(g.swapped > 0, g.tile_m, g.tile_n)
    hopper = g.device.architecture.startswith("sm_90")
    narrow_rows = np.where(rows >= 64, 1.0, 0.6 if hopper else 0.85)
    shape = columns / (columns + 10) * rows / (rows + 6)
    depth = g.tile_k / (g.tile_k + 8) * g.stages / (g.stages + 0.35)
    spills = np.where(g.accumulator > _REGISTER_LIMIT, 1 / _SPILL_SLOWDOWN, 1.0)
    reach = np.where(g.bulk_copies > 0, 1.0, _POINTER_SHARE)
    return np.asarray(narrow_rows * shape * depth * spills * reach)


def product_references(g: Geometry) -> list[Schedule]:
    """The fixed list of usual schedules of a matmul or a convolution."""
    relaxed = g.workload.dtypes.get("a") == "fp32" and g.workload.error_budget is not None
    precision: dict[str, Scalar] = {"precision": "tf32"} if relaxed else {}
    common: dict[str, Scalar] = {"block_k": 64, "num_warps": 8, "num_stages": 3, "group_m": 8, **precision}
    tiles = ((16, 64), (64, 64), (64, 128), (128, 128), (128, 256))
    splits = itertools.product(("pointer", "skinny"), tiles, (1, 4, 16))
    out = [
        Schedule(name, FrozenMap({"block_m": m, "block_n": n, "split_k": split, **common}))
        for name, (m, n), split in splits
    ]
    aligned = min(g.problem.a_alignment, g.problem.b_alignment) >= 16
    knobs: dict[str, Scalar] = {"repack": int(not aligned), **common}
    return out + [Schedule("persistent_tma", FrozenMap({"block_m": m, "block_n": n, **knobs})) for m, n in tiles[1:]]


def _compute_us(g: Geometry) -> Array:
    rate = g.peak_tflops * 1e6 / g.device.multiprocessors * tile_efficiency(g)
    return np.asarray(g.rounds * g.k_iterations * g.tile_flops / rate)


def _latency_us(g: Geometry, pointer_cost: Array) -> Array:
    in_flight = np.maximum(g.stages - 1, 1)
    loop = g.k_iterations * _LOAD_US * pointer_cost / in_flight
    once = np.where(g.persistent > 0, 1.0, g.waves)
    return np.asarray(g.waves * (loop + _EPILOGUE_US) + once * _PROLOGUE_US)


def _extra_us(g: Geometry, bandwidth: float) -> Array:
    second_pass = np.where(g.swapped > 0, _ARRIVAL_US, _LAUNCH_US)
    split = np.where(g.split_k > 1, second_pass + g.split_bytes / bandwidth, 0.0)
    repack = np.where(g.repack_bytes > 0, _LAUNCH_US + g.repack_bytes / bandwidth, 0.0)
    return np.asarray(split + repack)
