"""What every result file holds: the machine, the command, rows and their summary (see results/README.md)."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def commit() -> str:
    """The commit that COMMIT names, for a copy of the tree that lies in another repository or none; else this one's."""
    given = os.environ.get("COMMIT")
    if given:
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def command(words: Sequence[str]) -> str:
    """The command line as another machine can use it: files of absolute folders by their names alone."""
    return " ".join(["python", *(re.sub(r"(?:^|(?<=[/=]))/(?:[^/=]+/)+(?=[^/]+$)", "", word) for word in words)])


def clocks() -> str:
    """SM clock, power and temperature now, as nvidia-smi tells them."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of what is above 0; 0.0 of nothing."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Count, geometric mean and worst ratio over all rows that have one, by group, and by what a row is `part_of`.

    Where rows have them also `roofline` (geometric mean), and of Inductor's times over ours `inductor` (geometric mean)
    and `inductor_count`.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["ratio"]:
            for name in dict.fromkeys(("all", *row.get("part_of", ()), row.get("group", "all"))):
                groups.setdefault(name, []).append(row)
    return {name: _figures(members) for name, members in groups.items()}


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows]
    out = {"count": len(ratios), "geomean": round(geomean(ratios), 4), "worst": round(min(ratios), 4)}
    shares = [row["roofline"] for row in rows if row.get("roofline")]
    if shares:
        out["roofline"] = round(geomean(shares), 4)
    theirs = [row["inductor_ratio"] for row in rows if row.get("inductor_ratio")]
    if theirs:
        out |= {"inductor": round(geomean(theirs), 4), "inductor_count": len(theirs)}
    return out


def origin() -> dict[str, str]:
    """By which command, on which commit and when what is written now was measured."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"command": command(sys.argv), "commit": commit(), "date": now}


def write(path: Path, rows: Sequence[Row], **fields: Any) -> dict[str, Any]:
    """Write a result file and return what it holds. fields: gpu, driver, torch, triton, clocks, aa_ratio, ..."""
    result = {
        **origin(),
        **fields,
        "summary": summary(rows),
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
