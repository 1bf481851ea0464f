"""Fit the calibration of a way of training on folds that were left out, and tell how well it holds on others."""

from __future__ import annotations

import dataclasses
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
SHARE_BINS = 10
CELLS = 20


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

    Report: folds, grouping, workloads, trials, devices; `first_choice`, bins of equally many workloads with the mean
    expected and realised regret of the model's first choice, and `error`, the mean distance of these two over the
    workloads; `bins`, all schedules by the share of the best speed that they are expected to reach, with the mean, 10th
    and 90th percentile of what they reached; `cells`, their count by expected (outer) and reached share.
    """
    kept = [trial for trial in trials if trial.workload.operator == plan.operator]
    points = _points(kept, objective, plan)
    base, away, disagreed = _fit(points).tolist()
    workloads = _worked(kept)
    devices = sorted({device.key for device in {trial.device for trial in kept}})
    head = {
        "folds": plan.folds,
        "grouping": plan.grouping,
        "workloads": len(workloads),
        "devices": sorted({trial.device.slug for trial in kept}),
    }
    return Calibration(base, away, disagreed, tuple(workloads), tuple(devices)), head | _report(points)


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
    expected, realised, shares_expected, shares_reached = [], [], [], []
    for fold in sorted({point.fold for point in points}):
        weights = _fit([point for point in points if point.fold != fold])
        for point in points:
            if point.fold == fold:
                first = min(max(float(np.dot(point.terms, weights)), 0.0), 1.0)
                expected.append(first)
                realised.append(point.first)
                shares_expected.append(1 - regret_of_all(first, point.log_shares))
                shares_reached.append(1 - point.regrets)
    bins = _first_choice(np.array(expected), np.array(realised))
    x, y = np.concatenate(shares_expected), np.concatenate(shares_reached)
    cells, _, _ = np.histogram2d(x, y, bins=CELLS, range=((0, 1), (0, 1)))
    return {
        "trials": len(x),
        "error": round(sum(b["count"] * abs(b["expected"] - b["realised"]) for b in bins) / len(points), 4),
        "first_choice": bins,
        "bins": _by_share(x, y),
        "cells": cells.astype(int).tolist(),
    }


def _first_choice(expected: FloatArray, realised: FloatArray) -> list[dict[str, Any]]:
    """Equally large bins, from the least expected regret to the most."""
    parts = np.array_split(np.argsort(expected, kind="stable"), min(BINS, len(expected)))
    return [
        {
            "count": len(part),
            "expected": round(float(expected[part].mean()), 4),
            "realised": round(float(realised[part].mean()), 4),
            "realised_p90": round(float(np.percentile(realised[part], 90)), 4),
        }
        for part in parts
    ]


def _by_share(expected: FloatArray, reached: FloatArray) -> list[dict[str, Any]]:
    """Bins of equal width in the expected share; empty ones are left out."""
    place = np.minimum((expected * SHARE_BINS).astype(int), SHARE_BINS - 1)
    return [
        {
            "count": int((place == number).sum()),
            "predicted": round(float(expected[place == number].mean()), 4),
            "measured": round(float(reached[place == number].mean()), 4),
            "p10": round(float(np.percentile(reached[place == number], 10)), 4),
            "p90": round(float(np.percentile(reached[place == number], 90)), 4),
        }
        for number in range(SHARE_BINS)
        if (place == number).any()
    ]
