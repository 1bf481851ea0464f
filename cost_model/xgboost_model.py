"""The learned cost model: boosted trees that correct the analytic estimate inside each workload.

Scores are log2 of the share of the best speed. Trees are trained on recorded workloads; new trials fit a small set of
trees on what those still get wrong, so a model is useful at once and follows what it is shown.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.calibration import UNCALIBRATED, Calibration, regret_of_all
from kernelwright.cost_model.examples import FloatArray, KeptRows, estimated_log_shares, examples, within_groups
from kernelwright.cost_model.features import feature_names, features
from kernelwright.cost_model.model import Scores, read_model, squash, write_model
from kernelwright.errors import MissingDependency, ModelMismatch
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload

_FIRST_FIT = 4
_GROWTH = 0.1
_CORRECTION_ROUNDS = 60
_CORRECTION = {
    "objective": "reg:squarederror",
    "base_score": 0.0,
    "eta": 0.15,
    "max_depth": 4,
    "min_child_weight": 0.5,
    "colsample_bytree": 0.7,
}


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
class TrainedTrees:
    """A booster and how to read it: log2 of the share is `scale` times its output, plus `shift`.

    residual: whether the analytic estimate is added to the output first.
    """

    booster: Any
    residual: bool
    scale: float
    shift: float

    def log_shares(self, rows: npt.NDArray[np.float32], estimate: FloatArray) -> FloatArray:
        """log2 of the expected shares of the best speed, from feature rows and the analytic estimate."""
        output = np.asarray(self.booster.inplace_predict(rows), dtype=np.float64)
        return (output + estimate if self.residual else output) * self.scale + self.shift


class _LastRows:
    """What does not change while one search goes on: features, analytic estimate and what the earlier trees say of the
    schedules asked about last. Copies start without."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[Workload, DeviceSpec, tuple[Schedule, ...]], tuple[Any, FloatArray, FloatArray]] | None
        self._kept = None

    def __reduce__(self) -> tuple[type[_LastRows], tuple[()]]:
        return _LastRows, ()

    def of(
        self,
        workload: Workload,
        device: DeviceSpec,
        schedules: Sequence[Schedule],
        make: Callable[[], tuple[npt.NDArray[np.float32], FloatArray, FloatArray]],
    ) -> tuple[npt.NDArray[np.float32], FloatArray, FloatArray]:
        """What was kept where all that is asked about is the same, else what `make` gives."""
        asked, kept = (workload, device, tuple(schedules)), self._kept
        if kept is None or kept[0] != asked:
            kept = self._kept = (asked, make())
        return kept[1]


class XGBoostModel:
    """Ranks schedules with boosted trees; without trained ones it starts from the analytic estimate.

    operator: what it ranks. trained: trees from recorded workloads. metadata: how they were trained.
    corrections: trees that earlier updates fitted, in order. calibration: what turns scores into expected regret.
    """

    def __init__(
        self,
        operator: str = "matmul",
        trained: TrainedTrees | None = None,
        metadata: Mapping[str, Any] | None = None,
        corrections: Sequence[Any] = (),
        calibration: Calibration | None = None,
    ) -> None:
        import_xgboost()
        self.operator = operator
        self.trained = trained
        self.metadata = dict(metadata or {})
        self.calibration = calibration
        self._earlier = tuple(corrections)
        self._latest: Any = None
        self._trials: list[Trial] = []
        self._rows = KeptRows()
        self._last = _LastRows()
        self._fitted = 0

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """Expected share of the best speed for each schedule, in (0, 1]; does not depend on the others given."""
        return squash(self.log_shares(workload, device, schedules)[0])

    def expected_regret(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """Share of the best speed among the schedules that each is expected to lose, by the calibration; a model
        that has none says of its first choice what the analytic one does."""
        if not schedules:
            return np.empty(0)
        log_shares, estimate = self.log_shares(workload, device, schedules)
        if self.calibration is None:
            return regret_of_all(UNCALIBRATED, log_shares)
        return self.calibration.regret(workload, device, log_shares, estimate)

    def log_shares(
        self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]
    ) -> tuple[FloatArray, FloatArray]:
        """log2 of the share of the best speed for each schedule, as this model expects it and as the analytic one does;
        neither is bounded by 0."""
        self._require(workload.operator)
        if not schedules:
            return np.empty(0), np.empty(0)

        def make() -> tuple[npt.NDArray[np.float32], FloatArray, FloatArray]:
            rows = features(workload, device, schedules)
            return rows, self._known(rows), estimated_log_shares(rows, self.operator)

        rows, known, estimate = self._last.of(workload, device, schedules, make)
        said = known.copy() if self._latest is None else _corrected(known, self._latest, rows)
        return said, estimate.copy()

    def update(self, trials: Sequence[Trial]) -> None:
        """Add trials of this operator and fit the correction again once they grew by a tenth (at least 4)."""
        for trial in trials:
            self._require(trial.workload.operator)
        self._trials.extend(trials)
        if len(self._trials) - self._fitted >= max(_FIRST_FIT, _GROWTH * self._fitted):
            self._fit()

    def save(self, path: Path) -> None:
        """Write the trees, the correction learned from updates included, and the metadata as one JSON file."""
        corrections = [*self._earlier, *([] if self._latest is None else [self._latest])]
        trees = self.trained and {**vars(self.trained), "booster": _pack(self.trained.booster)}
        content = {
            "metadata": self.metadata,
            "trained": trees,
            "corrections": [_pack(c) for c in corrections],
            "calibration": self.calibration and self.calibration.to_json(),
        }
        write_model(path, "xgboost", self.operator, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The model in a file. Later updates correct what it says; trials that it learned from are not kept."""
        data = read_model(path, "xgboost")
        trees = data["trained"]
        trained = trees and TrainedTrees(**{**trees, "booster": _unpack(trees["booster"], path)})
        corrections = [_unpack(text, path) for text in data["corrections"]]
        columns = len(feature_names(data["operator"]))
        trees_of = [(trained.booster, columns)] if trained else []
        for booster, reads in trees_of + [(correction, columns + 1) for correction in corrections]:
            if booster.num_features() != reads:
                raise ModelMismatch(
                    f"{path} must hold trees over {reads} columns, as {data['operator']} has them now, got "
                    f"{booster.num_features()}; its templates or knobs have changed since: train it again"
                )
        fitted = data.get("calibration")
        calibration = Calibration.from_json(fitted) if fitted else None
        return cls(data["operator"], trained, data["metadata"], corrections, calibration)

    def _known(self, rows: npt.NDArray[np.float32]) -> FloatArray:
        estimate = estimated_log_shares(rows, self.operator)
        known = estimate if self.trained is None else self.trained.log_shares(rows, estimate)
        for correction in self._earlier:
            known = _corrected(known, correction, rows)
        return known

    def _fit(self) -> None:
        self._fitted = len(self._trials)
        seen = examples(self._trials, self.operator, self._rows)
        if not len(seen):
            return
        # The best of a group so far need not be its best, and the trained trees may be off by a factor for a whole
        # workload: neither changes an order, so only what differs inside a group is learned.
        known = self._known(seen.rows)
        left = within_groups(seen.log_shares - known, seen)
        xgboost = import_xgboost()
        data = xgboost.DMatrix(_beside(seen.rows, known), label=left, weight=seen.weights, nthread=1)
        self._latest = xgboost.train({**common_parameters(1), **_CORRECTION}, data, _CORRECTION_ROUNDS)

    def _require(self, operator: str) -> None:
        if operator != self.operator:
            raise ModelMismatch(f"this cost model ranks {self.operator}, got a {operator} workload; load its own model")


def common_parameters(jobs: int | None) -> dict[str, Any]:
    """xgboost parameters that every fit shares: histograms, a fixed seed, and the number of threads."""
    return {"tree_method": "hist", "seed": 0, "nthread": jobs or 0, "verbosity": 0, "max_bin": 128}


def one_thread(booster: Any) -> Any:
    """The booster, set to predict in one thread: a search keeps the other cores busy with compilers, and threads that
    wait for a busy core make a prediction many times slower."""
    booster.set_param({"nthread": 1})
    return booster


def _beside(rows: npt.NDArray[np.float32], sums: FloatArray) -> npt.NDArray[np.float32]:
    """What a correction reads: the features and what is predicted so far, so that it can also stretch or turn it."""
    return np.column_stack([rows, sums.astype(np.float32)])


def _corrected(sums: FloatArray, booster: Any, rows: npt.NDArray[np.float32]) -> FloatArray:
    return np.asarray(sums + booster.inplace_predict(_beside(rows, sums)))


def _pack(booster: Any) -> str:
    return base64.b64encode(zlib.compress(bytes(booster.save_raw("ubj")), 9)).decode()


def _unpack(text: str, path: Path) -> Any:
    xgboost = import_xgboost()
    booster = xgboost.Booster()
    try:
        booster.load_model(bytearray(zlib.decompress(base64.b64decode(text))))
    except (ValueError, zlib.error, xgboost.core.XGBoostError) as error:
        raise ModelMismatch(
            f"{path} must hold trees that xgboost {xgboost.__version__} can read, got {error}; train it again"
        ) from error
    return one_thread(booster)
