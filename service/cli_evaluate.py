"""`kernelwright evaluate search`: strategies replayed on recorded data, as a table, a result file and a plot."""

from __future__ import annotations

import datetime
import importlib.metadata
import json as json_text
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from kernelwright.errors import UnknownStrategy, UsageError
from kernelwright.search import STRATEGIES
from kernelwright.search.quality_plot import plot as draw
from kernelwright.search.replay_cases import find_spaces, load_cases
from kernelwright.search.replay_evaluation import EXACT_RANDOM, LIMIT, make_row, random_row, replays
from kernelwright.service.cli_output import print_table, to_stderr

evaluate_app = typer.Typer(help="Judge search strategies.", no_args_is_help=True)

Rows = list[dict[str, Any]]

_SHOWN = ("space", "strategy", "seeds", "q16", "q32", "q64", "q128", "q220", "p10_64")


@evaluate_app.callback()
def _group() -> None:
    pass


@evaluate_app.command("search")
def evaluate_search(
    data: Annotated[Path, typer.Option("--data", help="Folder or file of recorded data.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many searches of each space.")] = 30,
    strategies: Annotated[str, typer.Option("--strategies", help="Names, with commas.")] = "bayesian,evolutionary",
    spaces: Annotated[str, typer.Option("--spaces", help="Only those with one of these in their names.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=10, help="Most measurements of a search.")] = LIMIT,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Schedules proposed at a time.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", help="Result file; rows that it has are kept.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="SVG file: quality by measurements and by time.")] = None,
) -> None:
    """Replay strategies on recorded data: ours (.parquet), Kernel Tuner's (cache and T4 .json), and CSV with a space.

    Stopped and started again with the same --json, it goes on where it was.
    """
    names = _strategy_names(strategies)
    paths = {n: p for n, p in find_spaces(data).items() if any(part in n for part in spaces.split(","))}
    if not paths:
        raise UsageError(f"--spaces must be part of a name among those in {data}, got {spaces!r}")
    protocol = {"seeds": seeds, "limit": limit, "batch": batch}
    rows = _rows_of(json, protocol)
    for space, path in paths.items():
        missing = [n for n in (EXACT_RANDOM, *names) if not any(_is_row(r, space, n) for r in rows)]
        if missing:
            cases = load_cases(path)
            exact, expected = random_row(space, cases, limit)
            for name in missing:
                to_stderr(f"{space}: {name}")
                runs = [] if name == EXACT_RANDOM else list(replays(cases, name, seeds, limit, batch))
                rows.append(make_row(space, name, runs, expected) if runs else exact)
                _write(json, rows, protocol)
    _print(rows, limit)
    if plot is not None:
        plot.write_text(draw(rows), encoding="utf-8")


def _strategy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            raise UnknownStrategy(f"strategies must be among {', '.join(STRATEGIES)}, got {name!r}")
    return names


def _is_row(row: Mapping[str, Any], space: str, strategy: str) -> bool:
    return (row["space"], row["strategy"]) == (space, strategy)


def _rows_of(path: Path | None, protocol: Mapping[str, int]) -> Rows:
    if path is None or not path.exists():
        return []
    try:
        found: dict[str, Any] = json_text.loads(path.read_text(encoding="utf-8"))
        known = {name: found[name] for name in protocol}
        rows: Rows = found["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} must be a result file of this command, or not exist yet ({error})") from error
    if known != protocol:
        raise UsageError(f"{path} holds rows for {known}, asked for {dict(protocol)}; give another file")
    return rows


def _write(path: Path | None, rows: Rows, protocol: Mapping[str, int]) -> None:
    """The whole file anew, put in place at once, so that an interrupted run leaves a whole one."""
    if path is None:
        return
    result = {
        "command": shlex.join(["kernelwright", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kernelwright": importlib.metadata.version("kernelwright"),
        **protocol,
        "rows": rows,
        "summary": _summary(rows, protocol["limit"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(_compact(result), encoding="utf-8")
    os.replace(unfinished, path)


def _compact(result: Mapping[str, Any]) -> str:
    """Indented, but a row in one line."""
    rows = ",\n".join(f"    {json_text.dumps(row)}" for row in result["rows"])
    plain = json_text.dumps({**result, "rows": "ROWS"}, indent=2)
    return plain.replace('"ROWS"', f"[\n{rows}\n  ]") + "\n"


def _summary(rows: Rows, limit: int) -> dict[str, dict[str, Any]]:
    """For each strategy the mean score over its spaces, and the worst of them."""
    score = f"fscore_10_{limit}"
    out = {}
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = {row["space"]: row[score] for row in rows if row["strategy"] == strategy}
        worst = min(own, key=lambda space: own[space])
        out[strategy] = {"spaces": len(own), score: round(float(np.mean(list(own.values()))), 4), "worst": worst}
    return out


def _print(rows: Sequence[Mapping[str, Any]], limit: int) -> None:
    columns = [*(name for name in _SHOWN if any(name in row for row in rows)), f"fscore_10_{limit}"]
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    print_table(table)
