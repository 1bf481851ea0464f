"""`kernelwright tune`: search with a progress bar, keep every trial, print the winner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernelwright.db import Store
from kernelwright.errors import UsageError
from kernelwright.search import Budget, Runner, open_runner
from kernelwright.search import Progress as SearchProgress
from kernelwright.service import cli_options as options
from kernelwright.service.answer_json import tell
from kernelwright.service.answering import Answers
from kernelwright.service.campaign import Plan
from kernelwright.service.cli_fleet import Where, is_model, open_whole_fleet
from kernelwright.service.cli_output import print_best, print_json, to_stderr
from kernelwright.service.cli_pieces import UNBOUND_S, tune_all
from kernelwright.service.schemas import RunOut, TuneReport
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.tuning import OnTrial, TuneRequest, TuneResult, tune_and_store
from kernelwright.types import Trial

SECONDS_HELP = (
    "Most seconds to search; with a model a fifth of them is kept for timing its pieces as a whole"
    f" ({UNBOUND_S:g} without --seconds)."
)

Device = Annotated[str, typer.Option("--device", help="What to measure on: cuda, cuda:1, or replay:h100.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="model, bayesian, evolutionary, random or exhaustive.")]
Trials = Annotated[
    int | None,
    typer.Option("--trials", help="Most schedules to try; without --seconds 64, fewer when no gain is expected."),
]
Seconds = Annotated[float | None, typer.Option("--seconds", help=SECONDS_HELP)]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Try every schedule; short for --strategy exhaustive.")]

Workloads = Annotated[
    Path | None, typer.Option("--workloads", help="Tune all workloads of this file (JSON or JSON lines; - is stdin).")
]
Worth = Annotated[
    float,
    typer.Option(
        "--worth", min=0, help="Of many workloads, end when a device-minute saves less than so many % of a step."
    ),
]


def tune(
    operator: Annotated[
        str | None, typer.Argument(help="Name of an operator, such as matmul, or a Python file with a model.")
    ] = None,
    shape: options.MaybeShape = None,
    dtype: options.Dtype = "bf16",
    layout: options.Layout = "",
    epilogue: options.Epilogue = "",
    out_dtype: options.OutDtype = None,
    error_budget: options.ErrorBudget = None,
    attributes: options.Attributes = "",
    device: Device = "cuda",
    strategy: StrategyName = "model",
    trials: Trials = None,
    seconds: Seconds = None,
    seed: Annotated[int, typer.Option("--seed", help="Makes random choices repeatable.")] = 0,
    exhaustive: Exhaustive = False,
    workloads: Workloads = None,
    worth: Worth = 0.01,
    runner: options.RunnerName = "local",
    address: options.Address = None,
    devices: options.DeviceCount = None,
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Find the fastest schedules and keep every trial; an interrupted run goes on where it stopped.

    Of one workload (an operator and a shape), or under one budget of all those of a model (a Python file with `model`
    and `inputs`, or model.py:function that returns both) or of a list (--workloads), where most is to be saved first.
    """
    where = Where(device, runner, address, devices)
    chosen = "exhaustive" if exhaustive else strategy
    settings = load_settings(db=db)
    if workloads is not None or is_model(operator):
        if shape is not None or (workloads is not None and operator is not None):
            raise UsageError("a shape, a model and --workloads exclude each other; give one of them")
        plan = Plan(chosen, trials, seconds, worth / 100, seed, settings.models)
        tune_all(settings, where, operator, workloads, plan, json)
        return
    if operator is None or shape is None:
        raise UsageError("tune needs an operator with --shape, a Python file with a model, or --workloads")
    args = options.workload_args(operator, shape, dtype, layout, epilogue, out_dtype, error_budget, attributes)
    request = TuneRequest(args.workload(), chosen, Budget(trials, seconds), seed, models=settings.models)
    report = run(settings, where, request)
    if json:
        print_json(report)
    else:
        print_best(report)
        _print_run(report.run)


def run(settings: Settings, where: Where, request: TuneRequest) -> TuneReport:
    """Tune on one device or several together, with progress on standard error; Ctrl-C ends it with exit code 1."""
    with contextlib.ExitStack() as stack:
        # first, because its processes start while the database is opened
        runner = stack.enter_context(_opened(where, settings))
        store = stack.enter_context(Store.open(settings.db))
        try:
            with _progress_bar() as on_trial:
                result = tune_and_store(store, runner, request, on_trial)
        except KeyboardInterrupt:
            to_stderr("Stopped. The trials so far are stored; run the same command again to go on.")
            raise typer.Exit(1) from None
        best = tell(Answers(store, settings.models).best(request.workload, runner.device, runner.toolchain))
    return TuneReport(**best.model_dump(by_alias=True), run=_run_out(request, result))


@contextlib.contextmanager
def _opened(where: Where, settings: Settings) -> Iterator[Runner]:
    """The device as typed, or a fleet where several or a cluster were asked for."""
    if where.runner == "local" and where.count in (None, 1):
        with contextlib.closing(open_runner(where.device, recorded=settings.recorded)) as runner:
            yield runner
        return
    with open_whole_fleet(where, settings) as whole:
        yield whole


@contextlib.contextmanager
def _progress_bar() -> Iterator[OnTrial]:
    console = Console(stderr=True)
    columns = (
        TextColumn("tuning"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("building", total=None)

        def on_trial(trial: Trial, progress: SearchProgress) -> None:
            best = "nothing works yet" if progress.best_us is None else f"best {progress.best_us:.2f} us"
            bar.update(task, completed=progress.trials, total=progress.budget_trials, description=best)

        yield on_trial


def _run_out(request: TuneRequest, result: TuneResult) -> RunOut:
    return RunOut(
        strategy=request.strategy,
        seed=request.seed,
        new_trials=result.new_trials,
        known_trials=result.known_trials,
        failed_trials=result.failed_trials,
        seconds=round(result.seconds, 3),
    )


def _print_run(run: RunOut) -> None:
    known = f" and {run.known_trials} known" if run.known_trials else ""
    to_stderr(f"{run.new_trials} new trials{known}, {run.failed_trials} failed, in {run.seconds:.1f} s")
