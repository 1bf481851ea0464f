"""The dashboard's charts: each a plot, its key, and the same figures as a table for those who cannot see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kernelwright.service.dashboard.figures import (
    RooflinePoint,
    Step,
    Tried,
    convergence,
    of_search,
    pareto_front,
    roofline_points,
    roofs,
    tried,
)
from kernelwright.service.dashboard.plots import Axis, Bar, Cell, Dots, Line, Mark, Plot, legend, short
from kernelwright.types import DeviceSpec, Trial, TuningRecord

MAX_ROWS = 200
"""Rows of a chart's table; what lies beyond is in the export."""

MAX_DOTS = 2000

SLOWEST = 6.0
"""Trials that took more than this many times the best stand at the plot's edge, so that the rest can be told apart."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart for a page. rows: its figures under the column names `head`."""

    id: str
    title: str
    svg: Markup
    key: Markup
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def pareto_chart(trials: Sequence[Trial], vendor_us: float | None = None) -> Chart | None:
    """Time against error of every schedule that worked, with those that nothing beats in both; None without any."""
    points = [point for point in tried(of_search(trials)) if point.error > 0]
    if not points:
        return None
    front = pareto_front(points)
    x = Axis.over("time (µs)", [p.time_us for p in points] + ([vendor_us] if vendor_us else []), log=True)
    y = Axis.over("relative error", [p.error for p in points], log=True)
    others = [point for point in points if point not in front][:MAX_DOTS]
    edge = [(p.time_us, p.error) for p in front]
    marks: list[Mark] = [_vendor_line(vendor_us, y)] if vendor_us else []
    marks += [
        Dots([(p.time_us, p.error) for p in others], "faint", notes=[_told(p) for p in others]),
        Line(edge, "ours", steps=True),
        Dots(edge, "ours", "square", 4, [_told(p) for p in front]),
    ]
    count = f"{len(front)} of {len(points)} schedules are not beaten in both time and error"
    plot = Plot("Time against error", count, x, y, marks)
    key = [("ours square", "Pareto front"), ("faint dot", "other schedules")]
    rows = [(short(p.time_us), short(p.error), str(p.schedule)) for p in front]
    return Chart(
        "pareto", "Time against error", plot.svg(), legend(_with_vendor(key, vendor_us)),
        ("time (µs)", "error", "schedule on the front"), rows[:MAX_ROWS],
    )  # fmt: skip


def convergence_chart(trials: Sequence[Trial], vendor_us: float | None = None) -> Chart | None:
    """Best time so far against the number of the trial; None when no trial worked."""
    steps = convergence(of_search(trials))
    worked = [step for step in steps if step.time_us is not None]
    if not worked:
        return None
    best = [(step.number, step.best_us) for step in steps if step.best_us is not None]
    line = [(float(number), time) for number, time in best]
    times = [step.time_us or 0.0 for step in worked] + ([vendor_us] if vendor_us else [])
    x = Axis.over("trial", [1, len(steps)], low=0.0)
    y = Axis.over("time (µs)", _near(times, SLOWEST * min(times)), log=True)
    shown = worked[:MAX_DOTS]
    marks: list[Mark] = [_vendor_line(vendor_us, x, level=True)] if vendor_us else []
    marks += [
        Dots([(step.number, step.time_us or 0.0) for step in shown], "faint", size=2, notes=_step_notes(shown)),
        Line(line, "ours", steps=True),
    ]
    summary = f"best {short(line[-1][1])} µs after {len(steps)} trials, first {short(line[0][1])} µs"
    plot = Plot("Convergence of the search", summary, x, y, marks)
    key = [("ours line", "best so far"), ("faint dot", "a trial, slow ones at the edge")]
    gains = [step for before, step in zip([None, *steps], steps, strict=False) if _gained(before, step)]
    rows = [(str(step.number), short(step.best_us or 0.0)) for step in gains]
    return Chart(
        "convergence", "Convergence of the search", plot.svg(), legend(_with_vendor(key, vendor_us)),
        ("trial", "best so far (µs)"), rows[:MAX_ROWS],
    )  # fmt: skip


def roofline_chart(device: DeviceSpec, records: Sequence[TuningRecord]) -> Chart | None:
    """Achieved rate against intensity under the device's roofs; None when no record can be placed."""
    points = roofline_points(records)[:MAX_DOTS]
    tops = roofs(device, [point.record for point in points])
    if not points or not tops:
        return None
    bandwidth = device.bandwidth_gbs / 1e3
    ridges = [rate / bandwidth for _, rate in tops]
    rates = [p.tflops for p in points] + [p.vendor_tflops for p in points if p.vendor_tflops]
    x = Axis.over("flops a byte", [p.intensity for p in points] + ridges, log=True)
    y = Axis.over("TFLOP/s", rates + [rate for _, rate in tops], log=True)
    marks: list[Mark] = [Line(_roof(rate, bandwidth, x), "roof") for _, rate in tops]
    marks += _roofline_dots(points)
    ours = sum(point.record.winner == "kernel" for point in points)
    summary = f"{len(points)} workloads; our kernel wins {ours}; {_roof_text(tops, bandwidth)}"
    plot = Plot(f"Roofline of {device.name}", summary, x, y, marks)
    key = [("ours dot", "our kernel, winning"), ("faint dot", "our kernel, not faster"), ("vendor ring", "vendor call")]
    return Chart(
        "roofline", "Achieved rate against intensity", plot.svg(), legend([*key, ("roof line", "roof")]),
        ("workload", "flops a byte", "TFLOP/s", "vendor", "roofline"), _roofline_rows(points),
    )  # fmt: skip


def calibration_chart(data: Mapping[str, Any]) -> Chart:
    """Predicted against measured share of the best speed; `data` as a trained model keeps it."""
    axis = Axis("predicted share of the best speed", 0.0, 1.0)
    bins = [entry for entry in data["bins"] if entry["count"]]
    cells = data["cells"]
    most = max((count for row in cells for count in row), default=0) or 1
    width = 1 / len(cells)
    marks: list[Mark] = [
        Cell((i * width, (i + 1) * width), (j * width, (j + 1) * width), 0.08 + 0.5 * (count / most) ** 0.5, "density")
        for i, row in enumerate(cells)
        for j, count in enumerate(row)
        if count
    ]
    marks += [Line([(0, 0), (1, 1)], "roof")]
    marks += [Bar(entry["predicted"], entry["p10"], entry["p90"], "ours") for entry in bins]
    marks += [Dots([(e["predicted"], e["measured"]) for e in bins], "ours", size=4, notes=[_bin_note(e) for e in bins])]
    summary = (
        f"{data['trials']} trials of {data['workloads']} workloads, each predicted without having seen its workload"
    )
    plot = Plot("Calibration", summary, axis, Axis("measured share", 0.0, 1.0), marks)
    key = [("ours dot", "mean, and 10 to 90 percent"), ("density cell", "trials"), ("roof line", "perfect")]
    rows = [
        (f"{e['predicted']:.2f}", f"{e['measured']:.2f}", f"{e['p10']:.2f}", f"{e['p90']:.2f}", str(e["count"]))
        for e in bins
    ]
    head = ("predicted", "measured, mean", "10 %", "90 %", "trials")
    return Chart("calibration", "Calibration", plot.svg(), legend(key), head, rows)


def _told(point: Tried) -> str:
    return f"{short(point.time_us)} µs, error {short(point.error)}: {point.schedule}"


def _step_notes(steps: Sequence[Step]) -> list[str]:
    return [f"trial {step.number}: {short(step.time_us or 0.0)} µs" for step in steps]


def _near(times: Sequence[float], most: float) -> list[float]:
    return [min(time, most) for time in times]


def _gained(before: Step | None, step: Step) -> bool:
    return step.best_us is not None and (before is None or before.best_us != step.best_us)


def _vendor_line(vendor_us: float, other: Axis, level: bool = False) -> Line:
    ends = ((vendor_us, other.low), (vendor_us, other.high))
    return Line([(b, a) if level else (a, b) for a, b in ends], "vendor")


def _with_vendor(key: list[tuple[str, str]], vendor_us: float | None) -> list[tuple[str, str]]:
    return [*key, ("vendor line", f"vendor call, {short(vendor_us)} µs")] if vendor_us else key


def _roof(rate: float, bandwidth: float, x: Axis) -> list[tuple[float, float]]:
    ridge = min(max(rate / bandwidth, x.low), x.high)
    return [
        (x.low, min(rate, x.low * bandwidth)),
        (ridge, min(rate, ridge * bandwidth)),
        (x.high, min(rate, x.high * bandwidth)),
    ]


def _roof_text(tops: Sequence[tuple[str, float]], bandwidth: float) -> str:
    return ", ".join(f"{name} {rate:g} TFLOP/s" for name, rate in tops) + f", memory {bandwidth:g} TB/s"


def _roofline_dots(points: Sequence[RooflinePoint]) -> list[Mark]:
    vendor = [p for p in points if p.vendor_tflops]
    wins = [p for p in points if p.record.winner == "kernel"]
    rest = [p for p in points if p.record.winner != "kernel"]
    return [
        Dots([(p.intensity, p.vendor_tflops or 0.0) for p in vendor], "vendor", "ring", 3.5),
        Dots([(p.intensity, p.tflops) for p in rest], "faint", notes=[_point_note(p) for p in rest]),
        Dots([(p.intensity, p.tflops) for p in wins], "ours", notes=[_point_note(p) for p in wins]),
    ]


def _point_note(point: RooflinePoint) -> str:
    vendor = f", vendor {short(point.vendor_tflops)}" if point.vendor_tflops else ""
    return f"{point.record.workload}: {short(point.tflops)} TFLOP/s{vendor}"


def _roofline_rows(points: Sequence[RooflinePoint]) -> list[tuple[str, ...]]:
    ordered = sorted(points, key=lambda point: point.intensity)[:MAX_ROWS]
    return [
        (
            str(p.record.workload),
            short(p.intensity),
            short(p.tflops),
            short(p.vendor_tflops) if p.vendor_tflops else "",
            f"{100 * p.record.roofline:.0f} %" if p.record.roofline else "",
        )
        for p in ordered
    ]


def _bin_note(entry: Mapping[str, Any]) -> str:
    return f"predicted {entry['predicted']:.2f}, measured {entry['measured']:.2f} ({entry['count']} trials)"
