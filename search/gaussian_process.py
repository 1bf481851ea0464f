"""A Gaussian process over points in a box: what a handful of measurements tells about all other schedules.

Matern 5/2, with a length of its own for each coordinate, and a share of noise. Lengths and noise are the most probable
ones under a broad prior; the mean and the variance follow in closed form. Only numpy is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_AnyFloats = npt.NDArray[np.floating[Any]]

_LENGTH_SPREAD = 0.8
_NOISE = 1e-3
_NOISE_SPREAD = 0.7
_JITTER = 1e-8
_STEPS = 15
_LONGEST_STEP = 1.5
_ENOUGH = 1e-3


class Kernel:
    """The covariance, with its lengths and noise. dimensions: number of coordinates."""

    def __init__(self, dimensions: int) -> None:
        # Points in many dimensions are far apart, so the lengths that are expected grow with them.
        self._prior = np.full(dimensions + 1, math.log(0.5 * math.sqrt(dimensions)))
        self._prior[-1] = math.log(_NOISE)
        self._spread = np.full(dimensions + 1, _LENGTH_SPREAD)
        self._spread[-1] = _NOISE_SPREAD
        self._logs = self._prior.copy()

    @property
    def lengths(self) -> FloatArray:
        """How far along each coordinate points remain alike."""
        return np.asarray(np.exp(self._logs[:-1]))

    @property
    def noise(self) -> float:
        """Variance of one reading, where the process has variance 1."""
        return float(np.exp(self._logs[-1])) + _JITTER

    def between(self, one: FloatArray, other: FloatArray) -> FloatArray:
        """Correlation of each point of `one` with each point of `other`."""
        return np.asarray(_matern(_squares(one / self.lengths, other / self.lengths)))

    def fit(self, points: FloatArray, values: FloatArray) -> None:
        """Take the most probable lengths and noise that are found from the present ones and from the prior's."""
        squares = (points[:, None] - points[None]) ** 2
        found = [_descend(lambda logs: self._loss(logs, squares, values), start) for start in (self._logs, self._prior)]
        self._logs = min(found, key=lambda ended: ended[1])[0]

    def _loss(self, logs: FloatArray, squares: FloatArray, values: FloatArray) -> tuple[float, FloatArray]:
        """Negative log of the posterior, and its gradient."""
        count, inverse_squares, noise = len(values), np.exp(-2 * logs[:-1]), math.exp(logs[-1])
        scaled = squares @ inverse_squares
        covariance = _matern(scaled) + (noise + _JITTER) * np.eye(count)
        inverse = np.linalg.inv(covariance)
        sums = inverse.sum(axis=1)
        centred = values - (sums @ values) / sums.sum()
        weights = inverse @ centred
        variance = max(float(centred @ weights) / count, 1e-12)
        away = (logs - self._prior) / self._spread
        loss = 0.5 * (count * math.log(variance) + np.linalg.slogdet(covariance)[1] + away @ away)
        pull = 0.5 * (inverse - np.outer(weights, weights) / variance)
        slopes = np.tensordot(pull * _fall(scaled), squares, axes=2) * inverse_squares
        return float(loss), np.append(slopes, np.trace(pull) * noise) + away / self._spread


def _matern(squares: _AnyFloats) -> _AnyFloats:
    """Correlation at squared distances that are measured in lengths."""
    distance = np.sqrt(5 * squares)
    return np.asarray((1 + distance + squares * (5 / 3)) * np.exp(-distance))


def _fall(squares: FloatArray) -> FloatArray:
    """Twice the slope of `_matern`, with the sign turned."""
    distance = np.sqrt(5 * squares)
    return np.asarray((5 / 3) * (1 + distance) * np.exp(-distance))


def _squares(one: _AnyFloats, other: _AnyFloats) -> _AnyFloats:
    """Squared distance of each point of `one` from each point of `other`."""
    apart = (one * one).sum(1)[:, None] + (other * other).sum(1)[None] - 2 * one @ other.T
    return np.asarray(np.maximum(apart, 0.0, dtype=apart.dtype))


def _descend(loss: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray) -> tuple[FloatArray, float]:
    """Where a few quasi-Newton steps (BFGS) downhill lead, and the loss there."""
    identity = np.eye(len(start))
    here, hessian = start, 0.3 * identity
    value, slope = loss(here)
    for _ in range(_STEPS):
        step = -hessian @ slope
        step *= min(1.0, _LONGEST_STEP / max(float(np.abs(step).max()), 1e-12))
        length = 1.0
        while length > 0.005:
            new_value, new_slope = loss(here + length * step)
            if new_value <= value + 1e-4 * length * float(step @ slope):
                break
            length *= 0.4
        else:
            break
        moved, turned, gain = length * step, new_slope - slope, value - new_value
        here, value, slope = here + moved, new_value, new_slope
        curve = float(moved @ turned)
        if curve > 1e-10:
            left = identity - np.outer(moved, turned) / curve
            hessian = left @ hessian @ left.T + np.outer(moved, moved) / curve
        if gain < _ENOUGH:
            break
    return here, value


class Posterior:
    """What readings at some of the candidates tell about all of them; one more reading is added at little cost.

    candidates: every point asked about, [n, d]. capacity: most readings it will hold. noise: of a reading, where not
    the kernel's own. read: the places of the first readings.
    """

    def __init__(
        self,
        kernel: Kernel,
        candidates: FloatArray,
        capacity: int,
        noise: float | None = None,
        read: Sequence[int] = (),
    ) -> None:
        self._noise = kernel.noise if noise is None else noise
        # Centred, so that rounding to single precision costs little.
        self._candidates = ((candidates - candidates.mean(axis=0)) / kernel.lengths).astype(np.float32)
        count = self._count = len(read)
        first = candidates[list(read)]
        inverse = np.linalg.inv(np.linalg.cholesky(kernel.between(first, first) + self._noise * np.eye(count)))
        self._rows = np.empty((capacity, len(candidates)), dtype=np.float32)
        self._rows[:count] = inverse.astype(np.float32) @ self._alike(list(read))
        self._inverse = np.zeros((capacity, capacity))
        self._inverse[:count, :count] = inverse
        self._explained: FloatArray = np.square(self._rows[:count]).sum(axis=0, dtype=np.float64)

    def add(self, place: int) -> None:
        """A reading at the candidate of that number."""
        count = self._count
        known = self._rows[:count, place].astype(np.float64)
        rest = math.sqrt(max(1.0 + self._noise - float(known @ known), self._noise))
        row = (self._alike([place])[0] - known.astype(np.float32) @ self._rows[:count]) / np.float32(rest)
        self._rows[count] = row
        self._inverse[count, :count] = -(known @ self._inverse[:count, :count]) / rest
        self._inverse[count, count] = 1.0 / rest
        self._explained += row * row
        self._count += 1

    def mean(self, values: FloatArray) -> tuple[FloatArray, float]:
        """Expected value at every candidate given the readings' values in the order added (fewer values than readings:
        the last ones are still pending, and change nothing), and the variance of the process."""
        count = len(values)
        lower = self._inverse[:count, :count]
        ones, seen = lower.sum(axis=1), lower @ values
        centre = float(ones @ seen) / float(ones @ ones)
        weights = seen - centre * ones
        variance = max(float(weights @ weights) / count, 1e-12)
        return centre + (weights.astype(np.float32) @ self._rows[:count]).astype(np.float64), variance

    def unexplained(self) -> FloatArray:
        """The share of the variance that is left at every candidate, pending readings counted as known."""
        return np.maximum(1.0 - self._explained, 1e-9)

    def forget(self, count: int) -> None:
        """Drop the readings after the first `count`."""
        for row in self._rows[count : self._count]:
            self._explained -= row.astype(np.float64) ** 2
        self._count = count

    def _alike(self, places: list[int]) -> npt.NDArray[np.float32]:
        return np.asarray(_matern(_squares(self._candidates[places], self._candidates)), np.float32)
