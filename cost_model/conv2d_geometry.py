"""A convolution as the product that it is computed like: rows of pixels, columns of channels, a sum over taps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kernelwright.cost_model.geometry import Geometry, Problem, cut, knob_columns, own_knobs
from kernelwright.types import DTYPES, DeviceSpec, Schedule, Workload

CONV2D_TEMPLATES = (
    "implicit_gemm",
    "implicit_gemm_input_gradient",
    "implicit_gemm_weight_gradient",
    "implicit_gemm_tma",
    "implicit_gemm_warp_specialized",
    "weight_gradient_warp_specialized",
    "pointwise",
    "patch_gradient",
    "stem",
    "depthwise",
    "grouped_direct",
    "resident_weights",
    "depthwise_tile",
    "implicit_gemm_parts",
)
"""Templates that have a column of their own."""


NUMBERS = (
    *("tile", "block_v", "block_c", "tap_rows", "parts", "tile_h", "tile_w", "unroll", "pack", "span", "taps"),
    *("column_blocks", "rows"),
)
CATEGORIES = {
    "along": ("w", "h"),
    "reduction": ("taps", "channels", "flat", "flat_taps"),
    "columns": ("tap", "flat"),
    "combine": ("parts", "add"),
    "mode": ("cooperative", "pingpong"),
    "store": ("direct", "copied"),
}
"""Knobs of convolution templates that a matmul's do not have, and the values of those that are words."""


def conv2d_problem(workload: Workload) -> Problem:
    """The product behind a convolution or one of its gradients: one matrix a group."""
    given, dims = workload.attributes, workload.dims
    groups = int(given.get("groups", 1))
    taps = dims["R"] * dims["S"]
    sizes = [dims["N"], *_spatial(workload)]
    pixels, channels, filters = math.prod(sizes), dims["C"] / groups, dims["K"] / groups
    positions = dims["N"] * dims["H"] * dims["W"]
    direction = "transposed" if given.get("transposed") else given.get("direction", "forward")
    m: float
    n: float
    k: float
    if direction == "weight_gradient":
        m, n, k = filters, taps * channels, pixels
    elif direction == "input_gradient":
        m, n, k = positions, channels, taps * filters * pixels / max(positions, 1)
    elif direction == "transposed":
        m, n, k = pixels, filters, taps * channels * positions / max(pixels, 1)
    else:
        m, n, k = pixels, filters, taps * channels
    widths = {t: DTYPES[workload.dtypes.get(t, workload.dtypes.get("x", "fp32"))] / 8 for t in ("x", "w", "out")}
    last = {t: workload.layouts.get(t, "nhwc").startswith("nhwc") for t in ("x", "w", "out")}
    inner = {"x": channels, "w": channels, "out": filters}
    alignment = {t: float(math.gcd(int(inner[t] * widths[t]), 16)) if last[t] else widths[t] for t in last}
    reuse = max(1.0, k / max(channels, 1)) if direction != "weight_gradient" else 1.0
    read, written = ("out", "x") if direction == "input_gradient" else ("x", "out")
    if channels == 1 and groups > 1 and direction != "weight_gradient":
        # every channel by itself: no matrices, but a tile of pixels and channels
        n, reuse, groups = dims["K"], k / groups, 1
    return Problem(
        m=m,
        n=n,
        k=k,
        batch=groups,
        a_bytes=widths[read],
        b_bytes=widths["w"],
        out_bytes=widths[written],
        a_alignment=alignment[read],
        b_alignment=alignment["w"],
        out_alignment=alignment[written],
        a_along_k=last[read],
        b_along_k=last["w"],
        out_along_n=last[written],
        a_reuse=reuse,
    )


def conv2d_geometry(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Geometry:
    """The quantities of every schedule for a convolution on a device."""
    knobs, own = knob_columns(schedules), own_knobs(schedules, NUMBERS, CATEGORIES)
    direct = np.array([schedule.template in ("depthwise", "depthwise_tile") for schedule in schedules], dtype=bool)
    knobs["block_m"] = np.where(direct, 2 ** (own["tile"] + own["rows"] + own["block_v"]), knobs["block_m"])
    knobs["block_n"] = np.where(direct, 2 ** own["block_c"], knobs["block_n"])
    knobs["block_n"] = knobs["block_n"] * 2 ** own["column_blocks"]
    # a stage holds lines of 128 bytes, whatever parts the numbers are divided into
    parts = np.array([schedule.template == "implicit_gemm_parts" for schedule in schedules], dtype=bool)
    knobs["block_k"] = np.where(parts, 32, knobs["block_k"])
    # a row of such a tile is a whole cell of pixels, whose channels are columns
    cells = np.array([schedule.template == "patch_gradient" for schedule in schedules], dtype=bool)
    pixels = np.where(cells, _number(workload, "stride_h") * _number(workload, "stride_w"), 1)
    knobs["block_m"], knobs["block_n"] = knobs["block_m"] * pixels, np.maximum(knobs["block_n"] / pixels, 1)
    return dataclasses.replace(cut(conv2d_problem(workload), workload, device, schedules, knobs), own=own)


def _number(workload: Workload, name: str) -> int:
    """An attribute that is 1 by default."""
    return int(workload.attributes.get(name, 1))


def _spatial(workload: Workload) -> tuple[int, int]:
    """Height and width of the result of the forward convolution."""
    given, dims = workload.attributes, workload.dims
    out = []
    for axis, size, taps in (("h", dims["H"], dims["R"]), ("w", dims["W"], dims["S"])):
        stride, pad, dilation = (
            int(given.get(f"{name}_{axis}", d)) for name, d in (("stride", 1), ("pad", 0), ("dilation", 1))
        )
        reach = dilation * (taps - 1) + 1
        if given.get("transposed"):
            out.append((size - 1) * stride - 2 * pad + reach + int(given.get(f"output_pad_{axis}", 0)))
        else:
            out.append((size + 2 * pad - reach) // stride + 1)
    return max(out[0], 0), max(out[1], 0)
