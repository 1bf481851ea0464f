"""A model of benchmarks/models compiled by the backend and by Inductor's modes, timed in turns inside CUDA graphs; its
inference, or a step of training (NAME:training)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model_step import Step, errors
from torch._inductor import utils as inductor_utils

from kernelwright.compiler.collect import load_model
from kernelwright.compiler.report import Report
from kernelwright.search.timing import Effort, Timer, median, paired_ratio

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "meta"
"""Where models lie."""

FOLDER = Path(__file__).resolve().parent / "models"

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
"""Without graphs of its own: the timer puts every contender into one."""

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


def target_of(name: str) -> str:
    """The file of a model, "llama_block" or "llama_block:decode", as `load_model` takes it."""
    file, _, function = name.partition(":")
    return f"{FOLDER / file}.py" + (f":{function}" if function else "")


def contenders(db: str, told: Report, modes: Sequence[str], extra: Mapping[str, Any]) -> list[Contender]:
    """Those that were asked for, of "default", "ours", "max_autotune" and "ours_max", in this order. extra: settings of
    Inductor's that all of them get."""
    tuned = {**torch._inductor.list_mode_options(MAX_AUTOTUNE), **extra}
    known: dict[str, dict[str, Any]] = {
        "default": {"options": dict(extra)},
        "ours": {"backend": "kernelwright", "options": {"db": db, "report": told, **extra}},
        "max_autotune": {"options": tuned},
        "ours_max": {"backend": "kernelwright", "options": {"db": db, "report": Report(), **tuned}},
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
def nothing_kept() -> Iterator[None]:
    """Inductor begins with empty caches. Triton's stay: kernels that were tuned on this machine are compiled there."""
    inductor_utils.clear_caches()
    triton = {"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))}
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="inductor-"), **triton}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def compile_one(one: Contender, step: Step, want: Sequence[torch.Tensor]) -> None:
    """Compile with empty caches, then look at errors and memory. What goes wrong becomes `failure`."""
    compiled = torch.compile(step.model, dynamic=False, **one.options)
    began = time.monotonic()
    try:
        with nothing_kept():
            found = step.run(compiled)
            torch.cuda.synchronize()
        one.compile_s = round(time.monotonic() - began, 2)
        one.errors = errors(found, want)
        del found
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step.run(compiled)
        one.peak_gb = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        one.run = lambda: step.run(compiled)
    except OutOfTime:
        one.failure = f"stopped after {time.monotonic() - began:.0f} s of compiling"
    except Exception as error:
        one.failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is run. modes: see `contenders`. extra: settings of Inductor's for all. l2_bytes: of the GPU."""

    db: str
    modes: tuple[str, ...]
    extra: Mapping[str, Any]
    l2_bytes: int


def run_model(name: str, plan: Plan, until: float) -> dict[str, Any]:
    """A row of the result of a model's step, which is one of training where its weights take gradients.

    Times in milliseconds, ratios over ours, errors, compile seconds, memory, and the saving that the records predict
    beside the measured one. until: reading of time.monotonic at which compiling ends."""
    torch._dynamo.reset()
    model, inputs = load_model(target_of(name))
    assert isinstance(model, torch.nn.Module)
    step, told = Step(model, inputs), Report()
    found = contenders(plan.db, told, plan.modes, plan.extra)
    want = step.precise()
    eager = errors(step.run(model), want)
    for one in found:
        try:
            with within(until - time.monotonic()):
                compile_one(one, step, want)
        except OutOfTime:
            one.failure = "no time left"
    del want
    times, control = timed(found, step, plan)
    mode = "training" if step.trains else "inference"
    row: dict[str, Any] = {"model": name, "mode": mode, "group": mode}
    row |= {f"eager_{what}": value for what, value in eager.items()} | control
    row["contenders"] = {one.name: seen(one, times.get(one.name)) for one in found}
    return row | compared(times) | saving(told, times)


def timed(found: Sequence[Contender], step: Step, plan: Plan) -> tuple[dict[str, list[float]], dict[str, float | None]]:
    """Readings in microseconds by contender; what eager took, and how far two readings of one contender are apart."""
    ready = [one for one in found if one.run is not None]
    calls = [one.run for one in ready if one.run is not None]
    if not calls:
        return {}, {}
    timer = Timer(plan.l2_bytes)
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
    """Each contender's time over ours ("ratio": the least of them, None where ours or all others are missing)."""
    if "ours" not in times:
        return {"ratio": None, "over": {}}
    over = {
        name: round(paired_ratio(readings, times["ours"]), 4)
        for name, readings in times.items()
        if not name.startswith("ours")
    }
    return {"ratio": min(over.values(), default=None), "over": over}


def saving(told: Report, times: dict[str, list[float]]) -> dict[str, Any]:
    """What the records say that our kernels save in a step, what was measured, and every decision with its reason."""
    pairs = [(d.vendor_us, d.expected_us) for d in told.replaced]
    predicted = sum(vendor - ours for vendor, ours in pairs if vendor is not None and ours is not None)
    row: dict[str, Any] = {"replaced": len(told.replaced), "places": len(told.decisions)}
    row["predicted_saving_us"] = round(predicted, 1)
    if "ours" in times and "default" in times:
        row["measured_saving_us"] = round(median(times["default"]) - median(times["ours"]), 1)
    return row | {"decisions": str(told).splitlines()}
