"""Attention as the product that it is computed like: rows of queries against keys and values that stream by.

A row of the product is one query of one head; the heads that share keys lie below each other. Its columns are what a
key brings along: the elements of the key and of its value. The sum runs over the keys that a query sees.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from kernelwright.cost_model.geometry import Geometry, Problem, cut, knob_columns, own_knobs
from kernelwright.types import DTYPES, DeviceSpec, FrozenMap, Scalar, Schedule, Workload

ATTENTION_TEMPLATES = (
    "forward",
    "forward_warp_specialized",
    "decode",
    "decode_warp_specialized",
    "backward",
    "backward_fused",
    "backward_warp_specialized",
)
"""Templates that have a column of their own."""

NUMBERS = ("section", "pingpong", "turned", "block_m2", "block_n2", "num_warps2", "num_stages2")
CATEGORIES = {"combine": ("last", "second"), "loads": ("pointer", "bulk"), "head": ("pad", "split")}
"""Knobs of attention templates that a matmul's do not have, and the values of those that are words."""

_BACKWARD_PRODUCTS = 2.5
"""The backward pass makes five products where the forward one makes two."""


def visible_share(workload: Workload) -> float:
    """The part of the pairs of a query and a key that causality and window leave."""
    queries, keys = workload.dims["Sq"], workload.dims["Skv"]
    causal, window = workload.attributes.get("causal"), workload.attributes.get("window")
    if not queries or not keys or not (causal or window):
        return 1.0
    place = np.arange(queries) + (keys - queries if causal == "bottom_right" else 0)
    last = np.minimum(place + 1, keys) if causal else np.full(queries, keys)
    first = np.maximum(place - int(window) + 1, 0) if window else np.zeros(queries)
    return float(np.maximum(last - first, 0).sum() / (queries * keys))


def attention_problem(workload: Workload) -> Problem:
    """The product behind an attention workload: one matrix for each key head of each sequence."""
    dims = workload.dims
    heads, key_heads = dims["Hq"], dims.get("Hkv", dims["Hq"])
    width = dims["D"] + dims.get("Dv", dims["D"])
    products = _BACKWARD_PRODUCTS if workload.attributes.get("direction") == "backward" else 1.0
    bytes_of = {t: DTYPES[workload.dtypes.get(t, workload.dtypes.get("q", "fp32"))] / 8 for t in ("q", "k", "out")}
    alignment = float(math.gcd(int(dims["D"] * bytes_of["k"]), 16))
    return Problem(
        m=dims["Sq"] * heads / max(key_heads, 1),
        n=width * products,
        k=dims["Skv"] * visible_share(workload),
        batch=dims.get("B", 1) * key_heads,
        a_bytes=0.0,
        b_bytes=bytes_of["k"] / products,
        out_bytes=bytes_of["out"],
        a_alignment=16.0,
        b_alignment=alignment,
        out_alignment=alignment,
        a_along_k=True,
        b_along_k=False,
        out_along_n=True,
    )


def attention_geometry(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Geometry:
    """The quantities of every schedule for an attention workload on a device."""
    problem = attention_problem(workload)
    knobs = knob_columns([_one_loop(schedule) for schedule in schedules])
    knobs["block_k"] = knobs["block_n"]
    knobs["block_n"] = np.full(len(schedules), max(problem.n, 1.0))
    found = cut(problem, workload, device, schedules, knobs)
    return dataclasses.replace(found, own=own_knobs(schedules, NUMBERS, CATEGORIES))


def attention_references(_: Geometry) -> list[Schedule]:
    """The fixed list of usual schedules of attention."""
    tiles = itertools.product((16, 64, 128), (64, 128), (4, 8), (1, 8, 32))
    return [
        Schedule("forward", FrozenMap({"block_m": m, "block_n": n, "num_warps": w, "num_stages": 2, "split_kv": split}))
        for m, n, w, split in tiles
    ]


def _one_loop(schedule: Schedule) -> Schedule:
    """The schedule with the names of a product's knobs; the backward pass by the tiles of its first kernel."""
    knobs: dict[str, Scalar] = dict(schedule.knobs)
    for name, instead in (("block_m", "block_m1"), ("block_n", "block_n1"), ("split_k", "split_kv")):
        if name not in knobs and instead in knobs:
            knobs[name] = knobs[instead]
    return dataclasses.replace(schedule, knobs=FrozenMap(knobs))
