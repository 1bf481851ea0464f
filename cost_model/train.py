"""Train the learned cost model on recorded trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kernelwright.cost_model.examples import Examples, examples, within_groups
from kernelwright.cost_model.features import FEATURE_VERSION, feature_names
from kernelwright.cost_model.xgboost_model import (
    TrainedTrees,
    XGBoostModel,
    common_parameters,
    import_xgboost,
    one_thread,
)
from kernelwright.errors import UsageError
from kernelwright.types import Trial

_TREES = {"eta": 0.12, "max_depth": 6, "min_child_weight": 2.0, "subsample": 0.9, "colsample_bytree": 0.6}
_GRADES = 31


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the trees are trained for.

    xgboost: name of the xgboost objective. residual: whether they correct the analytic estimate or stand alone.
    """

    xgboost: str
    residual: bool = False

    @property
    def ranks(self) -> bool:
        """Whether only the order inside a workload is learned."""
        return self.xgboost.startswith("rank:")


OBJECTIVES = {
    "log": Objective("reg:squarederror"),
    "residual": Objective("reg:squarederror", residual=True),
    "rank": Objective("rank:ndcg"),
    "pairwise": Objective("rank:pairwise"),
}
"""By name; `kernelwright.cost_model.evaluation` compares them."""

DEFAULT_OBJECTIVE = "residual"
DEFAULT_ROUNDS = 150


def train(
    trials: Iterable[Trial],
    operator: str = "matmul",
    objective: str = DEFAULT_OBJECTIVE,
    rounds: int = DEFAULT_ROUNDS,
    jobs: int | None = None,
) -> XGBoostModel:
    """A model trained on trials of one operator, failures included; vendor calls and other operators are left out.

    objective: a name in OBJECTIVES. rounds: number of trees. jobs: threads, None for all cores. The same trials, in
    the same order, give the same model. UsageError for an unknown objective or without a trial that is ok.
    """
    if objective not in OBJECTIVES:
        raise UsageError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    trials = [t for t in trials if t.workload.operator == operator]
    seen = examples(trials, operator)
    if not len(seen):
        raise UsageError(f"training needs at least one {operator} trial that is ok, got none in {len(trials)}")
    chosen = OBJECTIVES[objective]
    booster = _fit(seen, operator, chosen, rounds, jobs)
    scale, shift = _line(seen, booster, chosen)
    trained = TrainedTrees(booster, chosen.residual, scale, shift)
    return XGBoostModel(operator, trained, _summary(trials, seen, objective, rounds))


def _fit(seen: Examples, operator: str, objective: Objective, rounds: int, jobs: int | None) -> Any:
    xgboost = import_xgboost()
    parameters = {**common_parameters(jobs), **_TREES, "objective": objective.xgboost}
    names = list(feature_names(operator))
    data = xgboost.DMatrix(seen.rows, feature_names=names, nthread=jobs or -1)
    if objective.ranks:
        data.set_info(label=np.round(np.exp2(seen.log_shares) * _GRADES), qid=seen.groups)
        parameters |= {"lambdarank_pair_method": "topk", "lambdarank_num_pair_per_sample": 32}
    elif objective.residual:
        data.set_info(label=within_groups(seen.log_shares - seen.estimate, seen), weight=seen.weights)
        parameters["base_score"] = 0.0
    else:
        data.set_info(label=seen.log_shares, weight=seen.weights)
    return one_thread(xgboost.train(parameters, data, rounds))


def _line(seen: Examples, booster: Any, objective: Objective) -> tuple[float, float]:
    """Slope and shift that lead from what the trees say to log2 of the share of the best speed."""
    sums = np.asarray(booster.inplace_predict(seen.rows), dtype=np.float64)
    sums = sums + seen.estimate if objective.residual else sums
    slope = 1.0
    if objective.ranks and np.ptp(sums) > 0:
        spread = np.cov(sums, seen.log_shares, aweights=seen.weights)
        slope = max(float(spread[0, 1] / spread[0, 0]), 1e-3)
    return slope, float(np.average(seen.log_shares - slope * sums, weights=seen.weights))


def _summary(trials: Sequence[Trial], seen: Examples, objective: str, rounds: int) -> dict[str, Any]:
    return {
        "objective": objective,
        "rounds": rounds,
        "feature_version": FEATURE_VERSION,
        "xgboost": import_xgboost().__version__,
        "examples": len(seen),
        "groups": int(seen.groups.max()) + 1,
        "templates": sorted({t.schedule.template for t in trials if t.measurement.ok}),
        "failures": sum(not t.measurement.ok for t in trials),
        "devices": sorted({t.device.slug for t in trials}),
        "toolchains": sorted({f"triton {t.toolchain.triton}, torch {t.toolchain.torch}" for t in trials}),
    }
