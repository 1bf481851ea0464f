"""How good is a cost model on workloads that it was not trained on? Judged on recorded trials.

Quality is the best recorded time over the time of what was chosen, in [0, 1]; a chosen failure has quality 0.
Regret is 1 less quality.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.model import CostModel, Scores, shares, workload_groups
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.train import DEFAULT_OBJECTIVE, DEFAULT_ROUNDS, OBJECTIVES, train
from kernelwright.cost_model.xgboost_model import XGBoostModel
from kernelwright.errors import UsageError
from kernelwright.types import Trial

MakeModel = Callable[[Sequence[Trial]], CostModel]
"""From the trials to train on to a model, which must be fit for `copy.deepcopy`."""

SHORTLIST = 16
"""How many measurements the shortlist and the online figures may spend."""

_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload's result. top1, shortlist, online: quality of the first choice, of the best of the 16 ranked
    highest, and of the best after 16 measurements in batches of 4 with updates between. spearman: rank correlation
    between scores and speeds of the schedules that worked, NaN for fewer than 3. schedules: how many were recorded."""

    workload: str
    device: str
    schedules: int
    top1: float
    shortlist: float
    online: float
    spearman: float


def evaluate(
    trials: Iterable[Trial], make_model: MakeModel, operator: str = "matmul", folds: int = 6, online: bool = True
) -> list[Row]:
    """Judge models on the workloads left out of their training, one fold at a time.

    All trials of a workload, on every device, are in the same fold. UsageError when fewer than two workloads have a
    trial that is ok.
    """
    groups = judged_groups(trials, operator)
    names = sorted({group[0].workload.key for group in groups})
    if len(names) < 2:
        raise UsageError(
            f"evaluation needs at least two {operator} workloads with a trial that is ok, got {len(names)}"
        )
    rows = []
    for fold in range(min(folds, len(names))):
        held = set(names[fold :: min(folds, len(names))])
        kept = [trial for group in groups if group[0].workload.key not in held for trial in group]
        model = make_model(kept)
        rows += [judge(copy.deepcopy(model), group, online) for group in groups if group[0].workload.key in held]
    return rows


def judged_groups(trials: Iterable[Trial], operator: str) -> list[list[Trial]]:
    """The operator's workload groups in which something worked, ordered by their keys."""
    groups = workload_groups(t for t in trials if t.workload.operator == operator)
    return [group for _, group in sorted(groups.items()) if any(t.measurement.ok for t in group)]


def judge(model: CostModel, group: Sequence[Trial], online: bool = True) -> Row:
    """One workload group's result; the model learns from it when `online`."""
    share = shares(group)
    first = group[0]
    scores = model.predict(first.workload, first.device, [t.schedule for t in group])
    order = np.argsort(-scores, kind="stable")
    return Row(
        workload=str(first.workload),
        device=first.device.slug,
        schedules=len(group),
        top1=float(share[order[0]]),
        shortlist=float(share[order[:SHORTLIST]].max()),
        online=online_quality(model, group) if online else math.nan,
        spearman=spearman(scores[share > 0], share[share > 0]),
    )


def online_quality(model: CostModel, group: Sequence[Trial]) -> float:
    """Quality of the best of 16 trials, taken from the top of the model's ranking 4 at a time with updates between."""
    left = list(group)
    seen: list[Trial] = []
    while left and len(seen) < SHORTLIST:
        scores = model.predict(left[0].workload, left[0].device, [t.schedule for t in left])
        chosen = set(np.argsort(-scores, kind="stable")[:_BATCH].tolist())
        batch = [trial for place, trial in enumerate(left) if place in chosen]
        left = [trial for place, trial in enumerate(left) if place not in chosen]
        model.update(batch)
        seen += batch
    best = min(t.measurement.median_us or math.inf for t in group)
    return best / min(t.measurement.median_us or math.inf for t in seen)


def random_row(group: Sequence[Trial]) -> Row:
    """What choosing at random gives on average, computed exactly."""
    share = np.sort(shares(group))[::-1]
    expected = expected_best(share, SHORTLIST)
    first = group[0]
    return Row(str(first.workload), first.device.slug, len(group), float(share.mean()), expected, expected, 0.0)


def expected_best(values: Scores, count: int) -> float:
    """Mean of the best of `count` values drawn without replacement; `values` fall from first to last."""
    total = len(values)
    if count >= total:
        return float(values[0])
    all_ways = math.comb(total, count)
    ways = (math.comb(total - place - 1, count - 1) for place in range(total - count + 1))
    return float(sum(value * (way / all_ways) for value, way in zip(values, ways, strict=False)))


def spearman(one: Scores, other: Scores) -> float:
    """Rank correlation, ties given their mean rank; NaN for fewer than 3 values or a constant."""
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return math.nan
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Scores) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse])


def summarise(rows: Sequence[Row]) -> dict[str, float]:
    """Median, mean and 10th percentile over workloads; NaN figures are left out."""
    out: dict[str, float] = {}
    for name in ("top1", "shortlist", "online", "spearman"):
        values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            out[f"{name}_median"] = round(float(np.median(values)), 4)
            out[f"{name}_mean"] = round(float(values.mean()), 4)
            out[f"{name}_p10"] = round(float(np.percentile(values, 10)), 4)
    if "top1_median" in out:
        out["top1_regret_median"] = round(1 - out["top1_median"], 4)
    return out


def evaluate_report(
    trials: Iterable[Trial],
    operator: str = "matmul",
    objectives: Sequence[str] = (DEFAULT_OBJECTIVE,),
    folds: int = 6,
    rounds: int = DEFAULT_ROUNDS,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Learned models, one for each training objective, beside the roofline and random choice; fit for JSON.

    Keys: operator, workloads, trials, failures, folds, shortlist, models (name to the figures of `summarise`) and
    rows (one object for each model and workload).
    """
    groups = judged_groups(trials, operator)
    kept = [trial for group in groups for trial in group]
    results: dict[str, list[Row]] = {
        "random": [random_row(group) for group in groups],
        "roofline": [judge(RooflineModel(operator), group) for group in groups],
    }
    for objective in objectives:
        results[f"xgboost:{objective}"] = evaluate(kept, _trainer(operator, objective, rounds, jobs), operator, folds)
    return {
        "operator": operator,
        "workloads": len({group[0].workload.key for group in groups}),
        "trials": len(kept),
        "failures": sum(not trial.measurement.ok for trial in kept),
        "folds": folds,
        "shortlist": SHORTLIST,
        "models": {name: summarise(rows) for name, rows in results.items()},
        "rows": [_plain(name, row) for name, rows in results.items() for row in rows],
    }


def best_objective(report: Mapping[str, Any]) -> str:
    """The training objective of a report whose shortlist and first choice are best on average."""
    learned = {name: figures for name, figures in report["models"].items() if name.startswith("xgboost:")}
    if not learned:
        raise UsageError("the report must hold at least one learned model, got none; give evaluate_report objectives")
    chosen: str = max(learned, key=lambda name: (learned[name]["shortlist_mean"] + learned[name]["top1_mean"], name))
    return chosen.removeprefix("xgboost:")


def train_best(
    trials: Iterable[Trial],
    operator: str = "matmul",
    folds: int = 6,
    rounds: int = DEFAULT_ROUNDS,
    jobs: int | None = None,
) -> tuple[XGBoostModel, dict[str, Any]]:
    """A model trained on all trials for the objective that does best on workloads left out, with the report.

    The model's metadata holds the figures of its objective under "evaluation".
    """
    kept = list(trials)
    report = evaluate_report(kept, operator, tuple(OBJECTIVES), folds, rounds, jobs)
    objective = best_objective(report)
    model = train(kept, operator, objective, rounds, jobs)
    model.metadata["evaluation"] = report["models"][f"xgboost:{objective}"]
    return model, report


def _trainer(operator: str, objective: str, rounds: int, jobs: int | None) -> MakeModel:
    return lambda trials: train(trials, operator, objective, rounds, jobs)


def _plain(model: str, row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    return {"model": model, **{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}}
