from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest

from kernelwright.cost_model import CostModel, RooflineModel
from kernelwright.cost_model.evaluation import (
    SHORTLIST,
    best_objective,
    evaluate,
    evaluate_report,
    expected_best,
    judge,
    judged_groups,
    random_row,
    spearman,
    train_best,
)
from kernelwright.errors import UsageError
from kernelwright.types import Schedule, Trial


class Oracle(RooflineModel):
    """Knows every time."""

    def __init__(self, trials: Sequence[Trial], sign: int = 1) -> None:
        super().__init__()
        times = {t.schedule: t.measurement.median_us or math.inf for t in trials}
        self.scores = {schedule: 1 / time for schedule, time in times.items()}
        self.sign = sign

    def predict(self, workload: object, device: object, schedules: Sequence[Schedule]) -> np.ndarray:  # type: ignore[override, type-arg]
        return self.sign * np.array([self.scores[s] for s in schedules])


def test_a_model_that_knows_all_has_no_regret(recorded: list[Trial]) -> None:
    group = judged_groups(recorded, "matmul")[0]
    row = judge(Oracle(group), group)
    assert (row.top1, row.shortlist, row.online) == (1, 1, 1)
    assert row.spearman == pytest.approx(1)
    assert row.schedules == len(group)


def test_a_model_that_is_always_wrong(recorded: list[Trial]) -> None:
    group = judged_groups(recorded, "matmul")[0]
    row = judge(Oracle(group, sign=-1), group)
    assert row.top1 == 0
    assert row.spearman == pytest.approx(-1)
    assert row.shortlist < random_row(group).shortlist


def test_workloads_are_left_out_of_their_own_training(recorded: list[Trial]) -> None:
    seen: list[set[str]] = []

    def make(trials: Sequence[Trial]) -> CostModel:
        seen.append({t.workload.key for t in trials})
        return RooflineModel()

    rows = evaluate(recorded, make, folds=4, online=False)
    keys = {t.workload.key for t in recorded}
    assert len(rows) == len(keys) == 8
    held = [keys - kept for kept in seen]
    assert set().union(*held) == keys
    assert sum(map(len, held)) == len(keys)
    assert all(math.isnan(row.online) for row in rows)


def test_one_workload_is_not_enough(recorded: list[Trial]) -> None:
    with pytest.raises(UsageError, match="at least two matmul workloads"):
        evaluate([t for t in recorded if t.workload == recorded[0].workload], lambda trials: RooflineModel())


def test_expected_best_is_exact() -> None:
    values = np.array([0.9, 0.7, 0.4, 0.0, 0.0])
    for count in range(1, 6):
        draws = [max(draw) for draw in itertools.combinations(values.tolist(), count)]
        assert expected_best(values, count) == pytest.approx(sum(draws) / len(draws))
    assert expected_best(values, 9) == 0.9


def test_spearman() -> None:
    one = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(one, one**3) == pytest.approx(1)
    assert spearman(one, -one) == pytest.approx(-1)
    assert spearman(one, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman(one[:2], one[:2]))


def test_report_compares_with_random_and_roofline(recorded: list[Trial]) -> None:
    report = evaluate_report(recorded, folds=2, rounds=80, jobs=1)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert set(report["models"]) == {"random", "roofline", "xgboost:residual"}
    assert (report["workloads"], report["trials"], report["shortlist"]) == (8, len(recorded), SHORTLIST)
    random, learned = report["models"]["random"], report["models"]["xgboost:residual"]
    assert learned["top1_mean"] > random["top1_mean"] + 0.2
    assert learned["top1_regret_median"] == pytest.approx(1 - learned["top1_median"])
    assert learned["shortlist_p10"] > random["shortlist_p10"]
    assert len(report["rows"]) == 3 * 8
    assert best_objective(report) == "residual"


def test_the_best_objective_is_chosen_by_its_figures() -> None:
    figures = {"xgboost:log": 0.9, "xgboost:rank": 0.95, "roofline": 0.99}
    models = {name: {"shortlist_mean": value, "top1_mean": value} for name, value in figures.items()}
    assert best_objective({"models": models}) == "rank"
    with pytest.raises(UsageError, match="at least one learned model"):
        best_objective({"models": {}})


def test_train_best_keeps_its_figures(recorded: list[Trial]) -> None:
    few = [trial for group in judged_groups(recorded, "matmul")[:2] for trial in group[::3]]
    model, report = train_best(few, folds=2, rounds=20, jobs=1)
    assert model.metadata["evaluation"] == report["models"][f"xgboost:{model.metadata['objective']}"]
