"""What chooses the schedules to try, and the strategies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kernelwright.cost_model.model import CostModel
from kernelwright.errors import UnknownStrategy
from kernelwright.kernels import OPERATORS
from kernelwright.kernels.space import Space
from kernelwright.search.bayesian_search import BayesianSearch
from kernelwright.search.evolutionary_search import EvolutionarySearch
from kernelwright.search.exhaustive_search import ExhaustiveSearch
from kernelwright.search.model_guided_search import ModelGuidedSearch
from kernelwright.search.random_search import RandomSearch
from kernelwright.types import DeviceSpec, Measurement, Schedule, Workload


class Strategy(Protocol):
    """Ask and tell: proposes schedules of one space, learns from what came of them. No I/O inside.

    Equal seeds and equal observations give equal proposals.
    """

    def propose(self, count: int) -> list[Schedule]:
        """Up to `count` legal schedules, none ever proposed or observed before; empty when there are no more."""
        ...

    def observe(self, schedule: Schedule, measurement: Measurement) -> None:
        """Take in a result, a failure included; schedules that were never proposed may be told as well."""
        ...


@runtime_checkable
class ExpectsGain(Protocol):
    """What a strategy adds that can tell what going on is worth."""

    def expected_gain(self) -> float:
        """Share by which the most promising schedule not tried yet is expected to be faster than the best so far;
        infinite while it cannot tell."""
        ...


StrategyFactory = Callable[[Workload, DeviceSpec, Space, int, CostModel | None], Strategy]


def _random(_w: Workload, _d: DeviceSpec, space: Space, seed: int, _m: CostModel | None) -> Strategy:
    return RandomSearch(space, seed)


def _exhaustive(_w: Workload, _d: DeviceSpec, space: Space, _s: int, _m: CostModel | None) -> Strategy:
    return ExhaustiveSearch(space)


def _evolutionary(_w: Workload, _d: DeviceSpec, space: Space, seed: int, _m: CostModel | None) -> Strategy:
    return EvolutionarySearch(space, seed)


def _bayesian(_w: Workload, _d: DeviceSpec, space: Space, seed: int, _m: CostModel | None) -> Strategy:
    return BayesianSearch(space, seed)


def _model(workload: Workload, device: DeviceSpec, space: Space, seed: int, model: CostModel | None) -> Strategy:
    if model is None and workload.operator not in OPERATORS:
        return BayesianSearch(space, seed)
    if model is None:
        # Late, because a trained model brings xgboost.
        from kernelwright.cost_model import packaged_model

        model = packaged_model(workload.operator)
    return ModelGuidedSearch(workload, device, space, seed, model)


STRATEGIES: dict[str, StrategyFactory] = {
    "model": _model,
    "bayesian": _bayesian,
    "evolutionary": _evolutionary,
    "random": _random,
    "exhaustive": _exhaustive,
}
"""Every strategy by the name users type."""


def make_strategy(
    name: str, workload: Workload, device: DeviceSpec, space: Space, seed: int = 0, model: CostModel | None = None
) -> Strategy:
    """The strategy of that name over a space; UnknownStrategy lists the names there are.

    model: what "model" starts from; None takes the packaged one. On an operator that is not ours there is none, and
    "model" learns from the search alone, as "bayesian" does.
    """
    if name not in STRATEGIES:
        raise UnknownStrategy(f"strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    return STRATEGIES[name](workload, device, space, seed, model)
