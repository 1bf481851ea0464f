"""`kernelwright record` and `pack`: sweeps of a GPU, kept as recordings to replay and to train on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelwright.cost_model import own_model, packaged_model
from kernelwright.cost_model.model import CostModel
from kernelwright.errors import UsageError
from kernelwright.search import Runner, open_runner
from kernelwright.search.recording import DEFAULT_COUNT, Limits, Recorded, Wanted, is_complete, record_all
from kernelwright.search.recording_files import RecordingFolder, parse_wanted, read_trials
from kernelwright.service import cli_options as options
from kernelwright.service.cli_output import print_json, to_stderr
from kernelwright.service.settings import Settings, load_settings
from kernelwright.service.tuning import code_of
from kernelwright.types import Trial

if TYPE_CHECKING:
    from kernelwright.kernels.build import BuildPool

Out = Annotated[Path, typer.Option("--out", help="Folder of recordings: OUT/<gpu>/<operator>.parquet.")]


def record(
    workloads: Annotated[
        Path, typer.Option("--workloads", help="JSON or JSON lines of workloads; - is standard input.")
    ],
    out: Out = Path("recorded"),
    device: Annotated[str, typer.Option("--device", help="What to measure on: cuda, cuda:1, or replay:h100.")] = "cuda",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="End after so many seconds.")] = 540,
    workload_seconds: Annotated[float, typer.Option("--workload-seconds", min=1, help="Most seconds a workload.")] = 40,
    count: Annotated[int, typer.Option("--count", min=1, help="Schedules to sample where the file says none.")] = (
        DEFAULT_COUNT
    ),
    ahead: Annotated[
        int | None, typer.Option("--ahead", min=0, help="Compilers that work ahead. [default: two thirds of the cores]")
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure a sample of each workload's schedules and what is near the best; started again, it goes on.

    Every finished workload is on disk; at the end all are packed into one Parquet file an operator.
    """
    text = sys.stdin.read() if str(workloads) == "-" else _read(workloads)
    wanted = parse_wanted(text, count)
    settings = load_settings()
    limits = Limits(time.monotonic() + seconds, workload_seconds)
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(contextlib.closing(open_runner(device, recorded=settings.recorded)))
        pool = stack.enter_context(_pool(device, ahead))
        summaries = [
            _record_operator(part, runner, _model(operator, settings), limits, RecordingFolder(out), pool)
            for operator, part in _by_operator(wanted).items()
        ]
    if json:
        print_json({"recordings": summaries})
    else:
        for summary in summaries:
            typer.echo(
                f"{summary['file']}: {summary['trials']} trials; {summary['complete']} of {summary['wanted']} "
                f"workloads are complete, {summary['new']} of them new"
            )


def pack(
    files: Annotated[list[Path], typer.Argument(help="Recordings, JSON lines of trials, or folders of them.")],
    out: Out = Path("recorded"),
    json: options.Json = False,
) -> None:
    """Merge recordings into a folder of recordings; a trial that is there already is not added again."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in read_trials(files):
        groups.setdefault((trial.device.slug, trial.workload.operator), []).append(trial)
    folder = RecordingFolder(out)
    counts = {str(folder.path(*key)): folder.pack(*key, more=trials) for key, trials in groups.items()}
    if json:
        print_json({"recordings": [{"file": file, "trials": count} for file, count in counts.items()]})
    else:
        for file, trials in counts.items():
            typer.echo(f"{file}: {trials} trials")


def _record_operator(
    wanted: Sequence[Wanted],
    runner: Runner,
    model: CostModel,
    limits: Limits,
    folder: RecordingFolder,
    pool: BuildPool | None,
) -> dict[str, Any]:
    """Record the workloads of one operator that are not complete yet, and pack them; what there is afterwards."""
    slug, operator = runner.device.slug, wanted[0].workload.operator
    known = _comparable(folder.known(slug, operator), runner)
    work = [(w, known.get(w.workload.key, [])) for w in wanted]
    missing = [(w, trials) for w, trials in work if not is_complete(trials)]
    complete = len(work) - len(missing)
    new = 0
    for done in record_all(missing, runner, model, limits, pool):
        if done.trials:
            folder.add(done.trials)
        new += done.complete
        to_stderr(f"{limits.end - time.monotonic():5.0f} s left, took {done.seconds:4.1f} s  {_told(done)}")
    trials = folder.pack(slug, operator)
    path = folder.path(slug, operator)
    return {"file": str(path), "trials": trials, "wanted": len(work), "complete": complete + new, "new": new}


def _comparable(trials: Sequence[Trial], runner: Runner) -> dict[str, list[Trial]]:
    """By workload key, the trials that this runner would measure alike: the same toolchain and kernel sources."""
    out: dict[str, list[Trial]] = {}
    prints: dict[str, Mapping[str, str]] = {}
    for trial in trials:
        key = trial.workload.key
        if key not in prints:
            prints[key] = code_of(runner, trial.workload)
        same = trial.toolchain == runner.toolchain and trial.device.key == runner.device.key
        if same and prints[key].get(trial.schedule.template, "") == trial.template_fingerprint:
            out.setdefault(key, []).append(trial)
    return out


def _by_operator(wanted: Sequence[Wanted]) -> dict[str, list[Wanted]]:
    out: dict[str, list[Wanted]] = {}
    for one in wanted:
        out.setdefault(one.workload.operator, []).append(one)
    return out


def _model(operator: str, settings: Settings) -> CostModel:
    return packaged_model(operator) if settings.models is None else own_model(operator, settings.models)


@contextlib.contextmanager
def _pool(device: str, workers: int | None) -> Iterator[BuildPool | None]:
    """Compilers that work ahead on a real GPU; a replay compiles nothing."""
    # Late, as the rest of what only a real GPU needs.
    from kernelwright.kernels.cores import usable_cores

    workers = max(1, usable_cores() * 2 // 3) if workers is None else workers
    if device.startswith("replay") or not workers:
        yield None
        return
    # Late, because it brings torch and triton.
    from kernelwright.kernels.build import BuildPool

    with BuildPool(workers) as pool:
        yield pool


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--workloads must be a file with workloads as JSON, but it cannot be read: {error}"
        ) from error


def _told(done: Recorded) -> str:
    """One line: how many trials, how they ended, the best time of each template and the vendor's."""
    status = Counter(trial.measurement.status.value for trial in done.trials)
    best: dict[str, float] = {}
    for trial in done.trials:
        if trial.measurement.median_us is not None:
            name = trial.schedule.template
            best[name] = min(best.get(name, float("inf")), trial.measurement.median_us)
    ended = " ".join(f"{count} {name}" for name, count in status.most_common())
    times = " ".join(f"{name}={us:.1f}" for name, us in best.items())
    return f"{done.workload}: {ended} | {times}{'' if done.complete else ' | to be gone on with'}"
