"""Numbers that a learned model reads: one row for each schedule of a workload on a device.

They are chosen to mean the same on every shape and GPU: logarithms, ratios, and what the schedule makes of the
device (waves, occupancy, bytes on each level), beside the analytic estimate and its parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model import attention_geometry as attention_geometry_of
from kernelwright.cost_model import conv2d_geometry as conv2d_geometry_of
from kernelwright.cost_model.attention_geometry import (
    ATTENTION_TEMPLATES,
    attention_geometry,
    attention_references,
    visible_share,
)
from kernelwright.cost_model.conv2d_geometry import CONV2D_TEMPLATES, conv2d_geometry
from kernelwright.cost_model.geometry import TEMPLATES, Array, Geometry, matmul_geometry
from kernelwright.cost_model.roofline_estimate import Estimate, estimate, product_references, tile_efficiency
from kernelwright.errors import UnknownOperator
from kernelwright.kernels.matmul.workload import ACTIVATIONS, OPERANDS, PAIRS
from kernelwright.kernels.precision import PARTS
from kernelwright.types import DeviceSpec, Scalar, Schedule, Workload

FEATURE_VERSION = 2
"""Changes whenever a column, its meaning or the estimate changes; models of another version are refused."""

Column = Callable[[Geometry, Estimate], Array | float]


def _log(value: Array | float) -> Array:
    return np.asarray(np.log2(np.maximum(value, 1e-6)))


def _architecture(g: Geometry) -> float:
    name = g.device.architecture
    return float(name[3:].rstrip("af")) if name.startswith("sm_") and name[3:].rstrip("af").isdigit() else 0.0


def _contiguous_bytes(along_k: bool, tile_k: Array, tile_other: Array, width: float) -> Array:
    return (tile_k if along_k else tile_other) * width


_PRODUCT: Mapping[str, Column] = {
    "log_m": lambda g, e: _log(g.problem.m + 1),
    "log_n": lambda g, e: _log(g.problem.n + 1),
    "log_k": lambda g, e: _log(g.problem.k + 1),
    "log_batch": lambda g, e: _log(g.problem.batch),
    "log_flops": lambda g, e: _log(g.problem.flops + 1),
    "log_operand_bytes": lambda g, e: _log(g.problem.operand_bytes + 1),
    "log_result_bytes": lambda g, e: _log(g.problem.result_bytes + 1),
    "log_problem_intensity": lambda g, e: _log(
        (g.problem.flops + 1) / (g.problem.operand_bytes + g.problem.result_bytes + 1)
    ),
    "log_aspect": lambda g, e: _log((g.problem.m + 1) / (g.problem.n + 1)),
    "operands_to_l2": lambda g, e: _log((g.problem.operand_bytes + 1) / max(g.device.l2_bytes, 1)),
    "log_tile_m": lambda g, e: _log(g.tile_m),
    "log_tile_n": lambda g, e: _log(g.tile_n),
    "log_tile_k": lambda g, e: _log(g.tile_k),
    "log_tile_area": lambda g, e: _log(g.tile_m * g.tile_n),
    "log_tile_aspect": lambda g, e: _log(g.tile_m / g.tile_n),
    "log_mma_rows": lambda g, e: _log(np.where(g.swapped > 0, g.tile_n, g.tile_m)),
    "log_mma_columns": lambda g, e: _log(np.where(g.swapped > 0, g.tile_m, g.tile_n)),
    "log_warps": lambda g, e: _log(g.warps),
    "stages": lambda g, e: g.stages,
    "log_group_m": lambda g, e: _log(g.group_m),
    "group_share": lambda g, e: np.minimum(g.group_m / g.tiles_m, 1.0),
    "log_split_k": lambda g, e: _log(g.split_k),
    "subtile": lambda g, e: g.subtile,
    "repack": lambda g, e: g.repack,
    "persistent": lambda g, e: g.persistent,
    "bulk_copies": lambda g, e: g.bulk_copies,
    "swapped": lambda g, e: g.swapped,
    "skinny": lambda g, e: float(min(g.problem.m, g.problem.n) <= 64),
    "log_tiles_m": lambda g, e: _log(g.tiles_m),
    "log_tiles_n": lambda g, e: _log(g.tiles_n),
    "log_programs": lambda g, e: _log(g.programs),
    "log_k_iterations": lambda g, e: _log(g.k_iterations),
    "stages_to_iterations": lambda g, e: np.minimum(g.stages / g.k_iterations, 4.0),
    "log_waves": lambda g, e: _log(g.programs / (g.device.multiprocessors * g.blocks)),
    "wave_fill": lambda g, e: g.programs / (g.waves * g.device.multiprocessors * g.blocks),
    "log_rounds": lambda g, e: _log(g.rounds),
    "round_fill": lambda g, e: g.programs / (g.rounds * g.device.multiprocessors),
    "useful": lambda g, e: g.useful,
    "useful_m": lambda g, e: max(g.problem.m, 1) / (g.tiles_m * g.tile_m),
    "useful_n": lambda g, e: max(g.problem.n, 1) / (g.tiles_n * g.tile_n),
    "log_intensity": lambda g, e: _log(g.intensity),
    "log_iteration_bytes": lambda g, e: _log(g.iteration_bytes),
    "log_in_flight_bytes": lambda g, e: _log(g.iteration_bytes * np.maximum(g.stages - 1, 1) * g.blocks),
    "log_l2_reuse": lambda g, e: _log(g.l2_bytes / (g.problem.operand_bytes + 1)),
    "log_memory_excess": lambda g, e: _log(
        (g.memory_bytes + 1) / (g.problem.operand_bytes + g.problem.result_bytes + 1)
    ),
    "log_split_excess": lambda g, e: _log(1 + g.split_bytes / (g.problem.operand_bytes + 1)),
    "log_repack_excess": lambda g, e: _log(1 + g.repack_bytes / (g.problem.operand_bytes + 1)),
    "shared_share": lambda g, e: g.shared_bytes / max(g.device.shared_memory_bytes, 1),
    "blocks": lambda g, e: g.blocks,
    "resident_warps": lambda g, e: g.blocks * g.warps,
    "accumulator_registers": lambda g, e: g.accumulator,
    "rows_a_warp": lambda g, e: _log(np.where(g.swapped > 0, g.tile_n, g.tile_m) / g.warps),
    "a_alignment": lambda g, e: g.problem.a_alignment,
    "b_alignment": lambda g, e: g.problem.b_alignment,
    "out_alignment": lambda g, e: g.problem.out_alignment,
    "a_along_k": lambda g, e: float(g.problem.a_along_k),
    "b_along_k": lambda g, e: float(g.problem.b_along_k),
    "out_along_n": lambda g, e: float(g.problem.out_along_n),
    "log_a_contiguous": lambda g, e: _log(
        _contiguous_bytes(g.problem.a_along_k, g.tile_k, g.tile_m, g.problem.a_bytes)
    ),
    "log_b_contiguous": lambda g, e: _log(
        _contiguous_bytes(g.problem.b_along_k, g.tile_k, g.tile_n, g.problem.b_bytes)
    ),
    "a_bytes": lambda g, e: g.problem.a_bytes,
    "out_bytes": lambda g, e: g.problem.out_bytes,
    "epilogue_steps": lambda g, e: float(len(g.workload.epilogue)),
    "bias": lambda g, e: float("bias" in g.workload.epilogue),
    "activation": lambda g, e: float(bool({*ACTIVATIONS, *PAIRS} & set(g.workload.epilogue))),
    "epilogue_matrices": lambda g, e: float(sum(OPERANDS.get(step) == "mn" for step in g.workload.epilogue)),
    "several_products": lambda g, e: np.isin(g.precisions, list(PARTS)).astype(float),
    "tf32": lambda g, e: (g.precisions == "tf32").astype(float),
    "ieee": lambda g, e: (g.precisions == "ieee").astype(float),
    "narrowed": lambda g, e: (np.isin(g.precisions, ["bf16", "fp16"]) & (g.problem.a_bytes > 2)).astype(float),
    "log_peak": lambda g, e: _log(g.peak_tflops),
    "log_bandwidth": lambda g, e: _log(g.device.bandwidth_gbs),
    "log_ridge": lambda g, e: _log(g.peak_tflops * 1e3 / max(g.device.bandwidth_gbs, 1e-3)),
    "log_multiprocessors": lambda g, e: _log(float(g.device.multiprocessors)),
    "log_shared_limit": lambda g, e: _log(float(g.device.shared_memory_bytes)),
    "log_l2": lambda g, e: _log(float(g.device.l2_bytes)),
    "architecture": lambda g, e: _architecture(g),
    "tile_efficiency": lambda g, e: tile_efficiency(g),
    "estimate_compute": lambda g, e: _log(e.compute / e.reference),
    "estimate_l2": lambda g, e: _log(e.l2 / e.reference),
    "estimate_memory": lambda g, e: _log(e.memory / e.reference),
    "estimate_latency": lambda g, e: _log(e.latency / e.reference),
    "estimate_extra": lambda g, e: _log(e.extra / e.reference),
    "estimate_total": lambda g, e: _log(e.total / e.reference),
    "log_ideal_us": lambda g, e: _log(e.ideal),
    "log_reference_us": lambda g, e: _log(e.reference),
}


def _templates(names: Sequence[str]) -> dict[str, Column]:
    """A column for each template: 1 where a schedule is of it."""
    return {
        f"template_{name}": lambda g, e, name=name: (g.templates == name).astype(float)  # type: ignore[misc]
        for name in names
    }


def _own(numbers: Sequence[str], categories: Mapping[str, Sequence[str]]) -> dict[str, Column]:
    """A column for each of an operator's own knobs."""
    names = [*numbers, *(f"{name}={value}" for name, values in categories.items() for value in values)]
    return {f"knob_{name}": lambda g, e, name=name: g.own[name] for name in names}  # type: ignore[misc]


def _given(name: str, value: Scalar) -> Column:
    """1 where the workload has this attribute with this value."""
    return lambda g, e: float(g.workload.attributes.get(name) == value)


def _number(name: str, default: float) -> Column:
    """The log2 of an attribute that is a number."""
    return lambda g, e: _log(float(g.workload.attributes.get(name, default)))


_CONV2D: Mapping[str, Column] = {
    "log_taps": lambda g, e: _log(float(g.workload.dims["R"] * g.workload.dims["S"])),
    "log_width": lambda g, e: _log(float(g.workload.dims["W"] + 1)),
    "log_stride_h": _number("stride_h", 1),
    "log_stride_w": _number("stride_w", 1),
    "log_dilation": _number("dilation_h", 1),
    "transposed": _given("transposed", True),
    "input_gradient": _given("direction", "input_gradient"),
    "weight_gradient": _given("direction", "weight_gradient"),
}

_ATTENTION: Mapping[str, Column] = {
    "log_head_dim": lambda g, e: _log(float(g.workload.dims["D"])),
    "log_queries": lambda g, e: _log(float(g.workload.dims["Sq"] + 1)),
    "log_group": lambda g, e: _log(g.workload.dims["Hq"] / max(g.workload.dims.get("Hkv", g.workload.dims["Hq"]), 1)),
    "visible": lambda g, e: visible_share(g.workload),
    "backward": _given("direction", "backward"),
    "paged": lambda g, e: float("page" in g.workload.dims),
    "packed": lambda g, e: float("T" in g.workload.dims),
    "softcap": lambda g, e: float("softcap" in g.workload.attributes),
    "mask": lambda g, e: float("mask" in g.workload.attributes),
}

_COLUMNS: Mapping[str, Mapping[str, Column]] = {
    "matmul": {**_PRODUCT, **_templates(TEMPLATES)},
    "conv2d": {
        **_PRODUCT,
        **_CONV2D,
        **_own(conv2d_geometry_of.NUMBERS, conv2d_geometry_of.CATEGORIES),
        **_templates(CONV2D_TEMPLATES),
    },
    "attention": {
        **_PRODUCT,
        **_ATTENTION,
        **_own(attention_geometry_of.NUMBERS, attention_geometry_of.CATEGORIES),
        **_templates(ATTENTION_TEMPLATES),
    },
}
_GEOMETRY: Mapping[str, Callable[[Workload, DeviceSpec, Sequence[Schedule]], Geometry]] = {
    "matmul": matmul_geometry,
    "conv2d": conv2d_geometry,
    "attention": attention_geometry,
}
_REFERENCES: Mapping[str, Callable[[Geometry], list[Schedule]]] = {
    "matmul": product_references,
    "conv2d": product_references,
    "attention": attention_references,
}


def feature_names(operator: str) -> tuple[str, ...]:
    """Names of the columns of `features` for an operator; UnknownOperator when it has none."""
    _require(operator)
    return tuple(_COLUMNS[operator])


def geometry(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Geometry:
    """Tiles, waves and bytes of every schedule; UnknownOperator when the operator has no features."""
    _require(workload.operator)
    return _GEOMETRY[workload.operator](workload, device, schedules)


def estimate_beside_reference(g: Geometry) -> Estimate:
    """`estimate` with its reference: the time of the best of a fixed list of schedules that fits the device."""
    return dataclasses.replace(estimate(g), reference=_reference_us(g.workload, g.device))


@functools.lru_cache(maxsize=1024)
def _reference_us(workload: Workload, device: DeviceSpec) -> float:
    usual = _REFERENCES[workload.operator](geometry(workload, device, []))
    others = geometry(workload, device, usual)
    fits = others.shared_bytes <= device.shared_memory_bytes
    times = estimate(others).total
    return float(times[fits].min() if fits.any() else times.min())


def features(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> npt.NDArray[np.float32]:
    """A matrix [schedules, features], finite everywhere, columns as in `feature_names`."""
    g = geometry(workload, device, schedules)
    e = estimate_beside_reference(g)
    columns = _COLUMNS[workload.operator]
    out = np.empty((len(schedules), len(columns)), dtype=np.float32)
    for place, column in enumerate(columns.values()):
        out[:, place] = column(g, e)
    return out


def _require(operator: str) -> None:
    if operator not in _COLUMNS:
        raise UnknownOperator(f"operator must be one of {', '.join(_COLUMNS)} to have features, got {operator!r}")
