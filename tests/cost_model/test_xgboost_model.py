from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kernelwright.cost_model import RooflineModel, XGBoostModel, load_model, packaged_model, train, xgboost_model
from kernelwright.cost_model.evaluation import spearman
from kernelwright.cost_model.examples import FAILED_LOG_SHARE, KeptRows, examples
from kernelwright.cost_model.features import feature_names, features
from kernelwright.cost_model.model import shares, squash, workload_groups
from kernelwright.cost_model.packaged import KINDS
from kernelwright.cost_model.train import OBJECTIVES
from kernelwright.errors import MissingDependency, ModelMismatch, UsageError
from kernelwright.types import DeviceSpec, Measurement, Schedule, Status, Trial, Workload

Make = Callable[..., Workload]
Truth = Callable[[Workload, DeviceSpec, Schedule], float]
NEW_SHAPE = (3072, 2560, 5120)


@pytest.fixture(scope="module")
def trained(recorded: list[Trial]) -> XGBoostModel:
    return train(recorded, rounds=120, jobs=1)


@pytest.mark.parametrize("objective", ["residual", "log"])
def test_orders_an_unseen_shape_better_than_the_roofline(
    objective: str,
    recorded: list[Trial],
    make_matmul: Make,
    h100: DeviceSpec,
    candidates: list[Schedule],
    truth: Truth,
) -> None:
    workload = make_matmul(*NEW_SHAPE)
    speeds = np.array([1 / truth(workload, h100, s) for s in candidates])
    learned = train(recorded, objective=objective, rounds=120, jobs=1).predict(workload, h100, candidates)
    assert spearman(learned, speeds) > spearman(RooflineModel().predict(workload, h100, candidates), speeds)
    assert speeds[learned.argmax()] > 0.9 * speeds.max()


def test_the_same_trials_give_the_same_model(recorded: list[Trial], make_matmul: Make, h100: DeviceSpec) -> None:
    schedules = [t.schedule for t in recorded[:50]]
    one, two = (train(recorded, rounds=20, jobs=2).predict(make_matmul(512, 512, 512), h100, schedules) for _ in "ab")
    assert np.array_equal(one, two)


def test_updates_bend_the_order_towards_what_was_measured(
    trained: XGBoostModel, make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule], recorded: list[Trial]
) -> None:
    """A world where few stages are fastest, against all that the base learned."""
    workload = make_matmul(*NEW_SHAPE)
    speeds = np.array([1 / (50 + 40 * int(s.knobs["num_stages"])) for s in candidates])
    model = XGBoostModel("matmul", trained.trained)
    before = spearman(model.predict(workload, h100, candidates), speeds)
    picked = list(range(0, len(candidates), len(candidates) // 32))
    measured = [Measurement(Status.OK, 1 / float(speeds[place])) for place in picked]
    told = [
        dataclasses.replace(recorded[0], workload=workload, schedule=candidates[place], measurement=measurement)
        for place, measurement in zip(picked, measured, strict=True)
    ]
    for start in range(0, len(told), 4):
        model.update(told[start : start + 4])
    after = spearman(model.predict(workload, h100, candidates), speeds)
    assert after > before + 0.3


def test_an_untrained_model_is_the_analytic_one_until_it_is_told(
    make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    workload = make_matmul(*NEW_SHAPE)
    fresh = XGBoostModel().predict(workload, h100, candidates)
    assert fresh == pytest.approx(RooflineModel().predict(workload, h100, candidates), rel=1e-4)


def test_too_few_trials_change_nothing(
    trained: XGBoostModel, recorded: list[Trial], candidates: list[Schedule]
) -> None:
    model = XGBoostModel("matmul", trained.trained)
    first = recorded[0]
    before = model.predict(first.workload, first.device, candidates)
    model.update(recorded[:3])
    assert np.array_equal(before, model.predict(first.workload, first.device, candidates))
    model.update(recorded[3:12])
    assert not np.array_equal(before, model.predict(first.workload, first.device, candidates))


def test_schedules_that_fail_are_ranked_low(recorded: list[Trial], trained: XGBoostModel) -> None:
    """Tiles of 128 x 256 always fail with four warps in the recorded trials."""
    workload, device = recorded[0].workload, recorded[0].device
    failing = {t.schedule for t in recorded if t.schedule.knobs["num_warps"] == 4 and area(t.schedule) == 32768}
    scores = trained.predict(workload, device, sorted(failing, key=str))
    assert scores.max() < 0.2


def area(schedule: Schedule) -> int:
    return int(schedule.knobs["block_m"]) * int(schedule.knobs["block_n"])


def test_rows_that_are_kept_are_those_that_are_made(recorded: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptRows()
    some, all_of_them = examples(recorded[::3], "matmul", kept), examples(recorded, "matmul", kept)
    assert np.array_equal(some.rows, examples(recorded[::3], "matmul").rows)
    assert np.array_equal(all_of_them.rows, examples(recorded, "matmul").rows)
    monkeypatch.setattr("kernelwright.cost_model.examples.features", None)
    assert np.array_equal(examples(recorded, "matmul", kept).rows, all_of_them.rows)


def test_failures_and_vendor_calls_in_the_examples(recorded: list[Trial]) -> None:
    group = next(iter(workload_groups(recorded).values()))
    vendor = dataclasses.replace(
        group[0], schedule=Schedule("vendor", {"call": "torch.mm"}), measurement=Measurement(Status.OK, 1e-3)
    )
    with_vendor, without = examples([*group, vendor], "matmul"), examples(group, "matmul")
    assert np.array_equal(with_vendor.log_shares, without.log_shares)
    assert without.log_shares.max() == 0
    failed = np.array([not t.measurement.ok for t in group])
    assert (without.log_shares[failed] == FAILED_LOG_SHARE).all()


def test_groups_keep_toolchains_apart_and_the_last_good_trial(recorded: list[Trial]) -> None:
    first = next(t for t in recorded if t.measurement.ok)
    other = dataclasses.replace(first, toolchain=dataclasses.replace(first.toolchain, triton="3.7.1"))
    assert len(workload_groups([first, other])) == 2
    again = dataclasses.replace(first, measurement=Measurement(Status.OK, 7.0))
    failed = dataclasses.replace(first, measurement=Measurement(Status.CRASHED))
    (kept,) = next(iter(workload_groups([first, again, failed]).values()))
    assert kept is again


def test_shares_of_a_group(recorded: list[Trial]) -> None:
    outcomes = [Measurement(Status.OK, 10.0), Measurement(Status.OK, 40.0), Measurement(Status.TIMEOUT)]
    group = [dataclasses.replace(recorded[0], measurement=outcome) for outcome in outcomes]
    assert shares(group).tolist() == [1.0, 0.25, 0.0]
    assert shares(group[2:]).tolist() == [0.0]


def test_squash_keeps_the_order_and_low_shares() -> None:
    logs = np.linspace(-8, 3, 500)
    assert (np.diff(squash(logs)) > 0).all()
    assert (squash(logs) <= 1).all()
    assert squash(np.array([-3.0]))[0] == pytest.approx(0.125)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_metadata_tells_how_it_was_trained(objective: str, recorded: list[Trial], tmp_path: Path) -> None:
    train(recorded, objective=objective, rounds=5, jobs=1).save(tmp_path / "m.json")
    metadata = json.loads((tmp_path / "m.json").read_text())["metadata"]
    assert metadata["objective"] == objective
    assert metadata["groups"] == 8
    assert metadata["examples"] == len(recorded)
    assert metadata["failures"] == sum(not t.measurement.ok for t in recorded)
    assert metadata["devices"] == ["h100"]
    assert metadata["templates"] == sorted({t.schedule.template for t in recorded if t.measurement.ok})


def test_trees_that_cannot_be_read_are_refused(trained: XGBoostModel, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    trained.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "corrections": ["AAAA"]}))
    with pytest.raises(ModelMismatch, match="train it again"):
        load_model(path)


def test_trees_over_other_columns_are_refused(
    trained: XGBoostModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new template brings a column: what was trained before must not be read as if it had it."""
    path = tmp_path / "m.json"
    trained.save(path)
    names = (*feature_names("matmul"), "template_of_tomorrow")
    monkeypatch.setattr("kernelwright.cost_model.xgboost_model.feature_names", lambda operator: names)
    with pytest.raises(ModelMismatch, match=f"over {len(names)} columns.*train it again"):
        load_model(path)


def test_training_says_what_it_lacks(recorded: list[Trial]) -> None:
    with pytest.raises(UsageError, match="objective must be one of log, residual"):
        train(recorded, objective="best")
    with pytest.raises(UsageError, match="at least one matmul trial that is ok"):
        train([t for t in recorded if not t.measurement.ok])
    with pytest.raises(ModelMismatch, match="ranks conv2d, got a matmul workload"):
        XGBoostModel("conv2d").update(recorded[:1])


def test_without_xgboost_the_roofline_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(MissingDependency, match=r"kernelwright\[model\]"):
        XGBoostModel()
    assert isinstance(packaged_model("matmul"), RooflineModel)


def test_the_packaged_model_can_be_read(make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]) -> None:
    model = packaged_model("matmul")
    assert isinstance(model, tuple(KINDS.values()))
    assert model.predict(make_matmul(64, 64, 64), h100, candidates).shape == (len(candidates),)
    assert isinstance(packaged_model("an operator without a model"), RooflineModel)


def test_what_was_asked_about_last_is_not_worked_out_again(
    trained: XGBoostModel,
    make_matmul: Make,
    h100: DeviceSpec,
    candidates: list[Schedule],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, workload, other = copy.deepcopy(trained), make_matmul(512, 1024, 4096), make_matmul(512, 1024, 2048)
    made: list[int] = []

    def counted(workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> npt.NDArray[np.float32]:
        made.append(len(schedules))
        return features(workload, device, schedules)

    monkeypatch.setattr(xgboost_model, "features", counted)
    fresh = copy.deepcopy(trained)
    first = model.predict(workload, h100, candidates)
    assert np.array_equal(model.predict(workload, h100, list(candidates)), first) and len(made) == 1
    assert np.array_equal(model.predict(workload, h100, candidates[::-1]), first[::-1]) and len(made) == 2
    elsewhere = model.predict(other, h100, candidates)
    assert len(made) == 3 and np.array_equal(elsewhere, fresh.predict(other, h100, candidates))
    changed = list(candidates)
    model.predict(workload, h100, changed)
    changed[0], changed[1] = changed[1], changed[0]
    assert model.predict(workload, h100, changed)[0] == first[1]
    assert pickle.loads(pickle.dumps(model)).predict(workload, h100, candidates) == pytest.approx(first)
    model.log_shares(workload, h100, candidates)[0][:] = 0.0
    assert np.array_equal(model.predict(workload, h100, candidates), first), "what is given away may be changed"
