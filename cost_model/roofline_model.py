"""The analytic cost model: needs no training data, so it serves new operators' first users and new GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from kernelwright.cost_model.calibration import UNCALIBRATED, regret_of_all
from kernelwright.cost_model.features import estimate_beside_reference, geometry
from kernelwright.cost_model.model import Scores, read_model, squash, write_model
from kernelwright.cost_model.roofline_estimate import estimate
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload


class RooflineModel:
    """Expected time from rates, tiles, waves and latencies. It never learns: `update` changes nothing."""

    def __init__(self, operator: str = "matmul") -> None:
        self.operator = operator

    def expected_us(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """Expected time of each schedule in microseconds, launch gaps left out."""
        return estimate(geometry(workload, device, schedules)).total

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """Share of the best speed expected, in (0, 1], against the best of a fixed list of usual schedules."""
        expected = estimate_beside_reference(geometry(workload, device, schedules))
        return squash(np.log2(expected.reference / expected.total))

    def expected_regret(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """What each schedule is expected to lose; for the first choice a constant, found on an H100."""
        if not schedules:
            return np.empty(0)
        return regret_of_all(UNCALIBRATED, -np.log2(self.expected_us(workload, device, schedules)))

    def update(self, trials: Sequence[Trial]) -> None:
        """Nothing: the estimate has no parameters to learn."""

    def save(self, path: Path) -> None:
        write_model(path, "roofline", self.operator, {})

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(read_model(path, "roofline")["operator"])
