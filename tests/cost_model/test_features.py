from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelwright.cost_model import XGBoostModel, packaged_model
from kernelwright.cost_model.features import FEATURE_VERSION, feature_names, features, geometry
from kernelwright.errors import UnknownOperator
from kernelwright.types import DeviceSpec, Schedule, Workload, digest

Make = Callable[..., Workload]
TILE = Schedule("pointer", {"block_m": 128, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3})
MI300 = DeviceSpec(
    "mi300x", "", "amd", "gfx942", 304, 65536, 4 << 20, 192 << 30, 5300.0, {"fp16": 1307.0}, warp_size=64
)

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def column(name: str, workload: Workload, device: DeviceSpec, schedule: Schedule) -> float:
    return float(features(workload, device, [schedule])[0, feature_names("matmul").index(name)])


@pytest.mark.parametrize(
    ("operator", "columns"),
    [("matmul", "c68dcb90bf456191d930"), ("attention", "918e89e6ca49c8d9226a"), ("conv2d", "ba18927f003365ab8695")],
)
def test_columns_belong_to_the_packaged_models(operator: str, columns: str) -> None:
    """When this fails because a column changed: train that packaged model again (for a changed meaning of a column that
    all operators have, raise FEATURE_VERSION)."""
    assert (FEATURE_VERSION, digest(list(feature_names(operator)))) == (2, columns)
    assert isinstance(packaged_model(operator), XGBoostModel)


def test_one_row_a_schedule_and_one_column_a_name(
    make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    table = features(make_matmul(512, 512, 512), h100, candidates)
    assert table.shape == (len(candidates), len(feature_names("matmul")))
    assert table.dtype == np.float32
    assert features(make_matmul(512, 512, 512), h100, []).shape == (0, len(feature_names("matmul")))


def test_rows_do_not_depend_on_each_other(make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]) -> None:
    workload = make_matmul(300, 700, 900)
    together = features(workload, h100, candidates)
    assert np.array_equal(together[17], features(workload, h100, [candidates[17]])[0])


def test_schedules_that_differ_have_rows_that_differ(
    make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]
) -> None:
    table = features(make_matmul(4096, 4096, 4096), h100, candidates)
    assert len(np.unique(table, axis=0)) == len(candidates)


@quick
@given(
    dims=st.tuples(*[st.sampled_from([0, 1, 2, 15, 16, 1000, 4096, 131072, 2**31])] * 3),
    dtype=st.sampled_from(["fp32", "fp16", "bf16", "fp8e4m3", "int8"]),
    layout=st.sampled_from(["row", "col", "row:2147483649", "col:2147483649"]),
    epilogue=st.sampled_from([(), ("bias",), ("bias", "gelu")]),
)
def test_always_finite(
    make_matmul: Make,
    h100: DeviceSpec,
    candidates: list[Schedule],
    dims: tuple[int, int, int],
    dtype: str,
    layout: str,
    epilogue: tuple[str, ...],
) -> None:
    dtypes, layouts = dict.fromkeys(["a", "b", "out"], dtype), dict.fromkeys(["a", "b", "out"], layout)
    workload = make_matmul(*dims, dtypes=dtypes, layouts=layouts, epilogue=epilogue)
    for device in (h100, MI300):
        assert np.isfinite(features(workload, device, candidates[::9])).all()


def test_a_missing_knob_is_the_neutral_one(make_matmul: Make, h100: DeviceSpec) -> None:
    workload = make_matmul(512, 512, 4096)
    spelled = Schedule("pointer", {**TILE.knobs, "split_k": 1, "group_m": 1, "precision": "bf16", "repack": 0})
    assert np.array_equal(features(workload, h100, [TILE]), features(workload, h100, [spelled]))


def test_buffers_count_as_stages(make_matmul: Make, h100: DeviceSpec) -> None:
    ring = Schedule("warp_specialized", {"block_m": 128, "block_n": 256, "block_k": 64, "num_buffers": 5})
    assert column("stages", make_matmul(512, 512, 4096), h100, ring) == 5


def test_tiles_that_are_shared_out_take_no_whole_rounds(make_matmul: Make, h100: DeviceSpec) -> None:
    workload = make_matmul(2048, 1280 * 3, 8192)
    tile = {"block_m": 128, "block_n": 256, "block_k": 64}
    schedules = [Schedule("stream_k_warp_specialized", {**tile, "stream_waves": waves}) for waves in (0, 1)]
    rounds = geometry(workload, h100, [*schedules, Schedule("stream_k", tile)]).rounds
    assert rounds == pytest.approx([2, 240 / 132, 240 / 132])


def test_units(make_matmul: Make, h100: DeviceSpec) -> None:
    g = geometry(make_matmul(1024, 512, 256), h100, [TILE])
    assert g.problem.flops == 2 * 1024 * 512 * 256
    assert g.problem.operand_bytes == 2 * (1024 * 256 + 256 * 512)
    assert g.problem.result_bytes == 2 * 1024 * 512
    assert g.programs[0] == (1024 / 128) * (512 / 64)
    assert g.k_iterations[0] == 256 / 32
    assert g.shared_bytes[0] == 3 * 32 * (128 + 64) * 2
    assert g.l2_bytes[0] == 64 * 8 * (128 + 64) * 32 * 2
    assert g.intensity[0] == 2 * 128 * 64 / ((128 + 64) * 2)
    assert g.accumulator[0] == 128 * 64 / 128


def test_a_split_makes_programs_and_partial_results(make_matmul: Make, h100: DeviceSpec) -> None:
    workload = make_matmul(128, 64, 4096)
    whole, split = (geometry(workload, h100, [Schedule("pointer", {**TILE.knobs, "split_k": s})]) for s in (1, 4))
    assert (whole.programs[0], split.programs[0]) == (1, 4)
    assert (whole.split_bytes[0], split.split_bytes[0]) == (0, 4 * 2 * 4 * 128 * 64)
    assert split.k_iterations[0] == whole.k_iterations[0] / 4


def test_padding_is_told(make_matmul: Make, h100: DeviceSpec) -> None:
    assert column("useful", make_matmul(128, 64, 32), h100, TILE) == 1
    assert column("useful", make_matmul(64, 64, 32), h100, TILE) == 0.5
    assert column("useful_m", make_matmul(129, 64, 32), h100, TILE) == pytest.approx(129 / 256)


def test_alignment_comes_from_the_leading_strides(make_matmul: Make, h100: DeviceSpec) -> None:
    layouts = {"a": "row", "b": "col:4096", "out": "row"}
    workload = make_matmul(1000, 1001, 1004, layouts=layouts)
    assert column("a_alignment", workload, h100, TILE) == 8
    assert column("b_alignment", workload, h100, TILE) == 16
    assert column("out_alignment", workload, h100, TILE) == 2


def test_waves_use_the_devices_multiprocessors(make_matmul: Make, h100: DeviceSpec) -> None:
    workload = make_matmul(128 * 133, 64, 4096)
    wide = Schedule("persistent_tma", {**TILE.knobs, "subtile": 1})
    assert geometry(workload, h100, [wide]).waves[0] == 2
    assert geometry(workload, dataclasses.replace(h100, multiprocessors=133), [wide]).waves[0] == 1


def test_grouping_saves_memory_traffic_when_operands_exceed_l2(make_matmul: Make, h100: DeviceSpec) -> None:
    workload = make_matmul(16384, 16384, 4096)
    flat, grouped = (Schedule("pointer", {**TILE.knobs, "group_m": size}) for size in (1, 8))
    g = geometry(workload, h100, [flat, grouped])
    assert g.memory_bytes[1] < g.memory_bytes[0]
    assert (g.memory_bytes >= g.problem.operand_bytes + g.problem.result_bytes).all()


def test_an_operator_without_features_is_named(h100: DeviceSpec) -> None:
    with pytest.raises(UnknownOperator, match=r"matmul.*'sort'"):
        features(Workload("sort", {"N": 4}, {"x": "fp32"}), h100, [])
    with pytest.raises(UnknownOperator):
        feature_names("sort")
