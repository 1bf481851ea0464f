"""The records of workloads that differ from one in their sizes only, nearest first, by plain SQL: putting statements
together would take longer than they do."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernelwright.db.places import WIDTHS, boxes
from kernelwright.db.rows import family
from kernelwright.types import Workload

MOST_CANDIDATES = 128
"""Records that one look into a box of sizes takes at most."""

Rows = Sequence[Sequence[Any]]
Execute = Callable[[str, tuple[Any, ...]], Rows]
"""Runs a statement, in which {} stands for each parameter's mark, and gives its rows."""

_FAMILY = (
    "SELECT id, created, workload_key FROM records WHERE family = {} AND device_key = {} AND workload_key <> {} "
    "AND trust IN ('measured', 'trusted')"
)
_BOX = f"{_FAMILY} AND place BETWEEN {{}} AND {{}}"
_SIZES = "SELECT key, dims FROM workloads WHERE key IN ({})"


def nearest_rows(execute: Execute, workload: Workload, device_key: str, limit: int) -> list[int]:
    """Numbers of the rows of records that may be relied on, nearest first; of each workload the newest.

    Near is a small distance in log2 of the sizes. All of a small family are looked at, else ever smaller boxes.
    """
    here = {name: _log2(size) for name, size in workload.dims.items()}
    newest = _newest(_candidates(execute, (family(workload), device_key, workload.key), workload, limit))
    if not newest:
        return []
    sizes = execute(_SIZES.format(",".join(["{}"] * len(newest))), tuple(newest))
    ranked = [(_distance(here, json.loads(dims)), newest[key]) for key, dims in sizes]
    return [row_id for _, row_id in heapq.nsmallest(limit, ranked)]


def _candidates(execute: Execute, place: tuple[str, str, str], workload: Workload, limit: int) -> Rows:
    found = execute(f"{_FAMILY} LIMIT {{}}", (*place, limit + 1))
    if len(found) <= limit:
        return found
    for width in WIDTHS:
        ranges = boxes(workload.dims, width)
        look = " UNION ALL ".join([_BOX] * len(ranges)) + " LIMIT {}"
        inside = execute(look, (*(value for ends in ranges for value in (*place, *ends)), MOST_CANDIDATES))
        found = inside if len(inside) >= limit else [*inside, *found]
        if len(inside) < MOST_CANDIDATES:
            break
    return found


def _newest(rows: Rows) -> dict[str, int]:
    """The row of each workload's newest record."""
    newest: dict[str, tuple[float, int]] = {}
    for row_id, created, key in rows:
        newest[key] = max(newest.get(key, (created, row_id)), (created, row_id))
    return {key: row_id for key, (_, row_id) in newest.items()}


def _distance(here: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """From sizes on a logarithmic scale to others."""
    if here.keys() == sizes.keys():
        return math.hypot(*(here[name] - _log2(size) for name, size in sizes.items()))
    names = here.keys() | sizes.keys()
    return math.hypot(*(here.get(name, 0.0) - _log2(sizes.get(name, 1)) for name in names))


def _log2(size: int) -> float:
    # A size of 0 has no logarithm; it counts as 1.
    return math.log2(size) if size > 1 else 0.0
