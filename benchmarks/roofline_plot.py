"""A matmul result file as an SVG: how near to the datasheet's limit ours, the vendor's and Inductor's kernels come."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import report

Row = Mapping[str, Any]

WIDTH, LEFT, RIGHT, LINE, TOP = 900, 330, 24, 15, 64
FULL = 1.05
"""The right end of the axis, as a share of the limit."""

GROUPS = (
    "large",
    "medium",
    "skinny",
    "tall_k",
    "unaligned",
    "batched",
    "grouped",
    "epilogue",
    "fp8",
    "int8",
    "w4a16",
    "fp32",
)

SERIES = {"ours": "Kernelwright", "vendor": "vendor call", "inductor": "Inductor max-autotune"}

STYLE = """
text { fill: #1f2328; font: 11px sans-serif }
.head { font-weight: bold } .small { fill: #59636e }
.paper { fill: #ffffff } .grid { stroke: #d1d9e0 } .limit { stroke: #59636e }
.ours { fill: #0072b2 } .vendor { fill: #d55e00 } .inductor { fill: #009e73 } .span { stroke: #b0b8c0 }
@media (prefers-color-scheme: dark) {
 text { fill: #e6edf3 } .small { fill: #9198a1 }
 .paper { fill: #0d1117 } .grid { stroke: #30363d } .limit { stroke: #9198a1 }
 .ours { fill: #58b4f0 } .vendor { fill: #f0883e } .inductor { fill: #3fd6a4 } .span { stroke: #484f58 }
}
"""


def shares(row: Row) -> dict[str, float]:
    """The share of the limit that each contender reaches, by series; without those that were not timed."""
    if not row.get("roofline"):
        return {}
    least_us = row["roofline"] * row["ours_us"]
    times = {"ours": row["ours_us"], "vendor": row.get("vendor_us"), "inductor": row.get("inductor_us")}
    return {name: least_us / time_us for name, time_us in times.items() if time_us}


def draw(rows: Sequence[Row], title: str) -> str:
    """The text of an SVG file: a line a problem, by group, best first."""
    found = [(row, shares(row)) for row in rows]
    known = [(row, share) for row, share in found if share]
    groups = sorted({str(row["group"]) for row, _ in known}, key=lambda g: (g not in GROUPS, (*GROUPS, g).index(g)))
    y, parts = TOP, []
    for group in groups:
        own = sorted(((r, s) for r, s in known if r["group"] == group), key=lambda pair: -pair[1]["ours"])
        y += LINE + 6
        parts.append(f'<text class="head" x="8" y="{y}">{html.escape(group)}</text>')
        parts.append(f'<text class="small" x="{LEFT - 8}" y="{y}" text-anchor="end">{_means(own)}</text>')
        for row, share in own:
            y += LINE
            parts.append(_line(row, share, y))
    height = y + 28
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' role="img" aria-label="{html.escape(title)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/>'
        f'<text class="head" x="8" y="20">{html.escape(title)}</text>'
    )
    return "\n".join([head, _legend(known), _axis(height), *parts, "</svg>", ""])


def _means(own: Sequence[tuple[Row, Mapping[str, float]]]) -> str:
    """The group's geometric means, as words."""
    words = []
    for name in SERIES:
        values = [share[name] for _, share in own if name in share]
        if values:
            words.append(f"{name} {100 * report.geomean(values):.0f} %")
    return ", ".join(words)


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(share, FULL) / FULL


def _line(row: Row, share: Mapping[str, float], y: int) -> str:
    label = str(row.get("tag") or row["id"])
    hint = f"{row['id']}: " + ", ".join(f"{SERIES[name]} {100 * value:.1f} %" for name, value in share.items())
    middle = y - 4
    low, high = (_x(end(share.values())) for end in (min, max))
    marks = "".join(_mark(name, _x(share[name]), middle) for name in reversed(SERIES) if name in share)
    return (
        f"<g><title>{html.escape(hint)}</title>"
        f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{html.escape(label[:52])}</text>'
        f'<path class="span" d="M{low:.1f} {middle}H{high:.1f}" stroke-width="2"/>{marks}</g>'
    )


def _mark(name: str, x: float, y: float) -> str:
    """A circle, a square or a triangle: shapes tell the series apart as well as colours do."""
    if name == "ours":
        return f'<circle class="ours" cx="{x:.1f}" cy="{y}" r="4.5"/>'
    if name == "vendor":
        return f'<rect class="vendor" x="{x - 3.5:.1f}" y="{y - 3.5}" width="7" height="7"/>'
    return f'<path class="inductor" d="M{x:.1f} {y - 4.5}l4.5 8h-9z"/>'


def _legend(known: Sequence[tuple[Row, Mapping[str, float]]]) -> str:
    parts, x = [], LEFT
    for name, words in SERIES.items():
        if any(name in share for _, share in known):
            parts.append(f'{_mark(name, x + 5, 33)}<text x="{x + 15}" y="37">{words}</text>')
            x += 170
    return "".join(parts)


def _axis(height: int) -> str:
    parts = []
    for percent in range(0, 101, 10):
        x = _x(percent / 100)
        kind = "limit" if percent == 100 else "grid"
        parts.append(f'<path class="{kind}" d="M{x:.1f} {TOP - 4}V{height - 18}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{TOP - 9}" text-anchor="middle">{percent} %</text>')
    words = "least time by the datasheet (compute or memory) over measured time"
    parts.append(f'<text class="small" x="{LEFT}" y="{height - 5}">{words}</text>')
    return "".join(parts)
