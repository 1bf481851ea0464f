"""Trials as rows for a learned model: features, and how fast each was beside the best of its workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.features import feature_names, features
from kernelwright.cost_model.model import shares, workload_groups
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload

FloatArray = npt.NDArray[np.float64]

RowsOf = Callable[[Workload, DeviceSpec, Sequence[Schedule]], npt.NDArray[np.float32]]

FAILED_LOG_SHARE = -5.0
"""What a failure counts as: log2 of a thirty-second of the best speed. Slower schedules count as this too."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """Feature rows [n, f] with log2 of the share of the best speed [n], a weight [n], and the group [n] of each row.

    `estimate` [n] is log2 of the share that the analytic model expects, against its reference for the workload.
    """

    rows: npt.NDArray[np.float32]
    log_shares: FloatArray
    weights: FloatArray
    groups: npt.NDArray[np.int64]
    estimate: FloatArray

    def __len__(self) -> int:
        return len(self.rows)


class KeptRows:
    """`features`, which remembers rows: trials are learned from again and again, each time with a few more."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Workload, DeviceSpec], dict[Schedule, npt.NDArray[np.float32]]] = {}

    def __call__(
        self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]
    ) -> npt.NDArray[np.float32]:
        """See `features`."""
        kept = self._rows.setdefault((workload, device), {})
        new = [schedule for schedule in dict.fromkeys(schedules) if schedule not in kept]
        if new:
            kept.update(zip(new, features(workload, device, new), strict=True))
        return np.stack([kept[schedule] for schedule in schedules])


def examples(trials: Sequence[Trial], operator: str, rows_of: RowsOf = features) -> Examples:
    """The trials of an operator as examples, failures included; groups where nothing worked are left out. rows_of: what
    makes a workload's rows of features."""
    parts: list[tuple[npt.NDArray[np.float32], FloatArray]] = []
    for group in workload_groups(t for t in trials if t.workload.operator == operator).values():
        share = shares(group)
        if share.any():
            first = group[0]
            rows = rows_of(first.workload, first.device, [t.schedule for t in group])
            parts.append((rows, np.log2(np.maximum(share, 2**FAILED_LOG_SHARE))))
    width = len(feature_names(operator))
    rows = np.concatenate([rows for rows, _ in parts] or [np.empty((0, width), np.float32)])
    logs = np.concatenate([logs for _, logs in parts] or [np.empty(0)])
    groups = np.repeat(np.arange(len(parts)), [len(logs) for _, logs in parts])
    return Examples(rows, logs, 0.1 + np.exp2(logs), groups, estimated_log_shares(rows, operator))


def within_groups(values: FloatArray, of: Examples) -> FloatArray:
    """The values less their group's weighted mean."""
    total = np.bincount(of.groups, of.weights * values)
    weight = np.bincount(of.groups, of.weights)
    return np.asarray(values - (total / weight)[of.groups])


def estimated_log_shares(rows: npt.NDArray[np.float32], operator: str) -> FloatArray:
    """log2 of the share of the best speed that the analytic model expects, from feature rows."""
    return -rows[:, feature_names(operator).index("estimate_total")].astype(np.float64)
