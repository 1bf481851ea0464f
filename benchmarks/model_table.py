"""Result files of whole models as a Markdown table: times, ratios over both rivals, what compiling and memory cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from report import geomean

Row = Mapping[str, Any]

RIVALS = ("default", "max_autotune")
"""Inductor's modes that ours are compared with."""

OURS = {"over": "ours", "over_max": "ours + max-autotune"}
"""Fields with the rivals' times over one of ours, and what that is called."""

HEAD = ("model", "default ms", "max-autotune ms", "ours ms", "ours + max-autotune ms")

NOTHING = "-"


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of result files; a model that is in several counts as the last one has it."""
    rows: dict[str, Row] = {}
    for file in files:
        rows |= {row["model"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    return list(rows.values())


def merged(files: Iterable[Path]) -> list[Row]:
    """The rows of result files, oldest first: of each model the last one that has times of as many contenders as any
    before it. Each says when, by which command and on which commit it was `measured`, and what `others` said."""
    rows: dict[str, Row] = {}
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        for row in content["rows"]:
            new = {"measured": {name: content[name] for name in ("command", "commit", "date")}, **row}
            old = rows.get(row["model"])
            if old is None:
                rows[row["model"]] = new
            elif old["measured"] != new["measured"]:  # else one file went on from the other, and has its rows
                rows[row["model"]] = _with_others(*sorted((new, old), key=_timed, reverse=True))
    return list(rows.values())


def _timed(row: Row) -> int:
    return sum(one["ms"] is not None for one in row.get("contenders", {}).values())


def _with_others(kept: Row, other: Row) -> Row:
    costs = {name: one["compile_s"] for name, one in other.get("contenders", {}).items()}
    said = {"measured": other["measured"], "over": other.get("over"), "compile_s": costs}
    said["aa_ratio"] = other.get("aa_ratio")
    others = [*kept.get("others", ()), *other.get("others", ()), said]
    return {**kept, "others": sorted(others, key=lambda one: str(one["measured"]["date"]))}


def table(rows: Sequence[Row]) -> str:
    """The rows, inference before training, and below them geometric mean and worst ratio of each kind and of all."""
    timed = sorted((row for row in rows if "contenders" in row), key=lambda row: row["mode"])
    names = [f"{rival.replace('_', '-')} / {ours}" for ours in OURS.values() for rival in RIVALS]
    head = [*HEAD, *names, "replaced", "compile ours / default", "memory ours / default", "error ours / default"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *(_line(_cells(row)) for row in timed)]
    kinds = {kind: [row for row in timed if row["mode"] == kind] for kind in ("inference", "training")}
    parts = [*(kinds.items() if all(kinds.values()) else ()), ("all", timed)]
    for kind, members in parts:
        for what, figure in (("geomean", geomean), ("worst", min)):
            found = [_ratios(members, field, rival) for field in OURS for rival in RIVALS]
            cells = [f"{figure(ratios):.3f} ({len(ratios)})" if ratios else NOTHING for ratios in found]
            lines.append(_line([f"**{what}, {kind}**", "", "", "", "", *cells, "", "", "", ""]))
    failed = [f"{row['model']}: {row['failure']}" for row in rows if "failure" in row]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _cells(row: Row) -> list[str]:
    found = row["contenders"]
    times = [_number(found.get(name, {}).get("ms"), 3) for name in (*RIVALS, "ours", "ours_max")]
    ratios = [_number(row.get(field, {}).get(rival), 3) for field in OURS for rival in RIVALS]
    costs = [_quotient(found, name) for name in ("compile_s", "peak_gb", "gradient_error")]
    if found.get("ours", {}).get("gradient_error") is None:
        costs[-1] = _quotient(found, "error")
    return [row["model"], *times, *ratios, f"{row['replaced']} of {row['places']}", *costs]


def _ratios(rows: Sequence[Row], field: str, rival: str) -> list[float]:
    found = [row.get(field, {}).get(rival) for row in rows]
    return [ratio for ratio in found if ratio is not None]


def _quotient(contenders: Mapping[str, Any], name: str) -> str:
    ours, theirs = (contenders.get(mode, {}).get(name) for mode in ("ours", "default"))
    return _number(ours / theirs if ours is not None and theirs else None, 2)


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
