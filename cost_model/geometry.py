"""How a schedule cuts a product into tiles, waves and bytes: the quantities under the features and the roofline.

Everything is computed for many schedules at once. A knob that a template does not have gets the value that changes
nothing (one split, one subtile, no repacking), so templates can be compared in one table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kernelwright.kernels.matmul.workload import PAIRS, parse_layout
from kernelwright.kernels.precision import rate_tflops
from kernelwright.types import DTYPES, DeviceSpec, Schedule, Workload

Array = npt.NDArray[np.float64]

TEMPLATES = ("pointer", "persistent_tma", "skinny", "warp_specialized", "stream_k", "warp_specialized_loop")
"""Templates that have a column of their own; others are described by their knobs alone."""

_PERSISTENT = frozenset(
    {
        *("persistent_tma", "warp_specialized", "warp_specialized_loop", "stream_k", "block_scaled"),
        "stream_k_warp_specialized",
        *("implicit_gemm_tma", "implicit_gemm_warp_specialized", "forward_tma", "forward_warp_specialized"),
        *("weight_gradient_warp_specialized", "implicit_gemm_parts"),
    }
)
_BULK_COPIES = _PERSISTENT | {"skinny", "weight_only", "grouped", "tile_tma"}
_SWAPPED = frozenset({"skinny", "weight_only"})
_KNOB_DEFAULTS = {
    "block_m": 64.0,
    "block_n": 64.0,
    "block_k": 32.0,
    "num_warps": 4.0,
    "num_stages": 2.0,
    "group_m": 1.0,
    "split_k": 1.0,
    "subtile": 1.0,
    "repack": 0.0,
    "blocks_per_sm": 1.0,
}
_RATE_NAMES = {"ieee": "fp32", "fp32": "ieee", "fp8e4m3": "fp8", "fp8e5m2": "fp8"}
_PRECISION_BITS = {"tf32": 32, "ieee": 32, "fp8": 8}
_THREADS_A_MULTIPROCESSOR = 2048.0
_REGISTERS_BESIDE_ACCUMULATOR = 40.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """A workload's sizes, element widths in bytes and the alignment of its leading strides in bytes (at most 16).

    a_reuse: how often the loop meets an element of a, which memory holds once: the taps of a convolution.
    """

    m: float
    n: float
    k: float
    batch: float
    a_bytes: float
    b_bytes: float
    out_bytes: float
    a_alignment: float
    b_alignment: float
    out_alignment: float
    a_along_k: bool
    b_along_k: bool
    out_along_n: bool
    a_reuse: float = 1.0

    @property
    def flops(self) -> float:
        """Multiplications and additions, each counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operand_bytes(self) -> float:
        """Bytes of both operands, each once."""
        return self.batch * (self.m * self.k * self.a_bytes / self.a_reuse + self.k * self.n * self.b_bytes)

    @property
    def result_bytes(self) -> float:
        """Bytes of the result."""
        return self.batch * self.m * self.n * self.out_bytes


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A problem on a device, cut by n schedules; every array has shape [n].

    tile_*: block sizes in elements. programs: tiles times splits. rounds: programs that the busiest multiprocessor
    runs. waves: rounds of blocks that are resident together, a whole number. k_iterations: trips of a program's main
    loop. useful: share of the computed products that the result needs. l2_bytes: moved from L2 into shared memory by
    all programs. memory_bytes: moved to and from device memory, with what the grouping of tiles saves.
    accumulator: 32-bit registers a thread holds for the result tile. blocks: blocks resident on a multiprocessor.
    bulk_copies: 1 where the copy engine (TMA) loads tiles. streamed: whether the last tiles are shared out (stream-K).
    own: the operator's own knobs (see `own_knobs`).
    """

    problem: Problem
    device: DeviceSpec
    workload: Workload
    templates: npt.NDArray[np.str_]
    precisions: npt.NDArray[np.str_]
    tile_m: Array
    tile_n: Array
    tile_k: Array
    warps: Array
    stages: Array
    group_m: Array
    split_k: Array
    subtile: Array
    repack: Array
    persistent: Array
    swapped: Array
    bulk_copies: Array
    streamed: npt.NDArray[np.bool_]
    peak_tflops: Array
    tiles_m: Array
    tiles_n: Array
    k_iterations: Array
    shared_bytes: Array
    accumulator: Array
    blocks: Array
    own: Mapping[str, Array] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def tiles(self) -> Array:
        return self.tiles_m * self.tiles_n * max(self.problem.batch, 1)

    @functools.cached_property
    def programs(self) -> Array:
        return self.tiles * self.split_k

    @functools.cached_property
    def rounds(self) -> Array:
        rounds = self.programs / self.device.multiprocessors
        # stream-K divides what does not fill a wave evenly
        return np.where(self.streamed, np.maximum(rounds, 1.0), np.ceil(rounds))

    @functools.cached_property
    def waves(self) -> Array:
        return np.ceil(self.programs / (self.device.multiprocessors * self.blocks))

    @functools.cached_property
    def useful(self) -> Array:
        sizes = max(self.problem.m, 1) * max(self.problem.n, 1) * max(self.problem.k, 1)
        computed = self.tiles_m * self.tile_m * self.tiles_n * self.tile_n * self.k_iterations * self.tile_k
        return np.minimum(sizes / (computed * self.split_k), 1.0)

    @functools.cached_property
    def iteration_bytes(self) -> Array:
        """Bytes that one trip of the main loop loads."""
        return (self.tile_m * self.problem.a_bytes + self.tile_n * self.problem.b_bytes) * self.tile_k

    @functools.cached_property
    def tile_flops(self) -> Array:
        """Operations of one trip of the main loop."""
        return 2 * self.tile_m * self.tile_n * self.tile_k

    @functools.cached_property
    def intensity(self) -> Array:
        """Operations for each byte brought into shared memory."""
        return self.tile_flops / self.iteration_bytes

    @functools.cached_property
    def l2_bytes(self) -> Array:
        return self.programs * self.k_iterations * self.iteration_bytes

    @functools.cached_property
    def split_bytes(self) -> Array:
        """Bytes of fp32 partial results written and read again; 0 without a split."""
        partial = 2 * 4 * self.problem.batch * self.problem.m * self.problem.n
        return np.where(self.split_k > 1, partial * self.split_k, 0.0)

    @functools.cached_property
    def repack_bytes(self) -> Array:
        """Bytes read and written to copy unaligned operands to aligned ones, and results to the order wanted; 0 where
        nothing is copied."""
        p = self.problem
        unaligned = p.batch * (
            p.m * p.k * p.a_bytes / p.a_reuse * (p.a_alignment < 16) + p.k * p.n * p.b_bytes * (p.b_alignment < 16)
        )
        return self.repack * 2 * unaligned + self.own.get("store=copied", 0.0) * 2 * p.result_bytes

    @functools.cached_property
    def memory_bytes(self) -> Array:
        least = self.problem.operand_bytes
        together = np.minimum(self.tiles, self.device.multiprocessors * self.blocks)
        rows = np.minimum(self.group_m, self.tiles_m)
        columns = np.minimum(np.ceil(together / rows), self.tiles_n)
        row_bytes = self.problem.a_bytes / self.problem.a_reuse
        footprint = rows * self.tile_m * row_bytes + columns * self.tile_n * self.problem.b_bytes
        streamed = np.ceil(self.tiles / together) * footprint * max(self.problem.k, 1)
        spilled = np.where(least > self.device.l2_bytes, np.maximum(streamed, least), least)
        return spilled + self.problem.result_bytes


def matmul_problem(workload: Workload) -> Problem:
    """Sizes, widths and alignments of a matmul workload; a dimension that is absent counts as 1."""
    dims = workload.dims
    m, n, k = (dims.get(name, 1) for name in "MNK")
    widths = {t: DTYPES[workload.dtypes.get(t, workload.dtypes.get("a", "fp32"))] / 8 for t in ("a", "b", "out")}
    layouts = {t: workload.layouts.get(t, "row") for t in ("a", "b", "out")}
    shapes = {"a": (m, k), "b": (k, n), "out": (m, n)}
    aligned = {t: _alignment(layouts[t], shapes[t], widths[t]) for t in shapes}
    return Problem(
        m=m,
        n=n,
        k=k,
        batch=dims.get("B", 1),
        a_bytes=widths["a"],
        b_bytes=widths["b"],
        out_bytes=widths["out"],
        a_alignment=aligned["a"],
        b_alignment=aligned["b"],
        out_alignment=aligned["out"],
        a_along_k=layouts["a"].startswith("row"),
        b_along_k=layouts["b"].startswith("col"),
        out_along_n=layouts["out"].startswith("row"),
    )


def matmul_geometry(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Geometry:
    """The quantities of every schedule for a matmul workload on a device."""
    knobs = knob_columns(schedules)
    if set(PAIRS) & set(workload.epilogue):
        # a tile of the result is made of two tiles of the product
        knobs["block_n"] = 2 * knobs["block_n"]
    return cut(matmul_problem(workload), workload, device, schedules, knobs)


def cut(
    problem: Problem,
    workload: Workload,
    device: DeviceSpec,
    schedules: Sequence[Schedule],
    knobs: dict[str, Array],
) -> Geometry:
    """The quantities of a problem that is a product, or computed like one, by the knobs of every schedule."""
    templates = np.array([s.template for s in schedules], dtype=np.str_)
    default = _default_precision(workload)
    precisions = np.array([s.knobs.get("precision", default) for s in schedules], dtype=np.str_)
    persistent = np.isin(templates, list(_PERSISTENT)).astype(float)
    k_tiles = np.maximum(np.ceil(problem.k / knobs["block_k"]), 1)
    shared = _shared_bytes(problem, knobs, persistent)
    accumulator = knobs["block_m"] * knobs["block_n"] / (knobs["num_warps"] * device.warp_size)
    return Geometry(
        problem=problem,
        device=device,
        workload=workload,
        templates=templates,
        precisions=precisions,
        tile_m=knobs["block_m"],
        tile_n=knobs["block_n"],
        tile_k=knobs["block_k"],
        warps=knobs["num_warps"],
        stages=knobs["num_stages"],
        group_m=knobs["group_m"],
        split_k=knobs["split_k"],
        subtile=knobs["subtile"],
        repack=knobs["repack"],
        persistent=persistent,
        swapped=np.isin(templates, list(_SWAPPED)).astype(float),
        bulk_copies=np.isin(templates, list(_BULK_COPIES)).astype(float),
        streamed=(templates == "stream_k") | _has_waves_to_share(schedules),
        peak_tflops=_rates(device, precisions, default),
        tiles_m=np.maximum(np.ceil(problem.m / knobs["block_m"]), 1),
        tiles_n=np.maximum(np.ceil(problem.n / knobs["block_n"]), 1),
        k_iterations=np.maximum(np.ceil(k_tiles / knobs["split_k"]), 1),
        shared_bytes=shared,
        accumulator=accumulator,
        blocks=_resident_blocks(device, knobs, shared, accumulator, persistent),
    )


def _alignment(layout: str, shape: tuple[int, int], width: float) -> float:
    parsed = parse_layout("operand", layout, *shape)
    return float(math.gcd(int(parsed.leading * width), int(parsed.offset * width), 16))


def knob_columns(schedules: Sequence[Schedule]) -> dict[str, Array]:
    """The knobs that cut a product into tiles, an array each; a knob that a schedule lacks has its neutral value."""
    knobs = [dict(s.knobs) for s in schedules]
    columns = {
        name: np.array([k.get(name, default) for k in knobs], dtype=np.float64)
        for name, default in _KNOB_DEFAULTS.items()
    }
    buffers = np.array([k.get("num_buffers", 0) for k in knobs], dtype=np.float64)
    columns["num_stages"] = np.where(buffers > 0, buffers, columns["num_stages"])
    floors = {"repack": 0.0}
    return {name: np.maximum(column, floors.get(name, 1.0)) for name, column in columns.items()}


def _has_waves_to_share(schedules: Sequence[Schedule]) -> npt.NDArray[np.bool_]:
    return np.array([float(s.knobs.get("stream_waves", 0)) > 0 for s in schedules], dtype=np.bool_)


def own_knobs(
    schedules: Sequence[Schedule], numbers: Sequence[str], categories: Mapping[str, Sequence[str]]
) -> dict[str, Array]:
    """Knobs that only this operator has, an array each: log2 of the numbers (0 where a schedule lacks it), and for
    every value of a category, as "name=value", 1 where a schedule has it."""
    knobs = [schedule.knobs for schedule in schedules]
    found = {name: np.log2([max(float(k.get(name, 1)), 0.5) for k in knobs]) for name in numbers}
    for name, values in categories.items():
        found |= {f"{name}={v}": np.array([float(k.get(name) == v) for k in knobs]) for v in values}
    return found


def _default_precision(workload: Workload) -> str:
    dtype = next((workload.dtypes[name] for name in ("a", "q", "x") if name in workload.dtypes), "fp32")
    return "ieee" if dtype == "fp32" else dtype


def _rates(device: DeviceSpec, precisions: npt.NDArray[np.str_], default: str) -> Array:
    out = np.ones(len(precisions))
    for precision in np.unique(precisions):
        names = [str(precision), _RATE_NAMES.get(str(precision), ""), default, _RATE_NAMES.get(default, "")]
        rates = (rate_tflops(name, device.peak_tflops) for name in names)
        known = [rate for rate in rates if rate is not None]
        fallback = min(device.peak_tflops.values(), default=1.0)
        out[precisions == precision] = max(known[0] if known else fallback, 1e-3)
    return out


def _shared_bytes(problem: Problem, knobs: dict[str, Array], persistent: Array) -> Array:
    loads = knobs["num_stages"] * knobs["block_k"]
    operands = loads * (knobs["block_m"] * problem.a_bytes + knobs["block_n"] * problem.b_bytes)
    staged_result = knobs["block_m"] * knobs["block_n"] * problem.out_bytes / knobs["subtile"]
    return np.asarray(operands + np.where((persistent > 0) & (knobs["split_k"] == 1), staged_result, 0.0))


def _resident_blocks(
    device: DeviceSpec, knobs: dict[str, Array], shared: Array, accumulator: Array, persistent: Array
) -> Array:
    threads = knobs["num_warps"] * device.warp_size
    by_shared = np.floor(device.shared_memory_bytes / np.maximum(shared, 1024))
    by_registers = np.floor(device.registers / (threads * np.minimum(accumulator + _REGISTERS_BESIDE_ACCUMULATOR, 255)))
    by_threads = np.floor(_THREADS_A_MULTIPROCESSOR / threads)
    blocks = np.clip(np.minimum(np.minimum(by_shared, by_registers), by_threads), 1, 16)
    return np.asarray(np.where(persistent > 0, knobs["blocks_per_sm"], blocks))
