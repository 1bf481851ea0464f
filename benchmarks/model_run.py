"""A model of benchmarks/models compiled by the backend and by Inductor's modes, timed in turns inside CUDA graphs; its
inference, or a step of training (NAME:training).

Default and ours come first: they are compiled and timed, and their row is handed on, before max-autotune begins, which
may take long and be cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model_step import Step, errors
from torch._inductor import utils as inductor_utils
from torch._inductor.async_compile import AsyncCompile

from kernelwright.compiler.collect import load_model
from kernelwright.compiler.report import Report
from kernelwright.kernels.device import present_device
from kernelwright.kernels.triton_adapter import settle_compiler
from kernelwright.search.timing import Effort, Timer, median, paired_ratio

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "meta"
"""Where models lie."""

FOLDER = Path(__file__).resolve().parent / "models"

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
"""Without graphs of its own: the timer puts every contender into one."""

PLAIN = ("ours", "default")
"""Contenders that compile in seconds, from empty caches. The second finds more of the process warm: ours is first."""

TUNED = ("max_autotune", "ours_max")
"""Contenders for which Inductor measures templates; they may share what it has measured before (`Plan.cache`)."""

RECOMPILES = 64
"""Each contender is a version of the same code for dynamo, which stops at eight."""

EFFORT = Effort(graph_ms=12.0, rounds=15, most_calls=4)


class OutOfTime(BaseException):
    """A compile took longer than it may; no `except Exception` of the compiler's may swallow it."""


@dataclasses.dataclass
class Contender:
    """One way to compile a model, and what was seen of it. run: None where it did not come that far."""

    name: str
    options: dict[str, Any]
    run: Callable[[], Any] | None = None
    compile_s: float | None = None
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak_gb: float | None = None
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is run. modes: see `contenders`. extra: settings of Inductor's for all. cache: a folder that keeps
    what max-autotune measured and compiled, for its next run of any model. compiles: how often PLAIN are compiled, of
    which the fastest counts."""

    db: str
    modes: tuple[str, ...]
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache: str | None = None
    compiles: int = 1


def target_of(name: str) -> str:
    """The file of a model, "llama_block" or "llama_block:decode", as `load_model` takes it."""
    file, _, function = name.partition(":")
    return f"{FOLDER / file}.py" + (f":{function}" if function else "")


def contenders(db: str, told: Report, modes: Sequence[str], extra: Mapping[str, Any]) -> list[Contender]:
    """Those that were asked for, of "ours", "default", "max_autotune" and "ours_max", in this order. extra: settings of
    Inductor's that all of them get."""
    tuned = {**torch._inductor.list_mode_options(MAX_AUTOTUNE), **extra}
    # caches are empty, so that every graph is decided; default looks its graphs up and keeps them, too
    kept = {"fx_graph_cache": True}
    known: dict[str, dict[str, Any]] = {
        "ours": {"backend": "kernelwright", "options": {"db": db, "report": told, **kept, **extra}},
        "default": {"options": dict(extra)},
        "max_autotune": {"options": tuned},
        "ours_max": {"backend": "kernelwright", "options": {"db": db, **tuned}},
    }
    return [Contender(name, known[name]) for name in known if name in modes]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """OutOfTime when the block takes longer."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Inductor and Triton keep what they compile in this folder. Where Triton had nothing there, it begins with what
    tuning has compiled on this machine, and with nothing of another contender's."""
    inductor_utils.clear_caches()
    triton = folder / "triton"
    if not triton.exists():
        shared = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        if shared.is_dir():
            # what is copied is not written again, so that links will do; another process may clean up meanwhile
            with contextlib.suppress(shutil.Error):
                shutil.copytree(shared, triton, copy_function=linked)
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(triton)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def linked(source: str, target: str) -> None:
    """A second name of a file, or a copy where file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compile_one(one: Contender, step: Step, want: Sequence[torch.Tensor], folder: Path, base_bytes: int) -> None:
    """Compile, then look at errors and memory. What goes wrong becomes `failure`. base_bytes: what model and inputs
    take, to which a step's memory is added."""
    compiled = torch.compile(step.model, dynamic=False, **one.options)
    began = time.monotonic()
    try:
        with caches_in(folder):
            began = time.monotonic()
            found = step.run(compiled)
            torch.cuda.synchronize()
        one.compile_s = round(time.monotonic() - began, 2)
        one.errors = errors(found, want)
        del found
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.run(compiled)
        one.peak_gb = round((torch.cuda.max_memory_allocated() - before + base_bytes) / 2**30, 3)
        one.run = lambda: step.run(compiled)
    except OutOfTime:
        one.failure = f"stopped after {time.monotonic() - began:.0f} s of compiling"
    except Exception as error:
        one.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def compile_again(one: Contender, step: Step) -> None:
    """Compile once more with empty caches; the faster time counts."""
    # else dynamo finds what it compiled before
    torch._dynamo.reset()
    compiled = torch.compile(step.model, dynamic=False, **one.options)
    with fresh_folder() as folder, caches_in(folder):
        began = time.monotonic()
        step.run(compiled)
        torch.cuda.synchronize()
        seconds = round(time.monotonic() - began, 2)
    one.compile_s = min(seconds, one.compile_s or seconds)


@contextlib.contextmanager
def fresh_folder() -> Iterator[Path]:
    """An empty folder that is removed behind the block."""
    with tempfile.TemporaryDirectory(prefix="inductor-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Say how long the block took, on the log and under its name in `seconds`."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {seconds[name]} s", flush=True)


class Run:
    """A model's contenders and what was found out about them so far.

    Times in milliseconds, ratios over ours, errors, compile seconds, memory, and the saving that the records predict
    beside the measured one.
    """

    def __init__(self, name: str, plan: Plan, until: float) -> None:
        """until: reading of time.monotonic at which compiling ends."""
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
        self.name, self.plan, self.until = name, plan, until
        self.seconds: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {"stages_s": self.seconds}
        gc.collect()
        # of models that this process ran before
        left = torch.cuda.memory_allocated()
        with stage("model", self.seconds):
            model, inputs = load_model(target_of(name))
        assert isinstance(model, torch.nn.Module)
        self.step, self.told = Step(model, inputs), Report()
        self.base_bytes = torch.cuda.memory_allocated() - left
        self.contenders = contenders(plan.db, self.told, plan.modes, plan.extra)
        with stage("first compile", self.seconds):
            self.facts["start_s"] = started(next(model.parameters()).device, plan)
        with stage("eager", self.seconds):
            self.want = self.step.precise()
            eager = errors(self.step.run(model), self.want)
        self.facts |= {f"eager_{what}": value for what, value in eager.items()}

    def compile(self, names: Sequence[str]) -> bool:
        """Compile those of `names` that were asked for; whether one can be timed."""
        group = [one for one in self.contenders if one.name in names]
        for place, one in enumerate(group):
            left = self.until - time.monotonic()
            # what ours_max measures besides, max-autotune has measured before it
            share = 0.75 * left if one.name in TUNED and place + 1 < len(group) else left
            try:
                with within(share), stage(one.name, self.seconds), self._folder(one) as folder:
                    compile_one(one, self.step, self.want, folder, self.base_bytes)
            except OutOfTime:
                one.failure = "no time left"
        return any(one.run is not None for one in group)

    def compile_again(self) -> None:
        """Compile PLAIN in the other order, as often as the plan says and there is time."""
        for _ in range(1, self.plan.compiles):
            for one in [one for one in reversed(self.contenders) if one.name in PLAIN and one.run]:
                decided = len(self.told.decisions)
                left = self.until - time.monotonic()
                with contextlib.suppress(OutOfTime), within(left), stage(f"{one.name} again", self.seconds):
                    compile_again(one, self.step)
                del self.told.decisions[decided:]

    def time(self) -> None:
        """Time all that run, in turns."""
        with stage("timing", self.seconds):
            self.times, control = timed(self.contenders, self.step, Timer(present_device(0).l2_bytes))
        self.facts |= control

    def row(self) -> dict[str, Any]:
        """What is known so far."""
        mode = "training" if self.step.trains else "inference"
        row: dict[str, Any] = {"model": self.name, "mode": mode, "group": mode, **self.facts}
        row["contenders"] = {one.name: seen(one, self.times.get(one.name)) for one in self.contenders}
        row |= compared(self.times) | saving(self.told, self.times)
        return {**row, "inductor": dict(self.plan.extra)}

    @contextlib.contextmanager
    def _folder(self, one: Contender) -> Iterator[Path]:
        if self.plan.cache is None or one.name not in TUNED:
            with fresh_folder() as folder:
                yield folder
            return
        # a training step has many of the inference's products
        folder = Path(self.plan.cache).resolve()
        if folder.exists():
            self.facts["from_cache"] = sorted({*self.facts.get("from_cache", ()), one.name})
        yield folder


def run_model(name: str, plan: Plan, until: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run a model and hand on its row whenever more is known. until: reading of time.monotonic at which compiling
    ends."""
    run = Run(name, plan, until)
    for names in (PLAIN, TUNED):
        if run.compile(names):
            keep(run.row())
            run.time()
        keep(run.row())
    run.compile_again()
    keep(run.row())


def started(device: torch.device, plan: Plan) -> dict[str, float]:
    """Seconds of a first, small compile by Inductor and by our backend behind it: what each imports and starts once in
    a process, so that it counts for no model."""
    # Inductor's workers keep the assembler that they are started with, and what they compile for max-autotune is found
    # only by a process with the same one
    settle_compiler()
    x = torch.ones(64, 64, device=device)
    told = {}
    ways: dict[str, dict[str, Any]] = {"default": {}, "ours": {"backend": "kernelwright", "options": {"db": plan.db}}}
    for name, options in ways.items():
        began = time.monotonic()
        with fresh_folder() as folder, caches_in(folder):
            torch.compile(lambda x: (x @ x).relu() + 1, dynamic=False, **options)(x)
            # else the first model would be compiled without its helpers
            AsyncCompile.wait_pool_ready()
        told[name] = round(time.monotonic() - began, 2)
    torch._dynamo.reset()
    return told


def timed(
    found: Sequence[Contender], step: Step, timer: Timer
) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Readings in microseconds by contender; what eager took, and how far two readings of one contender are apart."""
    ready = [one for one in found if one.run is not None]
    calls = [one.run for one in ready if one.run is not None]
    if not calls:
        return {}, {}
    # the first contender runs twice: what these differ by is noise
    calls.append(calls[0])
    try:
        readings = timer.samples([*calls, lambda: step.run(step.model)], EFFORT)
        eager_ms = in_ms(readings.pop())
    except RuntimeError:
        # a model may wait for the GPU in eager mode, which no CUDA graph can record
        readings, eager_ms = timer.samples(calls, EFFORT), None
    control = {"eager_ms": eager_ms, "aa_ratio": round(paired_ratio(readings[-1], readings[0]), 4)}
    return dict(zip([one.name for one in ready], readings, strict=False)), control


def in_ms(readings_us: Sequence[float]) -> float:
    """The median in milliseconds."""
    return round(median(readings_us) / 1e3, 4)


def seen(one: Contender, readings: Sequence[float] | None) -> dict[str, Any]:
    """A contender's part of a row."""
    time_ms = None if readings is None else in_ms(readings)
    told = {"ms": time_ms, "compile_s": one.compile_s, "error": None, **one.errors, "peak_gb": one.peak_gb}
    return {**told, **({"failure": one.failure} if one.failure else {})}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """Each rival's time over ours ("over"), and over ours with max-autotune for the rest ("over_max"); "ratio" is the
    least of the first, None where ours or all others are missing."""
    over = {
        field: {
            name: round(paired_ratio(readings, times[mine]), 4)
            for name, readings in times.items()
            if mine in times and not name.startswith("ours")
        }
        for field, mine in (("over", "ours"), ("over_max", "ours_max"))
    }
    return {"ratio": min(over["over"].values(), default=None), **over}


def saving(told: Report, times: dict[str, list[float]]) -> dict[str, Any]:
    """What the records say that our kernels save in a step, what was measured, and every decision with its reason."""
    pairs = [(d.vendor_us, d.expected_us) for d in told.replaced]
    predicted = sum(vendor - ours for vendor, ours in pairs if vendor is not None and ours is not None)
    row: dict[str, Any] = {"replaced": len(told.replaced), "places": len(told.decisions)}
    row["predicted_saving_us"] = round(predicted, 1)
    if "ours" in times and "default" in times:
        row["measured_saving_us"] = round(median(times["default"]) - median(times["ours"]), 1)
    return row | {"decisions": str(told).splitlines()}
