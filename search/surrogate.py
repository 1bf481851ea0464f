"""What a search's own measurements tell about the schedules not tried yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kernelwright.search.gaussian_process import FloatArray, Kernel, Posterior

_SLOW_QUANTILE = 0.75
_REFIT_GROWTH = 0.1
_MOST_BETWEEN_FITS = 32
_REMEMBERED = 300
_CANDIDATES = 20_000
_INCUMBENTS = 8
_NEAREST = 1000
_FAILURE_NOISE = 0.05
_LEAST_CHANCE = 0.02

MOST_PENDING = 64
"""How many candidates may be counted as known before their results are in."""


class Surrogate:
    """Rates candidates by expected improvement times the chance to work at all.

    points: coordinates of every schedule of the space, [n, d]. `pool`: the places of the candidates rated; all of them,
    or of a large space those near the best with others drawn at random.
    """

    def __init__(self, points: FloatArray, rng: np.random.Generator) -> None:
        self.pool: npt.NDArray[np.int64] = np.arange(len(points))
        self._points = points
        self._rng = rng
        self._kernel = Kernel(points.shape[1])
        self._fitted = 0
        self._forgotten: set[int] = set()

    def learn(self, times: Mapping[int, float]) -> None:
        """Take in the logarithms of the times by place, infinite for failures; one of them at least must be finite."""
        if len(times) - self._fitted >= min(_REFIT_GROWTH * self._fitted, _MOST_BETWEEN_FITS):
            self._fit(times)
        known = {place: time for place, time in times.items() if place not in self._forgotten}
        failed = {place for place, time in known.items() if math.isinf(time)}
        self._speed.read([place for place in known if place not in failed])
        self._values = _without_tail(np.array([known[place] for place in self._speed.places]))
        self._mean, self._variance = self._speed.posterior.mean(self._values)
        self._chance = self._log_chance(list(known), failed) if failed else np.zeros(len(self.pool))

    def merit(self, curiosity: float = 1.0) -> FloatArray:
        """Logarithm of the expected improvement on the best time times the chance to work, for each of the pool.

        curiosity: how many times larger than it is the uncertainty is taken to be.
        """
        spread = curiosity * np.sqrt(self._variance * self._speed.posterior.unexplained())
        return log_improvement(float(self._values.min()), self._mean, spread) + self._chance

    def expect(self, at: int) -> None:
        """Count the candidate of that number in the pool as known, at the value expected, until `settle`."""
        self._speed.posterior.add(at)

    def settle(self) -> None:
        """Undo what `expect` did."""
        self._speed.posterior.forget(len(self._speed.places))

    def _fit(self, times: Mapping[int, float]) -> None:
        self._fitted = len(times)
        ranked = sorted(times, key=lambda place: times[place])
        kept = list(times)
        if len(times) > _REMEMBERED:
            best = set(ranked[: _REMEMBERED // 2])
            latest = [place for place in kept if place not in best][-(_REMEMBERED // 2) :]
            kept = [place for place in kept if place in best.union(latest)]
        self._forgotten = set(times).difference(kept)
        worked = [place for place in kept if not math.isinf(times[place])]
        self._kernel.fit(self._points[worked], _without_tail(np.array([times[place] for place in worked])))
        self.pool = self._candidates(kept, ranked[:_INCUMBENTS])
        self._speed = _Readings(self._kernel, self._points, self.pool, worked, self._kernel.noise)
        self._works: _Readings | None = None

    def _log_chance(self, known: list[int], failed: set[int]) -> FloatArray:
        if self._works is None:
            self._works = _Readings(self._kernel, self._points, self.pool, known, _FAILURE_NOISE)
        self._works.read(known)
        labels = np.array([place not in failed for place in self._works.places], dtype=np.float64)
        return np.asarray(np.log(np.clip(self._works.posterior.mean(labels)[0], _LEAST_CHANCE, 1.0)))

    def _candidates(self, kept: Sequence[int], best: Sequence[int]) -> npt.NDArray[np.int64]:
        if len(self._points) <= _CANDIDATES:
            return self.pool
        alike = self._kernel.between(self._points[list(best)], self._points)
        near = np.argpartition(-alike, _NEAREST, axis=1)[:, :_NEAREST].ravel()
        drawn = self._rng.choice(len(self._points), _CANDIDATES - near.size, replace=False)
        return np.unique(np.concatenate([np.array(kept), near, drawn]))


class _Readings:
    """A posterior over the pool with the places that were read into it, in order."""

    def __init__(
        self,
        kernel: Kernel,
        points: FloatArray,
        pool: npt.NDArray[np.int64],
        places: Sequence[int],
        noise: float,
    ) -> None:
        capacity = min(len(points), _REMEMBERED + _MOST_BETWEEN_FITS) + MOST_PENDING
        first = np.searchsorted(pool, places).tolist()
        self.posterior = Posterior(kernel, points[pool], capacity, noise, first)
        self.places = list(places)
        self._pool = pool

    def read(self, places: Sequence[int]) -> None:
        """Add those of the places that were not read before."""
        for place in places[len(self.places) :] if places[: len(self.places)] == self.places else places:
            if place not in self.places:
                self.posterior.add(int(np.searchsorted(self._pool, place)))
                self.places.append(place)


def log_improvement(best: float, mean: FloatArray, deviation: FloatArray) -> FloatArray:
    """Logarithm of how far a normal variable is expected to fall below `best`, where it does."""
    z = (best - mean) / deviation
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    # Far below the mean the difference of two small numbers would be noise; its first term is exact enough.
    gain = np.where(z > -5, density + z * _below(z), density / np.maximum(z * z, 1.0))
    return np.asarray(np.log(deviation) + np.log(np.maximum(gain, 1e-300)))


def _below(z: FloatArray) -> FloatArray:
    """Probability that a standard normal variable is under z (Abramowitz and Stegun 26.2.17, error under 1e-7)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * series
    return np.where(z > 0, 1 - tail, tail)


def _without_tail(values: FloatArray) -> FloatArray:
    """Slow times are cut to one level: how slow they are says little about where the fast ones lie."""
    return np.minimum(values, np.quantile(values, _SLOW_QUANTILE))
