from __future__ import annotations

import math
import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kernelwright.search.quality_plot import plot
from kernelwright.search.replay_cases import find_spaces, load_cases
from kernelwright.search.replay_evaluation import Case, expected_random, make_row, random_row, replay, replays, score
from kernelwright.search.strategy import Strategy, make_strategy
from kernelwright.types import Measurement, Schedule
from tests.search.fakes import DEVICE, WORKLOAD, HalfRightModel, failure, fake_space, true_us, works

PUBLIC = Path(__file__).resolve().parents[2] / "benchmarks" / "replay"


@pytest.fixture
def case() -> Case:
    space = fake_space()
    members = list(space)
    found: dict[Schedule, Measurement] = {s: failure() if n % 5 == 0 else works(s) for n, s in enumerate(members)}

    def make(name: str, seed: int) -> Strategy:
        return make_strategy(name, WORKLOAD, DEVICE, space, seed, HalfRightModel())

    return Case(space, found, make, {schedule: 2.0 for schedule in members})


def test_quality_counts_failures_and_never_falls(case: Case) -> None:
    run = replay(case, "exhaustive", 0, limit=150)
    members = list(case.space)
    assert run.quality[0] == 0.0
    best = min(true_us(s) for n, s in enumerate(members[:20]) if n % 5)
    assert run.quality[19] == pytest.approx(case.optimum_us() / best)
    assert (np.diff(run.quality) >= 0).all()
    assert len(run.quality) == 150 and run.quality[-1] == 1.0
    assert run.seconds is not None and run.seconds[9] == 20.0 and run.seconds[-1] == 2.0 * len(members)


def test_equal_seeds_replay_alike_and_nothing_is_kept_between_them(case: Case) -> None:
    first = [replay(case, "bayesian", seed, limit=40).quality.tolist() for seed in (0, 1)]
    assert [replay(case, "bayesian", seed, limit=40).quality.tolist() for seed in (1, 0)] == first[::-1]


def test_the_expectation_of_random_search_is_that_of_many_draws(case: Case) -> None:
    exact = expected_random(case, 60)
    best = case.optimum_us()
    shares = [0.0 if m.median_us is None else best / m.median_us for m in case.measurements.values()]
    rng = random.Random(0)
    drawn = np.mean([np.maximum.accumulate(rng.sample(shares, 60)) for _ in range(4000)], axis=0)
    assert exact == pytest.approx(drawn, abs=0.015)
    assert expected_random(case, 110)[-1] == pytest.approx(1.0)


def test_the_score_is_0_for_random_and_1_for_the_optimum_at_once(case: Case) -> None:
    exact = expected_random(case, 60)
    assert score(exact, exact) == 0.0
    assert score(np.ones(60), exact) == pytest.approx(1.0)


def test_bayesian_search_beats_the_others_on_a_smooth_valley(case: Case) -> None:
    _, exact = random_row("s", [case], 60)
    rows = {
        name: make_row("s", name, list(replays([case], name, 4, 60)), exact)
        for name in ("bayesian", "evolutionary", "random")
    }
    scores = {name: row["fscore_10_60"] for name, row in rows.items()}
    assert scores["bayesian"] > max(0.6, scores["random"] + 0.3)
    assert scores["evolutionary"] > scores["random"]
    low, high = rows["bayesian"]["intervals"]["q32"]
    assert low <= rows["bayesian"]["q32"] <= high


def test_the_plot_has_a_panel_for_measurements_and_one_for_seconds(case: Case) -> None:
    row, exact = random_row("a<b", [case], 30)
    rows = [row, make_row("a<b", "random", list(replays([case], "random", 2, 30)), exact)]
    drawing = ElementTree.fromstring(plot(rows))
    texts = [node.text for node in drawing.iter() if node.text]
    assert texts.count("a<b") == 2
    assert "seconds (log)" in texts and "measurements (log)" in texts


def test_public_data_is_found_and_searched_without_a_trained_model() -> None:
    spaces = find_spaces(PUBLIC)
    assert len(spaces) == 7
    case = load_cases(spaces["pnpoly_kt__RTX_3090"])[0]
    assert len(case.space) == 4092
    guided = replay(case, "model", 0, limit=64)
    assert guided.quality.tolist() == replay(case, "bayesian", 0, limit=64).quality.tolist()
    assert guided.quality[-1] > expected_random(case, 64)[-1]
    assert guided.seconds is None or not math.isnan(guided.seconds[-1])
