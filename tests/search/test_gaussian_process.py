from __future__ import annotations

import numpy as np
import pytest

from kernelwright.search.gaussian_process import Kernel, Posterior
from kernelwright.search.surrogate import log_improvement


@pytest.fixture
def points() -> np.ndarray:
    return np.random.default_rng(0).random((60, 3))


def test_the_slope_of_the_loss_is_its_derivative(points: np.ndarray) -> None:
    kernel, values = Kernel(3), np.sin(5 * points[:, 0])
    squares = (points[:, None] - points[None]) ** 2
    logs = np.array([-0.5, 0.2, 0.4, -5.0])
    _, slope = kernel._loss(logs, squares, values)
    for place in range(4):
        step = np.eye(4)[place] * 1e-5
        up, down = (kernel._loss(logs + sign * step, squares, values)[0] for sign in (1, -1))
        assert slope[place] == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-4)


def test_fitting_finds_which_coordinate_matters(points: np.ndarray) -> None:
    kernel = Kernel(3)
    kernel.fit(points, np.sin(6 * points[:, 1]))
    assert kernel.lengths[1] < 0.5 * min(kernel.lengths[0], kernel.lengths[2])


def test_readings_one_by_one_give_the_textbook_posterior(points: np.ndarray) -> None:
    kernel, read, values = Kernel(3), [3, 17, 40, 5], np.array([1.0, -0.5, 0.3, 2.0])
    posterior = Posterior(kernel, points, 8)
    for place in read:
        posterior.add(place)
    mean, variance = posterior.mean(values)
    covariance = kernel.between(points[read], points[read]) + kernel.noise * np.eye(4)
    inverse, cross = np.linalg.inv(covariance), kernel.between(points[read], points)
    centre = inverse.sum(axis=0) @ values / inverse.sum()
    assert mean == pytest.approx(centre + (values - centre) @ inverse @ cross, abs=1e-4)
    assert variance == pytest.approx((values - centre) @ inverse @ (values - centre) / 4, rel=1e-4)
    assert posterior.unexplained() == pytest.approx(1 - (cross * (inverse @ cross)).sum(axis=0), abs=1e-4)


def test_readings_given_at_first_or_one_by_one_come_to_the_same(points: np.ndarray) -> None:
    kernel, values = Kernel(3), np.sin(7 * points[:30, 2])
    kernel.fit(points[:30], values)
    together, single = Posterior(kernel, points, 40, read=range(30)), Posterior(kernel, points, 40)
    for place in range(30):
        single.add(place)
    assert together.mean(values)[0] == pytest.approx(single.mean(values)[0], abs=1e-2)
    assert together.unexplained() == pytest.approx(single.unexplained(), abs=1e-2)


def test_pending_readings_change_certainty_only_and_can_be_taken_back(points: np.ndarray) -> None:
    posterior, values = Posterior(Kernel(3), points, 8), np.array([1.0, 2.0])
    posterior.add(0)
    posterior.add(1)
    mean, left = posterior.mean(values)[0], posterior.unexplained()
    posterior.add(30)
    assert posterior.unexplained()[30] < 0.01 < left[30]
    assert posterior.mean(values)[0] == pytest.approx(mean)
    posterior.forget(2)
    assert posterior.unexplained() == pytest.approx(left, abs=1e-6)


def test_expected_improvement_agrees_with_draws_and_reaches_far() -> None:
    draws = np.random.default_rng(0).normal(1.2, 0.5, 200_000)
    expected = np.maximum(1.0 - draws, 0).mean()
    value = log_improvement(1.0, np.array([1.2, 30.0, 60.0]), np.array([0.5, 1.0, 1.0]))
    assert np.exp(value[0]) == pytest.approx(expected, rel=0.02)
    assert value[0] > value[1] >= value[2] > -np.inf
