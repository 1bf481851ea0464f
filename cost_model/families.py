"""Which workloads are too alike to stand on both sides of a test, and how far apart two workloads are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from kernelwright.errors import UsageError
from kernelwright.types import Workload, canonical_json

SWEPT_DIMS: Mapping[str, frozenset[str]] = {
    "matmul": frozenset({"B", "M"}),
    "conv2d": frozenset({"N"}),
    "attention": frozenset({"B", "Sq", "Skv", "T", "Tk"}),
}
"""By operator, the dimensions that one model runs with many values: tokens and batch. The others are its weights'."""

_OTHER_FIELD = 1.0
_OTHER_ALIGNMENT = 1.0
_ALIGNMENT = 8


def family(workload: Workload) -> str:
    """Equal for workloads of the same weights: those that differ only in swept dimensions, types, layouts or epilogue.

    For a matmul: all that share N and K.
    """
    swept = SWEPT_DIMS.get(workload.operator, frozenset())
    return canonical_json([workload.operator, {d: size for d, size in workload.dims.items() if d not in swept}])


GROUPINGS: Mapping[str, Callable[[Workload], str]] = {"family": family, "workload": lambda workload: workload.key}
"""What is kept together when workloads are left out of training, by name: a whole family, or a workload alone."""

DEFAULT_GROUPING = "family"


def groups_by_name(workloads: Iterable[Workload], grouping: str) -> dict[Workload, str]:
    """The group of each workload; UsageError for an unknown grouping."""
    if grouping not in GROUPINGS:
        raise UsageError(f"grouping must be one of {', '.join(GROUPINGS)}, got {grouping!r}")
    return {workload: GROUPINGS[grouping](workload) for workload in workloads}


def distance(one: Workload, other: Workload) -> float:
    """How unlike two workloads of an operator are: the Euclidean distance of their log2 sizes, with 1 more for each of
    types, layouts and epilogue that differs and for each size that is a multiple of 8 in only one of them; infinite
    for different operators."""
    if one.operator != other.operator:
        return math.inf
    fields = ("dtypes", "layouts", "epilogue", "attributes")
    square = sum(_OTHER_FIELD for name in fields if getattr(one, name) != getattr(other, name))
    for name in {*one.dims, *other.dims}:
        here, there = one.dims.get(name, 1), other.dims.get(name, 1)
        square += math.log2((here + 1) / (there + 1)) ** 2
        square += _OTHER_ALIGNMENT * ((here % _ALIGNMENT == 0) != (there % _ALIGNMENT == 0))
    return math.sqrt(square)
