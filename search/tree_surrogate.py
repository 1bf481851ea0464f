"""Boosted trees over a search's own measurements: where times jump, they see the edge that a smooth process blurs."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.xgboost_model import import_xgboost
from kernelwright.errors import MissingDependency
from kernelwright.search.gaussian_process import FloatArray

_SLOW_QUANTILE = 0.75
_FAILURE = 0.2
"""By how much a failure's logarithm lies above the level to which slow times are cut."""

_TIE = 1e-6
_ROUNDS = 60
_TREES = {
    "max_depth": 5,
    "eta": 0.2,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "lambda": 0.5,
    "nthread": 1,
    "verbosity": 0,
}


class TreeSurrogate:
    """Names the schedule that trees expect to be fastest. Without xgboost it has no opinion (`ready` is False).

    points: coordinates of every schedule of the space, [n, d].
    """

    def __init__(self, points: FloatArray, rng: np.random.Generator, seed: int) -> None:
        self._points = points.astype(np.float32)
        self._rng = rng
        self._seed = seed
        self._xgboost = _xgboost_if_installed()

    @property
    def ready(self) -> bool:
        """Whether it can be asked."""
        return self._xgboost is not None

    def fastest(self, times: Mapping[int, float], allowed: npt.NDArray[np.bool_]) -> int:
        """The place of the allowed schedule with the least expected time, one of them at random where trees see no
        difference. times: logarithms by place, infinite for failures, one of them at least finite."""
        assert self._xgboost is not None
        places = list(times)
        values = np.array([times[place] for place in places])
        worked = np.isfinite(values)
        level = float(np.quantile(values[worked], _SLOW_QUANTILE))
        labels = np.where(worked, np.minimum(values, level), level + _FAILURE)
        data = self._xgboost.DMatrix(self._points[places], label=labels, nthread=1)
        trees = self._xgboost.train({**_TREES, "seed": self._seed * 1000 + len(times)}, data, _ROUNDS)
        open_places = np.flatnonzero(allowed)
        expected = trees.inplace_predict(self._points[open_places])
        ties = np.flatnonzero(expected <= expected.min() + _TIE)
        return int(open_places[self._rng.choice(ties)])


def _xgboost_if_installed() -> ModuleType | None:
    try:
        return import_xgboost()
    except MissingDependency:
        return None
