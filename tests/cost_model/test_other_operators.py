"""Convolution and attention as products: sizes, bytes and columns of their models."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.cost_model import RooflineModel, XGBoostModel, attention_geometry, conv2d_geometry, packaged_model
from kernelwright.cost_model import geometry as geometry_module
from kernelwright.cost_model.attention_geometry import attention_problem, visible_share
from kernelwright.cost_model.conv2d_geometry import conv2d_problem
from kernelwright.cost_model.features import feature_names, features, geometry
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.types import Measurement, Schedule, Status, Toolchain, Trial, Workload

H100 = named_device("h100")
TOOLCHAIN = Toolchain("3.6.0", "2.11.0", "580", "ptxas 12.8", 1)


def conv2d(direction: str = "forward", **attributes: int | bool) -> Workload:
    given_ = {"pad_h": 1, "pad_w": 1, **attributes}
    return conv2d_workload((8, 64, 56, 56), 128, 3, direction=direction, attributes=given_)


def attention(queries: int, keys: int, **attributes: str | int | float) -> Workload:
    return attention_workload(2, 8, queries, keys, 128, kv_heads=2, **attributes)


TILES = [
    Schedule("forward", {"block_m": m, "block_n": n, "num_warps": 8, "num_stages": 2})
    for m in (64, 128)
    for n in (64, 128)
]
SQUARES = [Schedule("implicit_gemm", {**tile.knobs, "block_k": 64}) for tile in TILES]


@pytest.mark.parametrize(
    ("direction", "attributes", "shape"),
    [
        ("forward", {}, (8 * 56 * 56, 128, 9 * 64)),
        ("forward", {"stride_h": 2, "stride_w": 2}, (8 * 28 * 28, 128, 9 * 64)),
        ("forward", {"groups": 32}, (8 * 56 * 56, 4, 18)),
        ("forward", {"groups": 64}, (8 * 56 * 56, 128, 9)),
        ("input_gradient", {}, (8 * 56 * 56, 64, 9 * 128)),
        ("weight_gradient", {}, (128, 9 * 64, 8 * 56 * 56)),
        ("forward", {"transposed": True, "stride_h": 2, "stride_w": 2}, (8 * 111 * 111, 128, None)),
    ],
)
def test_a_convolution_is_the_product_it_is_computed_like(
    direction: str, attributes: dict[str, int | bool], shape: tuple[int, int, int | None]
) -> None:
    p = conv2d_problem(conv2d(direction, **attributes))
    assert (p.m, p.n) == shape[:2] and (shape[2] is None or p.k == shape[2])


def test_gradients_and_transposed_convolutions_do_the_work_of_the_taps_that_exist() -> None:
    forward, gradient = (conv2d_problem(conv2d(d, stride_h=2, stride_w=2)) for d in ("forward", "input_gradient"))
    assert forward.flops == gradient.flops
    up = conv2d_problem(conv2d(transposed=True, stride_h=2, stride_w=2))
    assert up.flops == 2 * 8 * 56 * 56 * 64 * 128 * 9


def test_memory_holds_a_pixel_once_however_many_taps_meet_it() -> None:
    p = conv2d_problem(conv2d())
    assert p.operand_bytes == 2 * (8 * 56 * 56 * 64 + 9 * 64 * 128)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([None, "top_left", "bottom_right"]), st.integers(0, 50))
def test_visible_pairs_are_counted(queries: int, keys: int, causal: str | None, window: int) -> None:
    attributes: dict[str, str | int] = {
        **({"causal": causal} if causal else {}),
        **({"window": window} if window else {}),
    }
    i = np.arange(queries)[:, None] + (keys - queries if causal == "bottom_right" else 0)
    j = np.arange(keys)[None, :]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= j <= i
    if window:
        seen &= j > i - window
    assert visible_share(attention(queries, keys, **attributes)) == pytest.approx(seen.mean())


def test_attention_counts_both_products_of_the_pairs_that_are_seen() -> None:
    full, causal = attention(4096, 4096), attention(4096, 4096, causal="bottom_right")
    assert attention_problem(full).flops == 2 * 2 * 8 * 4096 * 4096 * 256
    assert attention_problem(causal).flops == pytest.approx(attention_problem(full).flops / 2, rel=1e-3)
    backward = attention_problem(attention(4096, 4096, direction="backward"))
    assert backward.flops == 2.5 * attention_problem(full).flops


@pytest.mark.parametrize(("workload", "schedules"), [(conv2d(), SQUARES), (attention(2048, 2048), TILES)])
def test_every_column_is_finite_and_schedules_differ(workload: Workload, schedules: list[Schedule]) -> None:
    table = features(workload, H100, schedules)
    assert table.shape == (4, len(feature_names(workload.operator))) and np.isfinite(table).all()
    assert len(np.unique(table, axis=0)) == 4
    assert (geometry(workload, H100, schedules).waves >= 1).all()


@pytest.mark.parametrize(
    ("operator", "listed", "numbers", "categories"),
    [
        ("conv2d", conv2d_geometry.CONV2D_TEMPLATES, conv2d_geometry.NUMBERS, conv2d_geometry.CATEGORIES),
        (
            "attention",
            attention_geometry.ATTENTION_TEMPLATES,
            attention_geometry.NUMBERS,
            attention_geometry.CATEGORIES,
        ),
    ],
)
def test_every_template_and_knob_has_a_column(
    operator: str, listed: tuple[str, ...], numbers: tuple[str, ...], categories: dict[str, tuple[str, ...]]
) -> None:
    templates = get_operator(operator).templates
    assert set(templates) <= set(listed)
    known = {*numbers, *categories, *geometry_module._KNOB_DEFAULTS, "precision", "split_kv", "block_m1", "block_n1"}
    for workload in (
        conv2d(),
        conv2d(groups=64),
        conv2d("weight_gradient", groups=64),
        attention(512, 512),
        attention(1, 512),
    ):
        for schedule in get_operator(workload.operator).space(workload, H100).sample(random.Random(0), 40):
            assert set(schedule.knobs) <= known or workload.operator != operator, schedule
            words = {
                name: value for name, value in schedule.knobs.items() if isinstance(value, str) and name != "precision"
            }
            assert workload.operator != operator or all(value in categories[name] for name, value in words.items()), (
                words
            )


@pytest.mark.parametrize("workload", [attention(0, 5), attention(5, 0), conv2d("weight_gradient", groups=64)])
def test_empty_and_tiny_problems_have_features(workload: Workload) -> None:
    assert np.isfinite(features(workload, H100, TILES)).all()


def test_more_work_takes_longer_and_splitting_the_keys_pays_for_one_query() -> None:
    model = RooflineModel()
    short, long = (model.expected_us(attention(n, n), H100, TILES).min() for n in (1024, 4096))
    assert long > 4 * short
    splits = [Schedule("decode", {**TILES[0].knobs, "block_m": 16, "split_kv": split}) for split in (1, 16)]
    whole, split = model.expected_us(attention(1, 32768), H100, splits)
    assert split < whole


def test_a_model_without_training_learns_from_what_is_measured() -> None:
    model = packaged_model("attention")
    assert isinstance(model, XGBoostModel)
    workload = attention(2048, 2048)
    schedules = [
        Schedule("forward", {**TILES[0].knobs, "block_m": m, "num_warps": w}) for m in (32, 64, 128) for w in (4, 8)
    ]
    # small tiles win here, against what the analytic estimate expects
    times = {schedule: float(schedule.knobs["block_m"]) for schedule in schedules}
    before = model.predict(workload, H100, schedules)
    model.update([Trial(workload, H100, TOOLCHAIN, s, Measurement(Status.OK, t), "tune") for s, t in times.items()])
    after = model.predict(workload, H100, schedules)
    assert before[4:].max() > before[:2].max() and after[:2].min() > after[4:].max()
