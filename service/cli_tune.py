"""`kernelwright tune`: search with a progress bar, keep every trial, print the winner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernelwright.db import Store
from kernelwright.search import Budget, open_runner
from kernelwright.search import Progress as SearchProgress
from kernelwright.service import cli_options as options
from kernelwright.service.answer_json import tell
from kernelwright.service.answering import Answers
from kernelwright.service.cli_output import print_best, print_json, to_stderr
from kernelwright.service.schemas import RunOut, TuneReport
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.tuning import OnTrial, TuneRequest, TuneResult, tune_and_store
from kernelwright.types import Trial

Device = Annotated[str, typer.Option("--device", help="What to measure on: cuda, cuda:1, or replay:h100.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="model, bayesian, evolutionary, random or exhaustive.")]
Trials = Annotated[int | None, typer.Option("--trials", help="Most schedules to try; 64 without --seconds.")]
Seconds = Annotated[float | None, typer.Option("--seconds", help="Most seconds to search.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Try every schedule; short for --strategy exhaustive.")]


def tune(
    operator: Annotated[str, typer.Argument(help="Name of the operator, such as matmul.")],
    shape: options.Shape,
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
    db: options.Database = None,
    json: options.Json = False,
) -> None:
    """Find the fastest schedule of a workload and keep every trial; an interrupted run goes on where it stopped."""
    args = options.workload_args(operator, shape, dtype, layout, epilogue, out_dtype, error_budget, attributes)
    chosen = "exhaustive" if exhaustive else strategy
    settings = load_settings(db=db)
    request = TuneRequest(args.workload(), chosen, Budget(trials, seconds), seed, models=settings.models)
    report = run(settings, device, request)
    if json:
        print_json(report)
    else:
        print_best(report)
        _print_run(report.run)


def run(settings: Settings, device: str, request: TuneRequest) -> TuneReport:
    """Tune on a device as typed, showing progress on standard error; Ctrl-C ends it with exit code 1."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.db))
        runner = stack.enter_context(contextlib.closing(open_runner(device, recorded=settings.recorded)))
        try:
            with _progress_bar() as on_trial:
                result = tune_and_store(store, runner, request, on_trial)
        except KeyboardInterrupt:
            to_stderr("Stopped. The trials so far are stored; run the same command again to go on.")
            raise typer.Exit(1) from None
        best = tell(Answers(store, settings.models).best(request.workload, runner.device, runner.toolchain))
    return TuneReport(**best.model_dump(by_alias=True), run=_run_out(request, result))


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
