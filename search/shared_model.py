"""One cost model for many searches at once: what one learns, all know."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kernelwright.cost_model.model import CostModel, Scores
from kernelwright.cost_model.packaged import load_model
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload


class SharedModel:
    """Implements `CostModel` around another one, for threads. A trial that is told twice teaches once."""

    def __init__(self, inner: CostModel) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._told: set[tuple[Workload, Schedule, float | None]] = set()

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """See `CostModel`."""
        with self._lock:
            return self._inner.predict(workload, device, schedules)

    def expected_regret(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """See `CostModel`."""
        with self._lock:
            return self._inner.expected_regret(workload, device, schedules)

    def update(self, trials: Sequence[Trial]) -> None:
        """Learn from the trials that are new."""
        with self._lock:
            new = {(t.workload, t.schedule, t.measurement.median_us): t for t in trials}
            fresh = [trial for key, trial in new.items() if key not in self._told]
            self._told.update(new)
            if fresh:
                self._inner.update(fresh)

    def save(self, path: Path) -> None:
        """Write the inner model."""
        with self._lock:
            self._inner.save(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The model in a file, of whichever kind."""
        return cls(load_model(path))
