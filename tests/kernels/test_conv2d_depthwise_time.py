"""What a tile schedule of a depthwise convolution is expected to take, and which schedules that leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kernelwright.kernels.conv2d import depthwise_tile
from kernelwright.kernels.conv2d.depthwise_tile import DEPTHWISE_TILE
from kernelwright.kernels.conv2d.depthwise_time import CLOCKS_US, Tile, expected_clocks, instructions, met
from kernelwright.kernels.conv2d.taps_kernel import column_count
from kernelwright.kernels.conv2d.workload import Problem, conv2d_workload, problem_of
from kernelwright.kernels.device import named_device

H100 = named_device("h100")
NAMES = tuple(field.name for field in dataclasses.fields(Tile))
WIDE = Tile(4, 7, 1, 64, 1, 1)


def problem(taps: int = 7, **given: Any) -> Problem:
    image = given.pop("image", (32, 128, 56, 56))
    given = {"padding": taps // 2, **given}
    return problem_of(conv2d_workload(image, image[1], taps, groups=image[1], **given))


@pytest.mark.parametrize("given", [{}, {"stride": 2}, {"taps": 3, "dilation": 2}, {"taps": 5, "stride": 3}])
def test_lines_and_columns_are_those_of_the_kernel(given: dict[str, Any]) -> None:
    p = problem(**given)
    counted = tuple(
        column_count(tile, taps, step, pad, apart, False)
        for tile, taps, step, pad, apart in zip((2, 7), (p.r, p.s), p.stride, p.padding, p.dilation, strict=True)
    )
    assert met(p, 2, 7) == counted
    # the gradient of the input: pixels of every class meet as many, but for one at the edge
    turned = problem(**given, direction="input_gradient")
    for axis, size in enumerate((2 * p.stride[0], 7 * p.stride[1])):
        taps, step, pad, apart = (p.r, p.s)[axis], p.stride[axis], p.padding[axis], p.dilation[axis]
        lines = column_count(size, taps, step, pad, apart, True)
        assert 0 <= lines - met(turned, 2 * p.stride[0], 7 * p.stride[1])[axis] <= (step > 1)


def test_products_with_padding_are_left_out_where_a_tile_covers_the_image() -> None:
    small, large = problem(image=(32, 1024, 7, 7)), problem(image=(32, 1024, 14, 14))
    whole = Tile(7, 7, 1, 32, 1, 1)
    assert instructions(small, whole)[0] < 0.7 * instructions(large, whole)[0]
    # two tiles, one below the other, do not know which of them lies at the edge
    assert instructions(small, dataclasses.replace(whole, block_v=2, block_c=16))[0] > instructions(small, whole)[0]


def test_no_schedule_is_expected_to_beat_the_memory_or_the_multipliers() -> None:
    p = problem()
    images = 2 * 2 * 32 * 128 * 56 * 56
    products = 32 * 128 * 56 * 56 * 49
    floor = max(images / (H100.bandwidth_gbs * 1e3), products / (132 * 128 * CLOCKS_US))
    assert expected_clocks(p, H100, WIDE) > floor * CLOCKS_US


def test_parts_of_a_sum_cost_what_they_write() -> None:
    p = problem(direction="weight_gradient")
    few, many = (expected_clocks(p, H100, Tile(2, 7, 4, 32, parts, 4)) for parts in (64, 512))
    assert few < many


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize(("image", "taps", "stride"), [((32, 1024, 7, 7), 7, 1), ((32, 144, 56, 56), 5, 2)])
def test_only_schedules_near_the_best_are_offered(
    monkeypatch: pytest.MonkeyPatch, direction: str, image: tuple[int, ...], taps: int, stride: int
) -> None:
    given: dict[str, Any] = {"padding": taps // 2, "stride": stride, "groups": image[1], "direction": direction}
    workload = conv2d_workload(image, image[1], taps, **given)
    offered = set(DEPTHWISE_TILE.space(workload, H100))
    monkeypatch.setattr(depthwise_tile, "SLOWEST", 1e9)
    other = conv2d_workload(image, image[1], taps, "fp16", **given)
    every = {tuple(s.knobs[n] for n in NAMES) for s in DEPTHWISE_TILE.space(other, H100)}
    times = {knobs: expected_clocks(problem_of(workload), H100, Tile(*knobs)) for knobs in every}
    kept = {knobs for knobs, time in times.items() if time <= 1.25 * min(times.values())}
    assert {tuple(s.knobs[n] for n in NAMES) for s in offered} == kept
    assert 5 <= len(kept) < len(every)
