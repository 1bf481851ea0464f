"""Plots as SVG text: axes, ticks and marks. Colours are classes of the style sheet, so that light and dark work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 290
"""Units of the drawing; small, so that its text stays readable on a phone."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 42
_STEPS = (1, 2, 5)

Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: what it shows, its two ends, and whether equal steps are equal ratios."""

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def over(
        cls,
        label: str,
        values: Sequence[float],
        *,
        log: bool = False,
        low: float | None = None,
        high: float = -math.inf,
    ) -> Axis:
        """An axis that holds the values with a little room; `low` fixes its lower end, `high` is at least shown."""
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
        least, most = min(finite), max(*finite, high)
        if log:
            room = max((most / least) ** 0.06, 1.05)
            return cls(label, least / room if low is None else low, most * room, True)
        room = (most - least) * 0.06 or abs(most) * 0.1 or 1.0
        return cls(label, least - room if low is None else low, most + room)

    def place(self, value: float) -> float:
        """Where a value stands, 0 at the lower end and 1 at the upper one; values outside stand at the end."""
        if self.log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Round values inside the axis, 2 to 8 of them."""
        return _log_ticks(self.low, self.high) if self.log else _even_ticks(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Line:
    """Joined points. kind: a class of the style sheet; steps: level until the next point."""

    points: Sequence[Point]
    kind: str
    steps: bool = False


@dataclasses.dataclass(frozen=True)
class Dots:
    """Single points. shape: "dot", "ring" or "square"; notes: what hovering tells, one for each point or none."""

    points: Sequence[Point]
    kind: str
    shape: str = "dot"
    size: float = 3.0
    notes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Bar:
    """A vertical span at one place, such as a range of measured values."""

    x: float
    low: float
    high: float
    kind: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """A rectangle from one corner to the other; shade from 0 to 1."""

    x: tuple[float, float]
    y: tuple[float, float]
    shade: float
    kind: str


Mark = Line | Dots | Bar | Cell


@dataclasses.dataclass(frozen=True)
class Plot:
    """What to draw: axes and marks, the later ones on top. title and summary are read out by screen readers."""

    title: str
    summary: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]

    def svg(self) -> Markup:
        """The drawing as an inline SVG element."""
        body = Markup("").join([*self._grid(), *(_drawn(self, mark) for mark in self.marks)])
        return Markup(
            '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}"><desc>{}</desc>{}</svg>'
        ).format(WIDTH, HEIGHT, f"{self.title}. {self.summary}", self.summary, body)

    def across(self, value: float) -> float:
        """Horizontal place of a value of the x axis in the drawing."""
        return round(_LEFT + self.x.place(value) * (WIDTH - _LEFT - _RIGHT), 1)

    def down(self, value: float) -> float:
        """Vertical place of a value of the y axis in the drawing."""
        return round(HEIGHT - _BOTTOM - self.y.place(value) * (HEIGHT - _TOP - _BOTTOM), 1)

    def _grid(self) -> list[Markup]:
        left, right, top, bottom = _LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM
        line = Markup('<path class="grid" d="M{} {}L{} {}"/>')
        text = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>')
        out = []
        for value in self.x.ticks():
            x = self.across(value)
            out += [line.format(x, top, x, bottom), text.format(x, bottom + 15, "middle", short(value))]
        for value in self.y.ticks():
            y = self.down(value)
            out += [line.format(left, y, right, y), text.format(left - 5, y + 4, "end", short(value))]
        middle = (top + bottom) / 2
        label = Markup('<text class="axis" x="{}" y="{}" text-anchor="middle"{}>{}</text>')
        turned = Markup(' transform="rotate(-90 11 {})"').format(middle)
        return [
            *out,
            Markup('<path class="frame" d="M{} {}V{}H{}"/>').format(left, top, bottom, right),
            label.format((left + right) / 2, HEIGHT - 6, "", self.x.label),
            label.format(11, middle, turned, self.y.label),
        ]


def short(value: float) -> str:
    """A number in few letters: 1500000 is 1.5M, 0.00012 is 1.2e-4."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if letter == "k" else limit
            return f"{value / divisor:.3g}{letter}"
    if 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


def _drawn(plot: Plot, mark: Mark) -> Markup:
    if isinstance(mark, Line):
        return Markup('<path class="line {}" d="{}"/>').format(mark.kind, _path(plot, mark))
    if isinstance(mark, Dots):
        notes = mark.notes or [""] * len(mark.points)
        drawn = [_dot(plot, mark, point, note) for point, note in zip(mark.points, notes, strict=True)]
        return Markup('<g class="marks {} {}">{}</g>').format(mark.kind, mark.shape, Markup("").join(drawn))
    if isinstance(mark, Bar):
        x = plot.across(mark.x)
        return Markup('<path class="line {}" d="M{} {}V{}"/>').format(
            mark.kind, x, plot.down(mark.low), plot.down(mark.high)
        )
    left, right = plot.across(mark.x[0]), plot.across(mark.x[1])
    top, bottom = plot.down(mark.y[1]), plot.down(mark.y[0])
    return Markup('<rect class="{}" x="{}" y="{}" width="{:.1f}" height="{:.1f}" fill-opacity="{:.2f}"/>').format(
        mark.kind, left, top, right - left, bottom - top, mark.shade
    )


def _path(plot: Plot, line: Line) -> str:
    parts: list[str] = []
    for x, y in line.points:
        across, down = plot.across(x), plot.down(y)
        if not parts:
            parts.append(f"M{across} {down}")
        else:
            parts.append(f"H{across}V{down}" if line.steps else f"L{across} {down}")
    return "".join(parts)


def _dot(plot: Plot, dots: Dots, point: Point, note: str) -> Markup:
    x, y, size = plot.across(point[0]), plot.down(point[1]), dots.size
    inner = Markup("<title>{}</title>").format(note) if note else Markup("")
    if dots.shape == "square":
        form = Markup('<rect x="{:.1f}" y="{:.1f}" width="{}" height="{}">{}</rect>')
        return form.format(x - size, y - size, 2 * size, 2 * size, inner)
    return Markup('<circle cx="{}" cy="{}" r="{}">{}</circle>').format(x, y, size, inner)


def _even_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (*_STEPS, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if len(powers) <= 3:
        fine = [factor * 10.0**power for power in powers for factor in _STEPS]
        found = [value for value in fine if low <= value <= high]
        return found if len(found) >= 2 else _even_ticks(low, high)
    every = math.ceil(len(powers) / 7)
    return [10.0**power for power in powers if low <= 10.0**power <= high and power % every == 0]


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """The key of a plot as a list: (class, what it stands for)."""
    items = [Markup('<li><span class="key {}"></span>{}</li>').format(kind, escape(text)) for kind, text in entries]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items)) if items else Markup("")
