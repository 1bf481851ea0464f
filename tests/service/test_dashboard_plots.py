"""Figures and drawings behind the pages."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.service.dashboard.charts import (
    calibration_chart,
    convergence_chart,
    pareto_chart,
    roofline_chart,
)
from kernelwright.service.dashboard.figures import Tried, by_status, convergence, of_search, pareto_front
from kernelwright.service.dashboard.plots import Axis, Dots, Line, Plot, short
from kernelwright.types import DeviceSpec, Schedule, Trial

figures = st.floats(1e-9, 1e9)


@given(st.lists(st.tuples(figures, figures), min_size=1, max_size=40))
def test_nothing_beats_the_pareto_front(points: list[tuple[float, float]]) -> None:
    made = [Tried(Schedule("t"), time, error) for time, error in points]
    front = pareto_front(made)
    for point in made:
        beaten = any(one.time_us <= point.time_us and one.error <= point.error for one in front)
        assert beaten
    for one in front:
        assert not any(p.time_us < one.time_us and p.error < one.error for p in made)


@given(st.lists(figures, min_size=1, max_size=30), st.booleans())
def test_ticks_lie_inside_and_values_keep_their_order(values: list[float], log: bool) -> None:
    axis = Axis.over("x", values, log=log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 14
    assert all(axis.low * 0.999 <= tick <= axis.high * 1.001 for tick in ticks)
    placed = [axis.place(value) for value in sorted(values)]
    assert placed == sorted(placed) and placed[0] >= 0 and placed[-1] <= 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (0.00012, "1.2e-4"), (1234.56, "1235"), (12_000, "12k"), (3.4e6, "3.4M"), (2e9, "2G")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_a_drawing_is_well_formed_and_escapes_what_it_is_given() -> None:
    nasty = '<script>alert(1)</script>"&'
    axis = Axis(nasty, 0, 10)
    plot = Plot(
        nasty, nasty, axis, axis, [Line([(1, 1), (2, 3)], "ours", steps=True), Dots([(1, 2)], "x", notes=[nasty])]
    )
    drawn = ET.fromstring(str(plot.svg()))
    assert "<script" not in str(plot.svg())
    assert nasty in drawn.attrib["aria-label"]
    assert drawn.find("g/circle/title").text == nasty  # type: ignore[union-attr]
    assert not math.isnan(float(drawn.find("g/circle").attrib["cx"]))  # type: ignore[union-attr]


def test_figures_of_a_search(trials: list[Trial]) -> None:
    own = of_search(trials)
    assert len(own) == len(trials) - 1
    steps = convergence(own)
    assert [step.number for step in steps] == list(range(1, len(own) + 1))
    assert steps[-1].best_us == min(t.measurement.median_us for t in own if t.measurement.median_us)
    assert dict(by_status(own)) == {
        "ok": 36, "wrong_result": 0, "build_error": 0, "out_of_resources": 4, "crashed": 0, "timeout": 0
    }  # fmt: skip


def test_charts_of_trials_show_every_working_one(trials: list[Trial]) -> None:
    for chart in (pareto_chart(trials, 200.0), convergence_chart(trials, 200.0)):
        assert chart is not None
        assert ET.fromstring(str(chart.svg)) is not None
        assert chart.rows and all(len(row) == len(chart.head) for row in chart.rows)
    drawn = ET.fromstring(str(convergence_chart(trials).svg))  # type: ignore[union-attr]
    assert len(drawn.findall("g/circle")) == 36
    assert pareto_chart([]) is None and convergence_chart([]) is None


def test_no_roofline_without_records(device: DeviceSpec) -> None:
    assert roofline_chart(device, []) is None


def test_calibration_draws_every_bin() -> None:
    bins = [
        {"count": 5, "predicted": 0.25, "measured": 0.3, "p10": 0.1, "p90": 0.5},
        {"count": 9, "predicted": 0.75, "measured": 0.7, "p10": 0.6, "p90": 0.9},
    ]
    data: dict[str, Any] = {"trials": 14, "workloads": 2, "bins": bins, "cells": [[0, 5], [9, 0]]}
    chart = calibration_chart(data)
    drawn = ET.fromstring(str(chart.svg))
    assert len(drawn.findall("g/circle")) == 2
    assert len(drawn.findall("rect")) == 2
    assert chart.rows[1] == ("0.75", "0.70", "0.60", "0.90", "9")
