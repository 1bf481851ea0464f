"""The schedules of a space as points, for surrogates that know nothing of what the knobs mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.kernels.space import Space
from kernelwright.search.parameter_space import ParameterSpace
from kernelwright.types import Scalar

FloatArray = npt.NDArray[np.float64]

_ABSENT = 0.5
_LOG_RANGE = 3.0


def coordinates(space: Space) -> FloatArray:
    """A row in [0, 1] for each member, in the space's order; a knob that its template lacks is in the middle.

    Sizes are read by their logarithm, and beside it by the largest power of two that divides them, since memory and
    warps like some sizes for that alone. Names, and numbers that count from zero, are codes: a column for each. What
    the restrictions of a ParameterSpace compute is added.
    """
    members = list(space)
    columns: list[FloatArray] = []
    templates = [schedule.template for schedule in members]
    if len(set(templates)) > 1:
        columns += _codes(templates)
    for name in sorted({name for schedule in members for name in schedule.knobs}):
        has = np.array([name in schedule.knobs for schedule in members], dtype=np.bool_)
        values = [schedule.knobs[name] for schedule in members if name in schedule.knobs]
        columns += [_placed(column, has) for column in _read(values)]
    if isinstance(space, ParameterSpace):
        columns += [_scaled(term) for term in space.terms.values()]
    return _distinct(columns, len(members))


def _read(values: Sequence[Scalar]) -> list[FloatArray]:
    """The columns of one knob."""
    different = set(values)
    if len(different) < 2:
        return []
    if any(isinstance(value, str) for value in different):
        return _codes(values)
    numbers = np.array(values, dtype=np.float64)
    if len(different) > 2 and numbers.min() == 0:
        return _codes(values)
    return [_scaled(numbers), *_divisibility(numbers)]


def _codes(values: Sequence[Any]) -> list[FloatArray]:
    listed = sorted(set(values), key=str)
    kept = listed if len(listed) > 2 else listed[1:]
    return [np.array([value == code for value in values], dtype=np.float64) for code in kept]


def _divisibility(numbers: FloatArray) -> list[FloatArray]:
    if numbers.min() <= 0 or (numbers % 1).any():
        return []
    whole = numbers.astype(np.int64)
    power = whole & -whole
    return [] if (power == whole).all() else [_scaled(power.astype(np.float64))]


def _scaled(numbers: FloatArray) -> FloatArray:
    numbers = np.where(np.isfinite(numbers), numbers, 0.0)
    low, high = float(numbers.min()), float(numbers.max())
    if low > 0 and high / low >= _LOG_RANGE:
        numbers = np.log2(numbers)
    span = float(np.ptp(numbers))
    return np.asarray((numbers - numbers.min()) / (span or 1.0))


def _placed(column: FloatArray, has: npt.NDArray[np.bool_]) -> FloatArray:
    out = np.full(len(has), _ABSENT)
    out[has] = column
    return out


def _distinct(columns: Sequence[FloatArray], count: int) -> FloatArray:
    kept: list[FloatArray] = []
    for column in columns:
        if np.ptp(column) > 0 and not any(np.allclose(column, other) for other in kept):
            kept.append(column)
    return np.stack(kept, axis=1) if kept else np.zeros((count, 1))
