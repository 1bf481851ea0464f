"""What every cost model does, whichever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernelwright.cost_model import CostModel, RooflineModel, XGBoostModel, load_model, train
from kernelwright.errors import ModelMismatch, UnknownOperator
from kernelwright.types import DeviceSpec, Schedule, Trial, Workload

Make = Callable[..., Workload]


@pytest.fixture(params=["roofline", "untrained", "log", "residual", "rank", "pairwise"])
def model(request: pytest.FixtureRequest, recorded: list[Trial]) -> CostModel:
    if request.param == "roofline":
        return RooflineModel()
    if request.param == "untrained":
        return XGBoostModel()
    return train(recorded, objective=request.param, rounds=40, jobs=1)


def test_scores_are_shares(model: CostModel, make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]) -> None:
    for dims in ((4096, 4096, 4096), (1, 1, 1), (0, 5, 5), (7, 100_000, 3)):
        scores = model.predict(make_matmul(*dims), h100, candidates)
        assert scores.shape == (len(candidates),)
        assert ((scores > 0) & (scores <= 1)).all()
    assert model.predict(make_matmul(8, 8, 8), h100, []).shape == (0,)


def test_a_score_does_not_depend_on_the_others(
    model: CostModel, make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    workload = make_matmul(512, 512, 512)
    together = model.predict(workload, h100, candidates)
    assert model.predict(workload, h100, candidates[40:43]) == pytest.approx(together[40:43], rel=1e-5)


def test_the_first_choice_has_the_least_regret(
    model: CostModel, make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    for dims in ((4096, 4096, 4096), (1, 1, 1), (7, 100_000, 3)):
        workload = make_matmul(*dims)
        regret = model.expected_regret(workload, h100, candidates)
        scores = model.predict(workload, h100, candidates)
        assert ((regret >= 0) & (regret <= 1)).all()
        assert scores[np.argmin(regret)] == scores.max()
        assert regret.min() > 0, "no model is sure"
    assert model.expected_regret(make_matmul(8, 8, 8), h100, []).shape == (0,)


def test_updates_take_failures_and_nothing(
    model: CostModel, recorded: list[Trial], h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    failures = [t for t in recorded if not t.measurement.ok][:8]
    model.update([])
    model.update(failures)
    model.update(recorded[:20])
    assert np.isfinite(model.predict(recorded[0].workload, h100, candidates)).all()


def test_save_and_load_keep_every_score(
    model: CostModel, recorded: list[Trial], candidates: list[Schedule], tmp_path: Path
) -> None:
    model.update(recorded[:30])
    first = recorded[0]
    before = model.predict(first.workload, first.device, candidates)
    path = tmp_path / "model.json"
    model.save(path)
    loaded = load_model(path)
    assert type(loaded) is type(model)
    assert loaded.predict(first.workload, first.device, candidates) == pytest.approx(before, rel=1e-5)
    assert json.loads(path.read_text())["operator"] == "matmul"


def test_a_file_for_other_features_is_refused(model: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "feature_version": 0}))
    with pytest.raises(ModelMismatch, match="features of version 2, got 0"):
        load_model(path)


def test_a_file_of_another_kind_is_refused(model: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    other = XGBoostModel if isinstance(model, RooflineModel) else RooflineModel
    with pytest.raises(ModelMismatch, match="must hold a"):
        other.load(path)


def test_a_file_for_another_operator_is_refused(model: CostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    assert type(load_model(path, "matmul")) is type(model)
    with pytest.raises(ModelMismatch, match="must hold a model of conv2d, got matmul"):
        load_model(path, "conv2d")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernelwright_cost_model": 99}'])
def test_a_file_that_is_no_model_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelMismatch, match="must be a cost model file"):
        load_model(path)


def test_other_operators_are_refused(model: CostModel, h100: DeviceSpec) -> None:
    with pytest.raises((UnknownOperator, ModelMismatch)):
        model.predict(Workload("sort", {"N": 4}, {"x": "fp32"}), h100, [])
