"""The learned cost model: boosted trees that correct the analytic estimate inside each workload.

Scores are log2 of the share of the best speed. A base of trees is trained on recorded workloads; new trials fit a
small set of trees on what the base still gets wrong, so a model is useful at once and follows what it is shown.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.features import FEATURE_VERSION, feature_names, features
from kernelwright.cost_model.model import Scores, read_model, shares, squash, workload_groups, write_model
from kernelwright.errors import MissingDependency, ModelMismatch
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload

FloatArray = npt.NDArray[np.float64]

FAILED_LOG_SHARE = -5.0
"""What a failure counts as: log2 of a thirty-second of the best speed. Slower schedules count as this too."""

_FIRST_FIT = 4
_GROWTH = 0.1
_ONLINE_ROUNDS = 60
_ONLINE_PARAMETERS = {"eta": 0.15, "max_depth": 4, "min_child_weight": 1.0, "lambda": 2.0, "colsample_bytree": 0.7}


def import_xgboost() -> ModuleType:
    """The xgboost module, imported here only; MissingDependency when it is not installed."""
    try:
        import xgboost
    except ImportError as error:
        raise MissingDependency(
            "the learned cost model needs xgboost 2.1 or later, which is not installed; "
            "try: pip install 'kernelwright[model]' (or install your own xgboost)"
        ) from error
    return xgboost


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


def examples(trials: Sequence[Trial], operator: str) -> Examples:
    """The trials of an operator as examples, failures included; groups where nothing worked are left out."""
    parts: list[tuple[npt.NDArray[np.float32], FloatArray]] = []
    for group in workload_groups(t for t in trials if t.workload.operator == operator).values():
        share = shares(group)
        if share.any():
            first = group[0]
            rows = features(first.workload, first.device, [t.schedule for t in group])
            parts.append((rows, np.log2(np.maximum(share, 2**FAILED_LOG_SHARE))))
    width = len(feature_names(operator))
    rows = np.concatenate([rows for rows, _ in parts] or [np.empty((0, width), np.float32)])
    logs = np.concatenate([logs for _, logs in parts] or [np.empty(0)])
    groups = np.repeat(np.arange(len(parts)), [len(logs) for _, logs in parts])
    return Examples(rows, logs, 0.1 + np.exp2(logs), groups, _estimate(rows, operator))


class XGBoostModel:
    """Ranks schedules with boosted trees; without a trained base it starts from the analytic estimate.

    operator: what it ranks. boosters: trees whose outputs add up. metadata: how the base was trained.
    Its `residual` tells whether the analytic estimate is part of the sum, `scale` and `shift` lead from the sum to
    log2 of the share. jobs: threads for training, None for all cores.
    """

    def __init__(
        self,
        operator: str = "matmul",
        boosters: Sequence[Any] = (),
        metadata: Mapping[str, Any] | None = None,
        jobs: int | None = None,
    ) -> None:
        self.operator = operator
        self.metadata = dict(metadata or {})
        self.jobs = jobs
        self._xgboost = import_xgboost()
        self._base = tuple(boosters)
        self._online: Any = None
        self._trials: list[Trial] = []
        self._fitted = 0

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """Expected share of the best speed for each schedule, in (0, 1]; does not depend on the others given."""
        self._require(workload.operator)
        rows = features(workload, device, schedules)
        sums = self._base_margin(rows, _estimate(rows, self.operator))
        if self._online is not None and len(rows):
            sums = sums + self._online.inplace_predict(rows)
        return squash(sums)

    def update(self, trials: Sequence[Trial]) -> None:
        """Add trials of this operator and fit the correction again once they grew by a tenth (at least 4)."""
        for trial in trials:
            self._require(trial.workload.operator)
        self._trials.extend(trials)
        if len(self._trials) - self._fitted >= max(_FIRST_FIT, _GROWTH * self._fitted):
            self._fit_online()

    def save(self, path: Path) -> None:
        """Write the trees, the correction learned from updates included, and the metadata as one JSON file."""
        boosters = [*self._base, *([self._online] if self._online is not None else [])]
        content = {"metadata": self.metadata, "boosters": [_pack(booster) for booster in boosters]}
        write_model(path, "xgboost", self.operator, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The model in a file. Later updates correct what it says; trials that it learned from are not kept."""
        data = read_model(path, "xgboost")
        xgboost = import_xgboost()
        boosters = [_unpack(xgboost, text, path) for text in data["boosters"]]
        return cls(data["operator"], boosters, data["metadata"])

    def _base_margin(self, rows: npt.NDArray[np.float32], estimate: FloatArray) -> FloatArray:
        if not self._base or not len(rows):
            return estimate
        first, *later = self._base
        sums = np.asarray(first.inplace_predict(rows), dtype=np.float64)
        if self.metadata.get("residual", True):
            sums = sums + estimate
        sums = sums * self.metadata.get("scale", 1.0) + self.metadata.get("shift", 0.0)
        for booster in later:
            sums = sums + booster.inplace_predict(rows)
        return sums

    def _fit_online(self) -> None:
        self._fitted = len(self._trials)
        seen = examples(self._trials, self.operator)
        if not len(seen):
            return
        # The best of a group so far need not be its best, and the base may be off by a factor for a whole workload:
        # neither changes an order, so only what differs inside a group is learned.
        left = within_groups(seen.log_shares - self._base_margin(seen.rows, seen.estimate), seen)
        data = self._xgboost.DMatrix(seen.rows, label=left, weight=seen.weights, nthread=1)
        parameters = {**common_parameters(self.jobs), **_ONLINE_PARAMETERS, "nthread": 1, "base_score": 0.0}
        self._online = self._xgboost.train({**parameters, "objective": "reg:squarederror"}, data, _ONLINE_ROUNDS)

    def _require(self, operator: str) -> None:
        if operator != self.operator:
            raise ModelMismatch(f"this cost model ranks {self.operator}, got a {operator} workload; load its own model")


def within_groups(values: FloatArray, of: Examples) -> FloatArray:
    """The values less their group's weighted mean."""
    total = np.bincount(of.groups, of.weights * values)
    weight = np.bincount(of.groups, of.weights)
    return np.asarray(values - (total / weight)[of.groups])


def common_parameters(jobs: int | None) -> dict[str, Any]:
    """xgboost parameters that every fit shares: histograms, a fixed seed, and the number of threads."""
    return {"tree_method": "hist", "seed": 0, "nthread": jobs or 0, "verbosity": 0, "max_bin": 128}


def _estimate(rows: npt.NDArray[np.float32], operator: str) -> FloatArray:
    return -rows[:, feature_names(operator).index("estimate_total")].astype(np.float64)


def _pack(booster: Any) -> str:
    return base64.b64encode(zlib.compress(bytes(booster.save_raw("ubj")), 9)).decode()


def _unpack(xgboost: ModuleType, text: str, path: Path) -> Any:
    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(zlib.decompress(base64.b64decode(text))))
    except (ValueError, zlib.error, xgboost.core.XGBoostError) as error:
        raise ModelMismatch(
            f"{path} must hold trees of features version {FEATURE_VERSION} that xgboost {xgboost.__version__} reads, "
            f"got {error}; train it again"
        ) from error
    return booster
