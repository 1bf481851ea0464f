"""Expected regret: monotone, kept in the file, and right on average on workloads that no fit saw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernelwright.cost_model import XGBoostModel, packaged_model
from kernelwright.cost_model.calibration import (
    FARTHEST,
    UNCALIBRATED,
    Calibration,
    disagreement,
    least_squares,
    nearest,
    regret_of_all,
)
from kernelwright.cost_model.calibration_fit import calibrate
from kernelwright.cost_model.evaluation import Plan
from kernelwright.cost_model.train import train
from kernelwright.search.recorded import load_recorded, recorded_path
from kernelwright.types import Schedule, Trial, Workload

Make = Callable[..., Workload]


@pytest.fixture(scope="module")
def calibration(recorded: list[Trial]) -> Calibration:
    return Calibration(0.01, 0.02, 0.5, (recorded[0].workload,), (recorded[0].device.key,))


def test_regret_grows_with_distance_and_disagreement(
    calibration: Calibration, recorded: list[Trial], make_matmul: Make
) -> None:
    known, device = recorded[0].workload, recorded[0].device
    agreed = np.array([0.0, -0.05, -1.0])
    near = calibration.regret(known, device, agreed, agreed)
    far = calibration.regret(make_matmul(1, 31, 77), device, agreed, agreed)
    torn = calibration.regret(known, device, agreed, np.array([0.0, -0.9, -1.0]))
    assert near[0] == pytest.approx(0.01 + 0.5 * 0.025)
    assert far[0] > near[0] and torn[0] > near[0]
    assert (np.diff(near) > 0).all(), "a schedule that is expected to be slower loses more"
    assert near[2] > 0.5


def test_an_unknown_gpu_counts_as_far_from_everything(calibration: Calibration, recorded: list[Trial]) -> None:
    known, device = recorded[0].workload, recorded[0].device
    other = dataclasses.replace(device, multiprocessors=device.multiprocessors + 4)
    one = np.zeros(1)
    assert calibration.regret(known, other, one, one)[0] == pytest.approx(0.01 + 0.02 * FARTHEST)


def test_regret_stays_a_share(recorded: list[Trial]) -> None:
    wild = Calibration(5.0, 1.0, 1.0, (), ())
    regret = wild.regret(recorded[0].workload, recorded[0].device, np.array([9.0, -40.0]), np.zeros(2))
    assert regret.tolist() == [1.0, 1.0]
    assert nearest(recorded[0].workload, ()) == FARTHEST


def test_disagreement_looks_at_the_best_only() -> None:
    assert disagreement(np.array([0.0, -0.1, -3.0]), np.array([1.0, 1.0, 50.0])) == 0
    assert disagreement(np.array([0.0, -0.1]), np.array([1.0, 3.0])) == 1


def test_least_squares_never_weighs_below_nothing() -> None:
    terms = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(terms, np.array([1.0, 3.0, 5.0, 7.0])) == pytest.approx([1, 2])
    assert least_squares(terms, np.array([7.0, 5.0, 3.0, 1.0])) == pytest.approx([4, 0])
    assert least_squares(terms, -np.ones(4)) == pytest.approx([0, 0])


def test_the_file_keeps_it(
    calibration: Calibration, recorded: list[Trial], candidates: list[Schedule], tmp_path: Path
) -> None:
    model = train(recorded[::4], rounds=10, jobs=1)
    first = recorded[0]
    log_shares, _ = model.log_shares(first.workload, first.device, candidates)
    before = model.expected_regret(first.workload, first.device, candidates)
    assert before == pytest.approx(regret_of_all(UNCALIBRATED, log_shares))
    model.calibration = calibration
    model.save(tmp_path / "m.json")
    loaded = XGBoostModel.load(tmp_path / "m.json")
    assert loaded.calibration == calibration
    after = loaded.expected_regret(first.workload, first.device, candidates)
    assert after == pytest.approx(model.expected_regret(first.workload, first.device, candidates), rel=1e-5)


@pytest.fixture(scope="module")
def h100_sweep() -> list[Trial]:
    """The trials of sweeps alone: a search tries mostly what it expects to be fast, which says little of the rest."""
    trials = load_recorded(recorded_path("h100"))
    return [trial for trial in trials if trial.origin.startswith("record")]


def test_calibration_holds_on_workloads_that_no_fit_saw(h100_sweep: list[Trial]) -> None:
    """On the recorded H100, with small forests: bins of a fifth of the workloads, and all schedules by expected gap."""
    calibration, report = calibrate(h100_sweep, "residual", Plan(rounds=50, folds=4, jobs=1))
    assert min(calibration.base, calibration.distance, calibration.disagreement) >= 0
    assert calibration.distance > 0 or calibration.disagreement > 0
    assert set(calibration.workloads) == {t.workload for t in h100_sweep}
    bins = report["first_choice"]
    assert sum(b["count"] for b in bins) == report["workloads"] == len(calibration.workloads)
    mean = {name: np.average([b[name] for b in bins], weights=[b["count"] for b in bins]) for name in bins[0]}
    assert abs(mean["expected"] - mean["realised"]) < 0.02
    assert report["error"] < 0.04
    assert bins[0]["realised"] < bins[-1]["realised"]
    assert all(abs(b["predicted"] - b["measured"]) < 0.07 for b in report["bins"] if b["count"] > 100)
    assert sum(map(sum, report["cells"])) == sum(b["count"] for b in report["bins"]) == report["trials"]


def test_the_packaged_model_is_calibrated(h100_sweep: list[Trial]) -> None:
    model = packaged_model("matmul")
    assert isinstance(model, XGBoostModel) and model.calibration is not None
    assert h100_sweep[0].device.key in model.calibration.devices
    assert model.metadata["calibration"]["error"] < 0.04
