"""Features mean the same on every GPU: nothing is read that only the one trained on has."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernelwright.cost_model import packaged_model
from kernelwright.cost_model.features import feature_names, features
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import NAMED_DEVICES, named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import FrozenMap

WORKLOADS = (matmul_workload(2048, 4096, 1024), matmul_workload(8, 1024, 8192), matmul_workload(333, 999, 77, "fp32"))


@pytest.mark.parametrize("hardware", NAMED_DEVICES)
def test_every_named_gpu_has_features_and_predictions(hardware: str) -> None:
    device = named_device(hardware)
    model = packaged_model("matmul")
    for workload in WORKLOADS:
        schedules = list(get_operator("matmul").space(workload, device))[::40]
        rows = features(workload, device, schedules)
        assert rows.shape == (len(schedules), len(feature_names("matmul"))) and np.isfinite(rows).all()
        scores = model.predict(workload, device, schedules)
        regret = model.expected_regret(workload, device, schedules)
        assert ((scores > 0) & (scores <= 1)).all() and ((regret >= 0) & (regret <= 1)).all()


def test_a_gpu_is_what_it_can_do_not_what_it_is_called() -> None:
    device = named_device("h100")
    other = dataclasses.replace(device, slug="x", name="X", source="", memory_bytes=1)
    schedules = list(get_operator("matmul").space(WORKLOADS[0], device))[::20]
    assert (features(WORKLOADS[0], device, schedules) == features(WORKLOADS[0], other, schedules)).all()


def test_a_gpu_without_rates_or_of_an_unknown_make_has_features() -> None:
    device = dataclasses.replace(named_device("h100"), vendor="new", architecture="new1", peak_tflops=FrozenMap())
    schedules = list(get_operator("matmul").space(WORKLOADS[0], named_device("h100")))[::20]
    assert np.isfinite(features(WORKLOADS[0], device, schedules)).all()


def test_predictions_follow_the_gpu() -> None:
    """On half the multiprocessors other schedules come first, although the trees saw a single GPU."""
    device = named_device("h100")
    half = dataclasses.replace(device, multiprocessors=device.multiprocessors // 2)
    schedules = list(get_operator("matmul").space(WORKLOADS[0], device))[::5]
    model = packaged_model("matmul")
    one, other = (model.predict(WORKLOADS[0], gpu, schedules) for gpu in (device, half))
    assert np.argsort(-one)[:20].tolist() != np.argsort(-other)[:20].tolist()
    assert np.corrcoef(one, other)[0, 1] > 0.5
