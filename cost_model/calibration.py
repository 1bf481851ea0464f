"""How much speed a prediction may cost: regret to expect, fitted on workloads that were left out of training.

The regret of a workload's first choice grows with the distance to the nearest workload that the model was trained on,
and with how much the analytic model disagrees about the schedules that the learned one holds for equally good. Any
other schedule loses, on top, what the model expects it to lose against the first choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.families import distance
from kernelwright.types import DeviceSpec, Workload

FloatArray = npt.NDArray[np.float64]

FARTHEST = 8.0
"""Distance at which a workload counts as unlike everything, and that of every workload on an unknown GPU."""

UNCALIBRATED = 0.1
"""Expected regret of a first choice where nothing was calibrated: what the analytic model's loses on average over the
workloads recorded on an H100 (docs/model-card.md)."""

UNCALIBRATED_FOR = frozenset({"matmul"})
"""Operators for which UNCALIBRATED was found."""

_AS_GOOD = 0.15


def tells_regret(model: object, operator: str) -> bool:
    """Whether the regret that a cost model expects rests on measurements of this operator."""
    return getattr(model, "calibration", None) is not None or operator in UNCALIBRATED_FOR


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The first choice's regret is expected to be `base`, plus `distance` for each unit of distance to the nearest of
    the training `workloads`, plus `disagreement` for each unit of disagreement. devices: keys of the GPUs trained on.
    """

    base: float
    distance: float
    disagreement: float
    workloads: tuple[Workload, ...]
    devices: tuple[str, ...]

    def regret(
        self, workload: Workload, device: DeviceSpec, log_shares: FloatArray, estimate: FloatArray
    ) -> FloatArray:
        """Expected regret of each schedule, in [0, 1]: the share of the best speed that running it loses on average.

        log_shares [n], estimate [n]: log2 of the share of the best speed by the learned and by the analytic model, for
        all schedules that there are to choose from.
        """
        away = nearest(workload, self.workloads) if device.key in self.devices else FARTHEST
        terms = (1.0, away, disagreement(log_shares, estimate))
        first = float(np.dot(terms, (self.base, self.distance, self.disagreement)))
        return regret_of_all(min(max(first, 0.0), 1.0), log_shares)

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        return {**dataclasses.asdict(self), "workloads": [w.to_json() for w in self.workloads]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The calibration that `to_json` wrote."""
        workloads = tuple(Workload.from_json(each) for each in data["workloads"])
        return cls(**{**data, "workloads": workloads, "devices": tuple(data["devices"])})


def nearest(workload: Workload, others: Sequence[Workload]) -> float:
    """Distance to the nearest of the others, FARTHEST at most."""
    return min([FARTHEST, *(distance(workload, other) for other in others)])


def disagreement(log_shares: FloatArray, estimate: FloatArray) -> float:
    """Standard deviation of the analytic estimate over the schedules that the model expects within a tenth of its
    first choice: 0 where the two models agree that these are alike."""
    return float(np.std(estimate[log_shares >= log_shares.max() - _AS_GOOD]))


def regret_of_all(first: float, log_shares: FloatArray) -> FloatArray:
    """From the first choice's expected regret to everyone's."""
    return np.asarray(1 - (1 - first) * np.exp2(log_shares - log_shares.max()))


def least_squares(terms: FloatArray, values: FloatArray) -> FloatArray:
    """Weights [k], none below 0, with which the terms [n, k] come nearest to the values [n]; tries every subset."""
    width = terms.shape[1]
    best, best_error = np.zeros(width), float(np.square(values).sum())
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            weights = np.zeros(width)
            weights[list(chosen)] = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            error = float(np.square(terms @ weights - values).sum())
            if weights.min() >= 0 and error < best_error:
                best, best_error = weights, error
    return best
