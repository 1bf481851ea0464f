"""How good is a cost model on workloads that it was not trained on? Judged on recorded trials.

Quality is the best recorded time over the time of what was chosen, in [0, 1]; a chosen failure has quality 0.
Regret is 1 less quality.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.families import DEFAULT_GROUPING, groups_by_name
from kernelwright.cost_model.model import CostModel, Scores, shares, workload_groups
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.train import DEFAULT_OBJECTIVE, DEFAULT_ROUNDS, train
from kernelwright.errors import UsageError
from kernelwright.types import Trial, digest

MakeModel = Callable[[Sequence[Trial]], CostModel]
"""From the trials to train on to a model, which must be fit for `copy.deepcopy`."""

SHORTLIST = 16
"""How many measurements the shortlist and the online figures may spend."""

_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """How models are judged. folds: into how many parts the workloads are cut. grouping: a name in GROUPINGS, what is
    never cut. rounds, jobs: as for `train`. online: whether to judge learning from measurements too, which takes longer
    than all the rest."""

    operator: str = "matmul"
    folds: int = 6
    grouping: str = DEFAULT_GROUPING
    rounds: int = DEFAULT_ROUNDS
    jobs: int | None = None
    online: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """One workload's result. top1, shortlist, online: quality of the first choice, of the best of the 16 ranked
    highest, and of the best after 16 measurements in batches of 4 with updates between. decile: share of the fastest
    tenth that is in the tenth ranked highest, 0.1 by chance. spearman: rank correlation between scores and speeds of
    the schedules that worked, NaN for fewer than 3. schedules: how many were recorded."""

    workload: str
    device: str
    schedules: int
    top1: float
    shortlist: float
    online: float
    decile: float
    spearman: float


def evaluate(trials: Iterable[Trial], make_model: MakeModel, plan: Plan = Plan()) -> list[Row]:
    """Judge models on the workloads left out of their training, one fold at a time.

    UsageError when fewer than two of the plan's groups have a trial that is ok.
    """
    return [judge(model, group, plan.online) for _, model, group in held_out(trials, make_model, plan)]


def held_out(
    trials: Iterable[Trial], make_model: MakeModel, plan: Plan = Plan()
) -> Iterator[tuple[int, CostModel, list[Trial]]]:
    """Each workload group that has a trial that is ok, with the number of its fold and a copy of the model that was
    trained on the other folds. Workloads of one group by the plan's grouping are all in one fold, on every device.
    UsageError as for `evaluate`."""
    groups = judged_groups(trials, plan.operator)
    names = groups_by_name((group[0].workload for group in groups), plan.grouping)
    order = sorted(set(names.values()), key=digest)
    if len(order) < 2:
        raise UsageError(
            f"evaluation needs trials that are ok of at least two {plan.operator} groups by {plan.grouping}, "
            f"got {len(order)}"
        )
    folds = min(plan.folds, len(order))
    for fold in range(folds):
        held = set(order[fold::folds])
        kept = [trial for group in groups if names[group[0].workload] not in held for trial in group]
        model = make_model(kept)
        for group in groups:
            if names[group[0].workload] in held:
                yield fold, copy.deepcopy(model), group


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
        decile=decile_recall(scores, share),
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
    chance = max(1, len(group) // 10) / len(group)
    return Row(str(first.workload), first.device.slug, len(group), float(share.mean()), expected, expected, chance, 0.0)


def decile_recall(scores: Scores, share: Scores) -> float:
    """Of the fastest tenth of the schedules, the part that is also in the tenth with the highest scores."""
    count = max(1, len(share) // 10)
    fastest = np.argsort(-share, kind="stable")[:count]
    return len(np.intersect1d(fastest, np.argsort(-scores, kind="stable")[:count])) / count


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
    for name in ("top1", "shortlist", "online", "decile", "spearman"):
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
    trials: Iterable[Trial], objectives: Sequence[str] = (DEFAULT_OBJECTIVE,), plan: Plan = Plan()
) -> dict[str, Any]:
    """Learned models, one for each training objective, beside the roofline and random choice; fit for JSON.

    Keys: operator, grouping, groups, workloads, trials, failures, folds, rounds, shortlist, models (name to the figures
    of `summarise`) and rows (one object for each model and workload).
    """
    groups = judged_groups(trials, plan.operator)
    kept = [trial for group in groups for trial in group]
    results: dict[str, list[Row]] = {
        "random": [random_row(group) for group in groups],
        "roofline": [judge(RooflineModel(plan.operator), group, plan.online) for group in groups],
    }
    for objective in objectives:
        results[f"xgboost:{objective}"] = evaluate(kept, trainer(objective, plan), plan)
    return {
        "operator": plan.operator,
        "grouping": plan.grouping,
        "groups": len(set(groups_by_name((group[0].workload for group in groups), plan.grouping).values())),
        "workloads": len({group[0].workload.key for group in groups}),
        "trials": len(kept),
        "failures": sum(not trial.measurement.ok for trial in kept),
        "folds": plan.folds,
        "rounds": plan.rounds,
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


def trainer(objective: str, plan: Plan) -> MakeModel:
    """What trains a model for an objective as the plan says."""
    return lambda trials: train(trials, plan.operator, objective, plan.rounds, plan.jobs)


def _plain(model: str, row: Row) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    return {"model": model, **{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}}
