"""Runs models of benchmarks/models, each in a process of its own that is ended in time, on one GPU or several.

A model that crashes, hangs or runs out of memory takes no other with it, and what it found out before stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_run import target_of

JOB = Path(__file__).resolve().parent / "model_job.py"

COMPILING = 0.85
"""The share of a model's seconds after which nothing more is compiled; the rest is for timing."""

LEAST_S = 20.0
"""With less time nothing is begun."""

LOOK_S = 2.0
"""How often a model's row is looked at while the model runs."""

TUNING_GRACE_S = 60.0
"""What tuning takes besides its seconds: a model is made and looked through, and the last comparison ends."""

_TUNE = "from kernelwright.service.cli import main; main()"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Models and how they are run. plan: fields of `model_run.Plan`. gpus: indices, each with one model at a time.
    total_seconds: for all. tune_seconds: how long each model is tuned first, if at all. logs: a folder."""

    names: Sequence[str]
    plan: Mapping[str, Any]
    gpus: Sequence[str]
    total_seconds: float
    logs: Path
    tune_seconds: float = 0.0


def run_batch(batch: Batch, keep: Callable[[Row], None]) -> None:
    """Run the models in order, each GPU the next one. `keep` takes a row whenever more is known of a model, from one
    thread at a time; the last one of a model may have a `failure`."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in batch.names:
        waiting.put(name)
    end, lock = time.monotonic() + batch.total_seconds, threading.Lock()

    def told(row: Row) -> None:
        with lock:
            keep(row)

    def serve(gpu: str) -> None:
        while True:
            with lock:
                left = waiting.qsize()
                share = (end - time.monotonic()) / max(1, math.ceil(left / len(batch.gpus)))
                try:
                    name = waiting.get_nowait()
                except queue.Empty:
                    return
            told(run_one(name, batch, gpu, share, told))

    threads = [threading.Thread(target=serve, args=(gpu,)) for gpu in batch.gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_one(name: str, batch: Batch, gpu: str, seconds: float, keep: Callable[[Row], None]) -> Row:
    """A model's row, as far as it came within its seconds; `failure` says what went wrong. keep: as of `run_batch`."""
    until = time.monotonic() + seconds
    batch.logs.mkdir(parents=True, exist_ok=True)
    log, out, job = (batch.logs / f"{name.replace(':', '-')}.{ending}" for ending in ("log", "row.json", "job.json"))
    out.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as text:
        if batch.tune_seconds > 0:
            command = [sys.executable, "-c", _TUNE, "tune", target_of(name), "--device", "cuda"]
            command += ["--seconds", f"{batch.tune_seconds:g}", "--db", batch.plan["db"]]
            # a model that could not be tuned is timed with what is known
            _run(command, gpu, min(batch.tune_seconds + TUNING_GRACE_S, until - time.monotonic() - LEAST_S), text)
        left = until - time.monotonic()
        if left < LEAST_S:
            return _without(name, "no time left")
        told = {"model": name, "plan": dict(batch.plan), "seconds": COMPILING * left, "out": str(out.resolve())}
        job.write_text(json.dumps(told), encoding="utf-8")
        seen: list[str] = []

        def look() -> None:
            found = out.read_text(encoding="utf-8") if out.exists() else ""
            if found and found not in seen:
                seen.append(found)
                keep(json.loads(found))

        failure = _run([sys.executable, str(JOB), str(job)], gpu, left, text, look)
    row: Row = json.loads(out.read_text(encoding="utf-8")) if out.exists() else _without(name, "")
    if failure:
        row["failure"] = f"{failure}: {_last_line(log)}"[:300]
    return row


def _run(command: Sequence[str], gpu: str, seconds: float, text: Any, look: Callable[[], None] = lambda: None) -> str:
    """Run a command for one GPU within a time, with all that it starts ended then; why it failed, or "". look: called
    every now and then meanwhile."""
    if seconds <= 0:
        return "no time left"
    # PYTHONSAFEPATH would keep the benchmarks from importing their neighbours
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env["CUDA_VISIBLE_DEVICES"] = gpu
    until = time.monotonic() + seconds
    process = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left, LOOK_S))
                return f"exit code {code}" if code else ""
            look()
        return f"ended after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _without(name: str, failure: str) -> Row:
    return {"model": name, "ratio": None, "failure": failure}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def is_complete(row: Mapping[str, Any], modes: Sequence[str]) -> bool:
    """Whether a row has a time of each of the modes."""
    return how_complete(row, modes) == len(modes)


def how_complete(row: Mapping[str, Any], modes: Sequence[str]) -> int:
    """Of how many of the modes a row has a time."""
    found = row.get("contenders", {})
    return sum(found.get(mode, {}).get("ms") is not None for mode in modes)
