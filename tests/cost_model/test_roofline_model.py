from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelwright.cost_model import RooflineModel
from kernelwright.cost_model.features import geometry
from kernelwright.cost_model.roofline_estimate import estimate
from kernelwright.types import DeviceSpec, Schedule, Workload

Make = Callable[..., Workload]
TMA = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 3, "group_m": 8, "repack": 0}
POINTER = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3, "group_m": 8, "split_k": 1}
SKINNY = {"block_m": 16, "block_n": 128, "block_k": 128, "num_warps": 4, "num_stages": 4, "split_k": 1}

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def expected(workload: Workload, device: DeviceSpec, template: str, knobs: dict[str, int]) -> float:
    return float(RooflineModel().expected_us(workload, device, [Schedule(template, knobs)])[0])


@quick
@given(m=st.integers(0, 20000), more=st.integers(0, 20000), place=st.integers(0, 10_000))
def test_more_rows_never_take_less_time(
    make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule], m: int, more: int, place: int
) -> None:
    schedule = candidates[place % len(candidates)]
    small, large = (
        RooflineModel().expected_us(make_matmul(rows, 4096, 1024), h100, [schedule]) for rows in (m, m + more)
    )
    waves = [geometry(make_matmul(rows, 4096, 1024), h100, [schedule]).waves[0] for rows in (m, m + more)]
    assert waves[0] <= waves[1]
    assert small[0] <= large[0] * (1 + 1e-9)


def test_never_under_the_datasheets_time(make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]) -> None:
    for dims in ((4096, 4096, 4096), (16, 4096, 14336), (1000, 1000, 1000), (1, 1, 1)):
        parts = estimate(geometry(make_matmul(*dims), h100, candidates))
        assert (parts.total >= parts.ideal).all()


@pytest.mark.parametrize(
    ("template", "knobs", "dims", "seen_us"),
    [
        ("persistent_tma", TMA, (4096, 4096, 4096), 180),
        ("persistent_tma", TMA, (8192, 8192, 8192), 1404),
        ("persistent_tma", TMA, (2048, 28672, 4096), 639),
        ("pointer", POINTER, (4096, 4096, 4096), 223),
        ("pointer", POINTER, (1024, 50257, 768), 174),
        ("skinny", SKINNY, (16, 4096, 4096), 17.2),
        ("skinny", SKINNY, (16, 4096, 14336), 50.3),
        ("skinny", SKINNY, (16, 28672, 4096), 88.6),
    ],
)
def test_near_times_seen_on_an_h100(
    make_matmul: Make,
    h100: DeviceSpec,
    template: str,
    knobs: dict[str, int],
    dims: tuple[int, int, int],
    seen_us: float,
) -> None:
    assert expected(make_matmul(*dims), h100, template, knobs) == pytest.approx(seen_us, rel=0.25)


def test_a_split_costs_unless_it_fills_the_device(make_matmul: Make, h100: DeviceSpec) -> None:
    split = {**POINTER, "split_k": 4}
    full, empty = make_matmul(8192, 8192, 1024), make_matmul(128, 128, 65536)
    assert expected(full, h100, "pointer", split) > expected(full, h100, "pointer", POINTER)
    assert expected(empty, h100, "pointer", split) < expected(empty, h100, "pointer", POINTER)


def test_what_makes_a_schedule_slower(make_matmul: Make, h100: DeviceSpec) -> None:
    aligned, unaligned = make_matmul(4096, 4096, 4096), make_matmul(4096, 4096, 4095)
    spilling = {**POINTER, "block_n": 256, "num_warps": 4}
    assert expected(unaligned, h100, "pointer", POINTER) > expected(aligned, h100, "pointer", POINTER)
    assert expected(aligned, h100, "pointer", spilling) > 2 * expected(aligned, h100, "pointer", POINTER)
    repacked = expected(unaligned, h100, "persistent_tma", {**TMA, "repack": 1})
    assert repacked > expected(unaligned, h100, "persistent_tma", TMA)


def test_a_smaller_device_takes_longer(make_matmul: Make, h100: DeviceSpec) -> None:
    half = dataclasses.replace(h100, multiprocessors=66, peak_tflops={"bf16": 494.0})
    workload = make_matmul(4096, 4096, 4096)
    assert expected(workload, half, "persistent_tma", TMA) > 1.8 * expected(workload, h100, "persistent_tma", TMA)


def test_scores_follow_expected_times(make_matmul: Make, h100: DeviceSpec, candidates: list[Schedule]) -> None:
    workload = make_matmul(2048, 4096, 4096)
    scores = RooflineModel().predict(workload, h100, candidates)
    times = RooflineModel().expected_us(workload, h100, candidates)
    assert np.array_equal(np.argsort(-scores, kind="stable"), np.argsort(times, kind="stable"))
    assert scores.max() > 0.8
