"""`kernelwright model train` and `model evaluate`: cost models from a database or from recordings."""

from __future__ import annotations

import datetime
import json as json_text
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kernelwright.cost_model.calibration_fit import calibrate
from kernelwright.cost_model.evaluation import Plan, best_objective, evaluate_report
from kernelwright.cost_model.families import GROUPINGS
from kernelwright.cost_model.train import DEFAULT_OBJECTIVE, DEFAULT_ROUNDS, OBJECTIVES, train
from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.search.recording_files import read_trials
from kernelwright.service import cli_options as options
from kernelwright.service.cli_output import print_json, print_rows, print_table, to_stderr
from kernelwright.service.settings import load_settings
from kernelwright.types import Trial

model_app = typer.Typer(help="Train and judge cost models.", no_args_is_help=True)

Operator = Annotated[str, typer.Argument(help="Name of the operator, such as matmul.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", help="A recording or a folder of them; may be repeated. [default: those packaged]"),
]
TrainDatabase = Annotated[str | None, typer.Option("--db", help="Learn from the trials of this database too.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Number of trees.")]
Folds = Annotated[int, typer.Option("--folds", min=2, help="Parts into which workloads are cut to be left out.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Threads for training. [default: all cores]")]

_SHOWN = ("top1", "shortlist", "online", "decile", "spearman")


@model_app.command("train")
def train_command(
    operator: Operator,
    out: Annotated[Path, typer.Option("--out", help="Model file to write, such as models/matmul.json.")],
    source: From = None,
    db: TrainDatabase = None,
    objective: Annotated[
        str,
        typer.Option("--objective", help=f"{', '.join(OBJECTIVES)}, or best: whichever does best on left-out folds."),
    ] = DEFAULT_OBJECTIVE,
    rounds: Rounds = DEFAULT_ROUNDS,
    folds: Folds = 6,
    jobs: Jobs = None,
    json: options.Json = False,
) -> None:
    """Train on everything given, judge the same training on workloads left out, calibrate, and write one file.

    Put the file into a folder, name that in KERNELWRIGHT_MODELS, and every command predicts with it.
    """
    trials = list(_trials(operator, source, db))
    plan = Plan(operator, folds, rounds=rounds, jobs=jobs, online=False)
    to_stderr(f"learning from {len(trials)} trials of {len({t.workload for t in trials})} workloads")
    chosen = objective
    if objective == "best":
        chosen = best_objective(evaluate_report(trials, tuple(OBJECTIVES), plan))
    model = train(trials, operator, chosen, rounds, jobs)
    for grouping, name in (("family", "evaluation"), ("workload", "evaluation_by_workload")):
        report = evaluate_report(trials, (chosen,), _grouped(plan, grouping))
        model.metadata[name] = report["models"][f"xgboost:{chosen}"]
    model.calibration, calibration = calibrate(trials, chosen, plan)
    model.metadata["calibration"] = {**calibration, **_run_data()}
    out.parent.mkdir(parents=True, exist_ok=True)
    model.save(out)
    if json:
        print_json({"file": str(out), **model.metadata})
    else:
        _print_trained(out, model.metadata)


@model_app.command("evaluate")
def evaluate_command(
    operator: Operator,
    source: From = None,
    db: TrainDatabase = None,
    objectives: Annotated[str, typer.Option("--objectives", help="Names with commas, or all.")] = DEFAULT_OBJECTIVE,
    grouping: Annotated[
        str, typer.Option("--grouping", help="What is left out as a whole: family, workload, or both.")
    ] = "family",
    rounds: Rounds = DEFAULT_ROUNDS,
    folds: Folds = 6,
    online: Annotated[bool, typer.Option(help="Also judge learning from 16 measurements, which takes longer.")] = True,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", help="Result file to write.")] = None,
    json: options.Json = False,
) -> None:
    """Judge ways of training on workloads left out of it, beside the analytic model and random choice."""
    names = tuple(OBJECTIVES) if objectives == "all" else tuple(objectives.split(","))
    groupings = tuple(GROUPINGS) if grouping == "both" else (grouping,)
    trials = list(_trials(operator, source, db))
    plan = Plan(operator, folds, rounds=rounds, jobs=jobs, online=online)
    reports = {name: evaluate_report(trials, names, _grouped(plan, name)) for name in groupings}
    result = {**_run_data(), "summary": {name: report["models"] for name, report in reports.items()}, **reports}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_one_row_a_line(result), encoding="utf-8")
    if json:
        print_json(result)
    else:
        for name, report in reports.items():
            _print_report(name, report)


def _trials(operator: str, source: Sequence[Path] | None, db: str | None) -> Iterator[Trial]:
    """Trials of the operator from recordings and a database, each once; those packaged when neither is given."""
    seen: dict[str, Trial] = {}
    if source or db is None:
        seen.update({trial.key: trial for trial in read_trials(source or None)})
    if db is not None:
        with Store.open(load_settings(db=db).db) as store:
            seen.update({trial.key: trial for trial in store.trials(operator=operator, trusted=True)})
    found = [trial for trial in seen.values() if trial.workload.operator == operator]
    if not found:
        raise UsageError(f"there must be trials of {operator} to learn from, got none; record a sweep, or tune")
    yield from found


def _grouped(plan: Plan, grouping: str) -> Plan:
    return Plan(plan.operator, plan.folds, grouping, plan.rounds, plan.jobs, plan.online)


def _run_data() -> dict[str, str]:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"command": shlex.join(["kernelwright", *sys.argv[1:]]), "date": date}


def _one_row_a_line(result: Mapping[str, Any]) -> str:
    """JSON text; long lists of rows with one row in a line."""
    reports = {name: value for name, value in result.items() if isinstance(value, dict) and "rows" in value}
    plain = {name: value for name, value in result.items() if name not in reports}
    plain |= {name: {**report, "rows": f"@{name}"} for name, report in reports.items()}
    text = json_text.dumps(plain, indent=1)
    for name, report in reports.items():
        rows = ",\n".join(f"   {json_text.dumps(row)}" for row in report["rows"])
        text = text.replace(f'"@{name}"', f"[\n{rows}\n  ]")
    return text + "\n"


def _print_trained(out: Path, metadata: Mapping[str, Any]) -> None:
    judged = metadata["evaluation"]
    print_rows(
        [
            ("file", f"{out}, {out.stat().st_size / 1e6:.2f} MB"),
            ("trained on", f"{metadata['examples']} trials of {metadata['groups']} workloads, {metadata['objective']}"),
            ("first choice", f"mean {judged['top1_mean']:.3f} of the best speed on families left out"),
            ("best of 16", f"mean {judged['shortlist_mean']:.3f}, 10th percentile {judged['shortlist_p10']:.3f}"),
            ("calibration", f"expected regret off by {100 * metadata['calibration']['error']:.1f} points on average"),
        ]
    )


def _print_report(grouping: str, report: Mapping[str, Any]) -> None:
    table = Table(title=f"left out by {grouping}: {report['groups']} groups, {report['workloads']} workloads", box=None)
    table.add_column("model")
    for name in _SHOWN:
        table.add_column(f"{name}: mean, p10")
    for model, figures in report["models"].items():
        cells = (
            f"{figures[f'{name}_mean']:.3f} {figures[f'{name}_p10']:.3f}" if f"{name}_mean" in figures else ""
            for name in _SHOWN
        )
        table.add_row(model, *cells)
    print_table(table)
