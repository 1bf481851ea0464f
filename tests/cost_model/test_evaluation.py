from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kernelwright.cost_model import CostModel, RooflineModel
from kernelwright.cost_model.evaluation import (
    SHORTLIST,
    Plan,
    best_objective,
    decile_recall,
    evaluate,
    evaluate_report,
    expected_best,
    judge,
    judged_groups,
    random_row,
    spearman,
)
from kernelwright.cost_model.families import family
from kernelwright.errors import UsageError
from kernelwright.types import Schedule, Trial, Workload


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
    assert (row.top1, row.shortlist, row.online, row.decile) == (1, 1, 1, 1)
    assert row.spearman == pytest.approx(1)
    assert row.schedules == len(group)


def test_a_model_that_is_always_wrong(recorded: list[Trial]) -> None:
    group = judged_groups(recorded, "matmul")[0]
    row = judge(Oracle(group, sign=-1), group)
    assert row.top1 == 0
    assert row.spearman == pytest.approx(-1)
    assert row.shortlist < random_row(group).shortlist


def training_sets(recorded: list[Trial], plan: Plan) -> list[set[Workload]]:
    """What each fold's model was trained on."""
    seen: list[set[Workload]] = []

    def make(trials: Sequence[Trial]) -> CostModel:
        seen.append({t.workload for t in trials})
        return RooflineModel()

    rows = evaluate(recorded, make, plan)
    assert len(rows) == 8 and all(math.isnan(row.online) for row in rows)
    return seen


@pytest.mark.parametrize("grouping", ["family", "workload"])
def test_workloads_are_left_out_of_their_own_training(recorded: list[Trial], grouping: str) -> None:
    workloads = {t.workload for t in recorded}
    held = [workloads - kept for kept in training_sets(recorded, Plan(folds=4, grouping=grouping, online=False))]
    assert set().union(*held) == workloads
    assert sum(map(len, held)) == len(workloads)


def test_a_family_is_never_cut(make_trials: Callable[..., list[Trial]]) -> None:
    shapes = [(m, n, k) for n, k in ((512, 512), (512, 1024), (1024, 512)) for m in (64, 256)]
    trials = make_trials([*shapes, (64, 2048, 512), (64, 512, 2048)], keep=0.1)
    for kept in training_sets(trials, Plan(folds=9, online=False)):
        held = {t.workload for t in trials} - kept
        assert not {family(w) for w in held} & {family(w) for w in kept}


def test_one_group_is_not_enough(make_trials: Callable[..., list[Trial]]) -> None:
    trials = make_trials([(64, 512, 512), (256, 512, 512)], keep=0.1)
    with pytest.raises(UsageError, match="at least two matmul groups by family, got 1"):
        evaluate(trials, lambda trials: RooflineModel())
    with pytest.raises(UsageError, match="grouping must be one of family, workload, got 'shape'"):
        evaluate(trials, lambda trials: RooflineModel(), Plan(grouping="shape"))


def test_expected_best_is_exact() -> None:
    values = np.array([0.9, 0.7, 0.4, 0.0, 0.0])
    for count in range(1, 6):
        draws = [max(draw) for draw in itertools.combinations(values.tolist(), count)]
        assert expected_best(values, count) == pytest.approx(sum(draws) / len(draws))
    assert expected_best(values, 9) == 0.9


def test_decile_recall() -> None:
    share = np.linspace(1, 0.1, 30)
    assert decile_recall(share, share) == 1
    assert decile_recall(-share, share) == 0
    assert decile_recall(np.where(np.arange(30) == 2, 0.0, share), share) == pytest.approx(2 / 3)


def test_spearman() -> None:
    one = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(one, one**3) == pytest.approx(1)
    assert spearman(one, -one) == pytest.approx(-1)
    assert spearman(one, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman(one[:2], one[:2]))


def test_report_compares_with_random_and_roofline(recorded: list[Trial]) -> None:
    report = evaluate_report(recorded, plan=Plan(folds=2, rounds=80, jobs=1))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert set(report["models"]) == {"random", "roofline", "xgboost:residual"}
    assert (report["workloads"], report["trials"], report["shortlist"]) == (8, len(recorded), SHORTLIST)
    random, learned = report["models"]["random"], report["models"]["xgboost:residual"]
    assert learned["top1_mean"] > random["top1_mean"] + 0.2
    assert learned["top1_regret_median"] == pytest.approx(1 - learned["top1_median"])
    assert learned["decile_mean"] > random["decile_mean"] + 0.2
    assert learned["shortlist_p10"] > random["shortlist_p10"]
    assert len(report["rows"]) == 3 * 8
    assert best_objective(report) == "residual"


def test_the_best_objective_is_chosen_by_its_figures() -> None:
    figures = {"xgboost:log": 0.9, "xgboost:rank": 0.95, "roofline": 0.99}
    models = {name: {"shortlist_mean": value, "top1_mean": value} for name, value in figures.items()}
    assert best_objective({"models": models}) == "rank"
    with pytest.raises(UsageError, match="at least one learned model"):
        best_objective({"models": {}})
