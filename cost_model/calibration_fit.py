"""Fit the calibration of a way of training on folds that were left out, and tell how well it holds on others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kernelwright.cost_model.calibration import (
    Calibration,
    FloatArray,
    disagreement,
    least_squares,
    nearest,
    regret_of_all,
)
from kernelwright.cost_model.evaluation import Plan, held_out
from kernelwright.cost_model.model import shares
from kernelwright.cost_model.train import train
from kernelwright.cost_model.xgboost_model import XGBoostModel
from kernelwright.types import Trial, Workload

BINS = 5
GAP_BINS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, np.inf)


@dataclasses.dataclass(frozen=True)
class _Point:
    """One workload left out: its fold, the terms of the first choice's regret, and for all its schedules what the
    model expected (log2 of the share of the best speed) and what they really lost."""

    fold: int
    terms: tuple[float, float, float]
    log_shares: FloatArray
    regrets: FloatArray

    @property
    def first(self) -> float:
        """Regret of the model's first choice."""
        return float(self.regrets[np.argmax(self.log_shares)])


def calibrate(trials: Iterable[Trial], objective: str, plan: Plan) -> tuple[Calibration, dict[str, Any]]:
    """The calibration for models trained on all the trials, and a report of how it did on folds left out of its fit.

    Report: `folds`, `workloads`, `first_choice` and `all_schedules`, each a list of bins with the number of cases and
    the mean expected and mean realised regret; `error`: the weighted mean distance of the two over the bins of the
    first choice.
    """
    kept = [trial for trial in trials if trial.workload.operator == plan.operator]
    points = _points(kept, objective, plan)
    weights = _fit(points)
    workloads = _worked(kept)
    devices = sorted({device.key for device in {trial.device for trial in kept}})
    return Calibration(*map(float, weights), tuple(workloads), tuple(devices)), _report(points)


def _points(trials: Sequence[Trial], objective: str, plan: Plan) -> list[_Point]:
    def make(part: Sequence[Trial]) -> XGBoostModel:
        model = train(part, plan.operator, objective, plan.rounds, plan.jobs)
        model.calibration = Calibration(0, 0, 0, tuple(_worked(part)), ())
        return model

    points = []
    for fold, model, group in held_out(trials, make, plan):
        assert isinstance(model, XGBoostModel) and model.calibration is not None
        first = group[0]
        log_shares, estimate = model.log_shares(first.workload, first.device, [t.schedule for t in group])
        away = nearest(first.workload, model.calibration.workloads)
        terms = (1.0, away, disagreement(log_shares, estimate))
        points.append(_Point(fold, terms, log_shares, 1 - shares(group)))
    return points


def _worked(trials: Sequence[Trial]) -> list[Workload]:
    return list(dict.fromkeys(trial.workload for trial in trials if trial.measurement.ok))


def _fit(points: Sequence[_Point]) -> FloatArray:
    return least_squares(np.array([p.terms for p in points]), np.array([p.first for p in points]))


def _report(points: Sequence[_Point]) -> dict[str, Any]:
    """Every point's regret as expected by a fit on the other folds, beside what it was."""
    expected, realised, gaps, all_expected = [], [], [], []
    folds = sorted({point.fold for point in points})
    for fold in folds:
        weights = _fit([point for point in points if point.fold != fold])
        for point in points:
            if point.fold == fold:
                first = min(max(float(np.dot(point.terms, weights)), 0.0), 1.0)
                expected.append(first)
                realised.append(point.first)
                gaps.append(point.log_shares.max() - point.log_shares)
                all_expected.append(regret_of_all(first, point.log_shares))
    first_choice = _by_rank(np.array(expected), np.array(realised))
    regrets = [point.regrets for fold in folds for point in points if point.fold == fold]
    return {
        "folds": len(folds),
        "workloads": len(points),
        "error": round(sum(b["cases"] * abs(b["expected"] - b["realised"]) for b in first_choice) / len(points), 4),
        "first_choice": first_choice,
        "all_schedules": _by_gap(np.concatenate(gaps), np.concatenate(all_expected), np.concatenate(regrets)),
    }


def _by_rank(expected: FloatArray, realised: FloatArray) -> list[dict[str, Any]]:
    """Equally large bins, from the least expected regret to the most."""
    parts = np.array_split(np.argsort(expected, kind="stable"), min(BINS, len(expected)))
    return [_bin(expected[part], realised[part]) for part in parts]


def _by_gap(gaps: FloatArray, expected: FloatArray, realised: FloatArray) -> list[dict[str, Any]]:
    """Bins by how far a schedule is expected to stay behind the first choice, log2."""
    bins = []
    for low, high in itertools.pairwise(GAP_BINS):
        inside = (gaps >= low) & (gaps < high)
        if inside.any():
            bins.append({"gap_from": low, **_bin(expected[inside], realised[inside])})
    return bins


def _bin(expected: FloatArray, realised: FloatArray) -> dict[str, Any]:
    return {
        "cases": len(expected),
        "expected": round(float(expected.mean()), 4),
        "realised": round(float(realised.mean()), 4),
        "realised_p90": round(float(np.percentile(realised, 90)), 4),
    }
