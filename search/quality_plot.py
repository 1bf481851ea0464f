"""A result file's curves as an SVG: for each space quality against measurements, and against seconds where known."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 380, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 30, 36
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

Line = tuple[str, Sequence[float], Sequence[float]]


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of an SVG file; a line of panels for each space, a colour for each strategy."""
    spaces = list(dict.fromkeys(str(row["space"]) for row in rows))
    strategies = list(dict.fromkeys(str(row["strategy"]) for row in rows))
    colours = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(strategies)}
    parts = [_legend(colours)]
    for line, space in enumerate(spaces):
        own = [row for row in rows if row["space"] == space]
        top = 30 + line * _HEIGHT
        counted = [(str(r["strategy"]), range(1, len(r["curve"]) + 1), r["curve"]) for r in own]
        parts.append(_panel(space, "measurements", counted, colours, (0, top)))
        timed = [(str(r["strategy"]), r["seconds_curve"], r["curve"]) for r in own if "seconds_curve" in r]
        if timed:
            parts.append(_panel(space, "seconds", timed, colours, (_WIDTH, top)))
    size = f'width="{2 * _WIDTH}" height="{30 + len(spaces) * _HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def _legend(colours: Mapping[str, str]) -> str:
    parts = []
    for n, (name, colour) in enumerate(colours.items()):
        x = _LEFT + 120 * n
        parts.append(f'<path d="M{x} 16h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="20">{html.escape(name)}</text>')
    return "".join(parts)


def _panel(title: str, unit: str, lines: Sequence[Line], colours: Mapping[str, str], corner: tuple[int, int]) -> str:
    """One pair of axes: logarithmic from left to right, quality upwards from the lowest of the tenth measurement."""
    start = 9
    first = max(1.0, min(float(xs[min(start, len(xs) - 1)]) for _, xs, _ in lines))
    last = max(max(float(xs[-1]) for _, xs, _ in lines), first * 1.01)
    low = math.floor(10 * min(ys[min(start, len(ys) - 1)] for _, _, ys in lines)) / 10
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> str:
        across = math.log(max(x, first) / first) / math.log(last / first)
        return f"{_LEFT + wide * across:.1f} {_TOP + high * (1 - (max(y, low) - low) / max(1 - low, 1e-6)):.1f}"

    parts = [f'<g transform="translate({corner[0]} {corner[1]})">']
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 8}" font-weight="bold">{html.escape(title)}</text>')
    parts.append(f'<rect x="{_LEFT}" y="{_TOP}" width="{wide}" height="{high}" fill="none" stroke="#999"/>')
    for y in (low, (low + 1) / 2, 1.0):
        parts.append(f'<text x="{_LEFT - 5}" y="{place(first, y).split()[1]}" text-anchor="end">{y:.2f}</text>')
    for x in (first, math.sqrt(first * last), last):
        at = place(x, low).split()[0]
        parts.append(f'<text x="{at}" y="{_TOP + high + 14}" text-anchor="middle">{x:.0f}</text>')
    middle = _LEFT + wide / 2
    parts.append(f'<text x="{middle}" y="{_TOP + high + 28}" text-anchor="middle">{unit} (log)</text>')
    for name, xs, ys in lines:
        points = [place(float(x), float(y)) for x, y in zip(xs, ys, strict=True)][start:]
        if points:
            parts.append(f'<path d="M{" L".join(points)}" fill="none" stroke="{colours[name]}" stroke-width="1.8"/>')
    return "".join([*parts, "</g>"])
