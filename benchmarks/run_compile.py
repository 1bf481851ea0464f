"""torch.compile(backend="kernelwright") on the GPU here: numbers, our kernels in the profile, time beside Inductor.

    scripts/gpu-bench compile --db sqlite:///compile.db --out layers.json
    kernelwright tune benchmarks/models/llama_block.py --db sqlite:///models.db --seconds 600
    scripts/gpu-bench compile --models llama_block,resnet50:training --db sqlite:///models.db --out models.json
    python benchmarks/run_compile.py --table models.json                     the file as a table, anywhere
    python benchmarks/run_compile.py --merge old.json new.json --out models.json    one file of several runs

Without --models, tunes the two products of Linear, GELU, Linear first (32 trials each), then compiles the model with
that database. With it, compiles models of benchmarks/models (NAME or NAME:FUNCTION) with what the database holds; where
their weights take gradients, as in NAME:training, forward and backward of a step. Each model has a process of its own,
which ends in time, or with --together all run in one: half a minute less for each, but a crash ends them all. A run
that is cut off goes on with --resume, and with --cache max-autotune goes on, too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import model_table
import report
import torch
from model_run import Plan, run_model
from model_runner import COMPILING, LEAST_S, Batch, how_complete, is_complete, run_batch

from kernelwright.compiler.report import Report
from kernelwright.db import Store
from kernelwright.kernels.device import present_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search import Budget
from kernelwright.search.child_runner import ChildRunner
from kernelwright.search.timing import FINAL, TIMER_VERSION, Timer, median, paired_ratio
from kernelwright.service.tuning import TuneRequest, tune_and_store

SHARES = 2.0
"""Even shares of the time left that a model may take with --together: a few that are done are worth more than many that
are almost done."""


def profiled_names(call: Any) -> list[str]:
    """Names of the GPU kernels that one call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if event.device_time_total > 0]


def error_of(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((out.double() - want).norm() / want.norm())


def check(rows: int, width: int, hidden: int, dtype: torch.dtype, db: str, runner: ChildRunner) -> dict[str, Any]:
    """Tune, compile and compare one Linear, GELU, Linear; a row of the result."""
    # sizes seen before would make the next model's sizes symbolic
    torch._dynamo.reset()
    store = Store.open(db)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    tuned = [
        tune_and_store(store, runner, TuneRequest(workload, budget=Budget(32, 30)), lambda trial, progress: None).record
        for workload in (
            matmul_workload(rows, hidden, width, name, epilogue=("bias", "gelu")),
            matmul_workload(rows, width, hidden, name, epilogue=("bias",)),
        )
    ]
    torch.manual_seed(0)
    layers = (torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width))
    model = torch.nn.Sequential(*layers).to("cuda", dtype)
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    told = Report()
    ours = torch.compile(model, backend="kernelwright", options={"db": db, "report": told})
    theirs = torch.compile(model)
    with torch.no_grad():
        want = model.double()(x.double())
        model.to(dtype)
        errors = {
            "ours": error_of(ours(x), want),
            "eager": error_of(model(x), want),
            "inductor": error_of(theirs(x), want),
        }
        names = profiled_names(lambda: ours(x))
        timer = Timer(runner.device.l2_bytes)
        mine, inductor, eager = timer.samples([lambda: ours(x), lambda: theirs(x), lambda: model(x)], FINAL)
    return {
        "model": f"Linear({width}, {hidden}), GELU, Linear({hidden}, {width}) on {rows} rows, {name}",
        "mode": "inference",
        "ours_ms": round(median(mine) / 1e3, 4),
        "default_ms": round(median(inductor) / 1e3, 4),
        "eager_ms": round(median(eager) / 1e3, 4),
        "ratio": round(paired_ratio(inductor, mine), 4),
        "max_error": errors,
        "gradient_error": training_error(model, ours, x),
        "kernels": names,
        "decisions": str(told).splitlines(),
        "tuned": [f"{record.workload}: {record.schedule} {record.winner} {record.speedup:.3f}" for record in tuned],
    }


def training_error(model: torch.nn.Module, compiled: Any, x: torch.Tensor) -> float:
    """Largest relative difference of a parameter's gradient between eager and compiled."""
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad.double().clone() for p in model.parameters() if p.grad is not None])
    return max(error_of(one, other) for other, one in zip(*gradients, strict=True))


def run_layers(db: str, out: Path) -> None:
    """Linear, GELU, Linear in three sizes, tuned here."""
    before = report.clocks()
    runner = ChildRunner()
    rows = [
        check(777, 4096, 14336, torch.bfloat16, db, runner),
        check(16, 4096, 14336, torch.bfloat16, db, runner),
        check(2048, 1024, 4099, torch.float16, db, runner),
    ]
    runner.close()
    write(out, rows, before)
    for row in rows:
        print(row["model"], row["ratio"], row["max_error"], row["gradient_error"], row["kernels"], flush=True)
        print(*row["decisions"], sep="\n", flush=True)
        if not any("matmul_" in name for name in row["kernels"]):
            print("no kernel of ours ran in", row["model"], flush=True)


def run_models(args: argparse.Namespace) -> None:
    """Whole models; the file is written after each of them."""
    before, modes = report.clocks(), args.modes.split(",")
    rows = {row["model"]: row for row in model_table.read([args.out])} if args.resume and args.out.exists() else {}
    names = [name for name in args.models.split(",") if not is_complete(rows.get(name, {}), modes)]
    plan = {"db": args.db, "modes": modes, "extra": json.loads(args.inductor)}
    plan |= {"cache": args.cache and str(args.cache.resolve()), "compiles": args.compiles}
    logs = args.out.parent / f"{args.out.stem}_logs"
    batch = Batch(names, plan, args.gpus.split(","), args.total_seconds, logs, args.tune)

    def keep(row: dict[str, Any]) -> None:
        name = row["model"]
        print(*(told(row) if "contenders" in row else [f"{name}: {row['failure']}"]), sep="\n", flush=True)
        row = {**row, "measured": report.origin()}
        # an older row that came further is worth more
        if name not in rows or how_complete(row, modes) >= how_complete(rows[name], modes):
            rows[name] = row
        write(args.out, list(rows.values()), before)

    if args.together:
        run_together(names, Plan(**{**plan, "modes": tuple(modes)}), args.total_seconds, keep)
    else:
        run_batch(batch, keep)


def run_together(
    names: Sequence[str], plan: Plan, total_seconds: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run the models in this process. What raises ends its model alone."""
    end = time.monotonic() + total_seconds
    for place, name in enumerate(names):
        now = time.monotonic()
        if end - now < LEAST_S:
            keep({"model": name, "ratio": None, "failure": "no time left"})
            continue
        share = min(SHARES / (len(names) - place), 1) * (end - now)
        try:
            run_model(name, plan, now + COMPILING * share, keep)
        except Exception as error:
            keep({"model": name, "ratio": None, "failure": f"{type(error).__name__}: {error}"[:300]})
        torch.cuda.empty_cache()


def merge(files: Sequence[Path], out: Path) -> None:
    """Write one file of several, oldest first; the last one's machine and command stand above the rows."""
    last = json.loads(files[-1].read_text(encoding="utf-8"))
    rows = model_table.merged(files)
    content = {**last, "summary": report.summary(rows), "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def told(row: dict[str, Any]) -> list[str]:
    """A model's row in words."""
    eager = {name: value for name, value in row.items() if name.startswith("eager_")}
    lines = [f"{row['model']} ({row['mode']}): {row['replaced']} of {row['places']} replaced, {eager}"]
    lines += [f"  {name}: {values}" for name, values in row["contenders"].items()]
    savings = f"{row['predicted_saving_us']} us predicted, {row.get('measured_saving_us')} us measured"
    lines.append(f"  time over ours: {row['over']}, over ours_max: {row['over_max']}; A/A {row.get('aa_ratio')}")
    lines.append(f"  saved of default: {savings}; first compile of a process: {row['start_s']}")
    return lines + ([f"  {row['failure']}"] if "failure" in row else [])


def write(out: Path, rows: list[dict[str, Any]], before: str) -> None:
    """Write the result file."""
    toolchain, device = current_toolchain(TIMER_VERSION), present_device(0)
    clocks = {"before": before, "after": report.clocks()}
    versions = {"driver": toolchain.driver, "torch": toolchain.torch, "triton": toolchain.triton}
    report.write(out, rows, gpu=device.name, clocks=clocks, **versions)


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="the result file; needed but for --table")
    parser.add_argument("--table", type=Path, nargs="+", help="print these result files of models as a table")
    parser.add_argument("--merge", type=Path, nargs="+", help="put these files together, oldest first, into --out")
    parser.add_argument("--db", default="sqlite:///compile.db", help="URL of a database, or a SQLite file")
    parser.add_argument("--models", default="", help="in benchmarks/models, by commas; NAME:FUNCTION for a variant")
    parser.add_argument("--modes", default="default,ours,max_autotune,ours_max", help="which of these, by commas")
    parser.add_argument("--inductor", default="{}", help='settings of Inductor for all, such as {"freezing": true}')
    parser.add_argument("--total-seconds", type=float, default=1500, help="everything ends in time for this")
    parser.add_argument("--gpus", default="0", help="indices by commas; each runs one model at a time")
    parser.add_argument("--tune", type=float, default=0, help="seconds for which each model is tuned first")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what max-autotune measured, for its next run")
    parser.add_argument("--compiles", type=int, default=1, help="default and ours compile so often; the fastest counts")
    parser.add_argument(
        "--together", action="store_true", help="all models in this process, on its first GPU; not with --tune, --gpus"
    )
    parser.add_argument("--resume", action="store_true", help="go on with --out: only what it lacks is run")
    args = parser.parse_args()
    if not (args.out or args.table):
        parser.error("--out FILE is needed")
    if args.together and (args.tune or args.gpus != "0"):
        parser.error("--together runs in this process: tune before, and choose the GPU by CUDA_VISIBLE_DEVICES")
    args.db = args.db if "://" in args.db else f"sqlite:///{Path(args.db).resolve()}"
    return args


def main() -> None:
    """The command line."""
    args = arguments()
    if args.table:
        print(model_table.table(model_table.read(args.table)))
    elif args.merge:
        merge(args.merge, args.out)
    elif args.models:
        run_models(args)
    else:
        run_layers(args.db, args.out)


if __name__ == "__main__":
    main()
