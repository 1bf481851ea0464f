"""Trees as a second opinion in the Bayesian search: what they choose, and what happens without them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernelwright.errors import MissingDependency
from kernelwright.kernels.space import Knob, KnobSpace, Space
from kernelwright.search import tree_surrogate
from kernelwright.search.bayesian_search import TREES_FROM, BayesianSearch
from kernelwright.search.tree_surrogate import TreeSurrogate
from kernelwright.types import Measurement, Schedule, Status

POINTS = np.stack([axis.ravel() for axis in np.meshgrid(np.linspace(0, 1, 20), np.linspace(0, 1, 20))], axis=1)


def edge(point: np.ndarray) -> float:
    """The logarithm of a time that jumps at the middle of the first axis."""
    return 0.0 if point[0] > 0.5 else 1.0


def surrogate(seed: int = 0) -> TreeSurrogate:
    return TreeSurrogate(POINTS, np.random.default_rng(seed), seed)


def test_the_fast_side_of_an_edge_is_chosen_and_nothing_that_is_closed() -> None:
    drawn = np.random.default_rng(1).choice(len(POINTS), 60, replace=False)
    times = {int(place): edge(POINTS[place]) for place in drawn}
    allowed = np.ones(len(POINTS), dtype=np.bool_)
    allowed[drawn] = False
    chosen = [surrogate(seed).fastest(times, allowed) for seed in range(5)]
    assert all(edge(POINTS[place]) == 0.0 and allowed[place] for place in chosen)
    assert chosen == [surrogate(seed).fastest(times, allowed) for seed in range(5)]


def test_places_like_failures_are_avoided() -> None:
    drawn = np.random.default_rng(2).choice(len(POINTS), 60, replace=False)
    times = {int(place): math.inf if POINTS[place][1] > 0.5 else 1.0 for place in drawn}
    assert POINTS[surrogate().fastest(times, np.ones(len(POINTS), dtype=np.bool_))][1] <= 0.5


def test_without_xgboost_the_process_decides_alone(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MissingDependency("xgboost is not installed")

    with_trees = proposals(space)
    monkeypatch.setattr(tree_surrogate, "import_xgboost", refuse)
    assert not surrogate().ready
    alone = proposals(space)
    assert with_trees[:TREES_FROM] == alone[:TREES_FROM] and with_trees != alone


def proposals(space: Space) -> list[Schedule]:
    search = BayesianSearch(space, 3)
    out = []
    for _ in range(TREES_FROM + 12):
        (schedule,) = search.propose(1)
        out.append(schedule)
        time_us = 10.0 + int(schedule.knobs["x"]) + 3.0 * (int(schedule.knobs["y"]) % 3)
        search.observe(schedule, Measurement(Status.OK, time_us))
    return out


@pytest.fixture
def space() -> Space:
    return KnobSpace("any", [Knob("x", tuple(range(1, 13))), Knob("y", tuple(range(1, 13)))], [])
