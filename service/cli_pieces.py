"""What `kernelwright tune model.py` does once the workloads are tuned: pieces of the model are timed as a whole."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from kernelwright.errors import KernelwrightError
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.service.campaign import Plan
from kernelwright.service.cli_fleet import Where, tune_many
from kernelwright.service.cli_output import to_stderr
from kernelwright.service.device_args import GPU
from kernelwright.service.settings import Settings

SHARE = 0.2
"""Share of the seconds of a tuning that is kept for pieces."""

UNBOUND_S = 600.0
"""How long pieces are timed at most where no seconds are given: they have no number of trials that would end them."""

_TIME = "kernelwright.compiler.piece_file:begin"
_GRACE_S = 60.0

LEAST_S = 15.0
"""With less than this left nothing is timed: running the model and starting processes take as long."""


def tune_all(
    settings: Settings, where: Where, model: str | None, workloads: Path | None, plan: Plan, as_json: bool
) -> None:
    """Tune the workloads of a model or of a list, then time the pieces of the model."""
    began = time.monotonic()
    if model is None:
        tune_many(settings, where, None, workloads, plan, as_json)
        return
    for_them = dataclasses.replace(plan, seconds=for_workloads(where, plan.seconds))
    tune_many(settings, where, model, None, for_them, as_json)
    time_pieces(model, settings, where, began, plan.seconds)


def gpu_of(where: Where) -> int | None:
    """The number of the GPU of this machine that pieces are timed on; None where nothing is measured on one."""
    first = where.device.partition(",")[0].strip().lower()
    if where.runner != "local" or GPU.fullmatch(first) is None:
        return None
    return int(first.partition(":")[2] or 0)


def for_workloads(where: Where, seconds: float | None) -> float | None:
    """The seconds of a model's tuning that go to its workloads."""
    return seconds if seconds is None or gpu_of(where) is None else seconds * (1 - SHARE)


def time_pieces(model: str, settings: Settings, where: Where, began: float, seconds: float | None) -> None:
    """Time the pieces of a model in what is left of the seconds since `began`, None for `UNBOUND_S` from now, on a GPU
    of this machine; elsewhere and where it fails, decisions are made from the records, as they were before."""
    index = gpu_of(where)
    if index is None:
        return
    left = UNBOUND_S if seconds is None else max(0.0, seconds - (time.monotonic() - began))
    if left < LEAST_S:
        to_stderr(f"pieces of {model} were not timed: no time is left; give more --seconds")
        return
    end = time.monotonic() + left + _GRACE_S
    job = {"target": model, "db": settings.db, "device_index": index, "seconds": left}
    with ChildProcess(_TIME, init=job) as child:
        try:
            _tell(child, model, end)
        except KernelwrightError as error:
            to_stderr(f"pieces of {model} were not timed any further: {error}")


def _tell(child: ChildProcess, model: str, end: float) -> None:
    """Tell every piece as soon as it is timed, and stored, until the time `end`."""
    missing, timed = 0, 0
    while True:
        piece: dict[str, Any] | None = child.call(None, max(0.0, end - time.monotonic()))
        if piece is None:
            break
        if "missing" in piece:
            missing = piece["missing"]
            to_stderr(f"{missing} pieces of {model} are timed as a whole")
        else:
            timed += 1
            to_stderr(line_of(piece))
    if timed < missing:
        to_stderr(f"{missing - timed} pieces of {model} were not timed; tune again to time them")


def line_of(piece: dict[str, Any]) -> str:
    """A timed piece in words."""
    ours = "-" if piece["ours_us"] is None else f"{piece['ours_us']:.2f}"
    verdict = "ours" if piece["replaced"] else "Inductor's own"
    return f"{piece['piece']}: ours {ours} us, Inductor {piece['theirs_us']:.2f} us, {piece['calls']} calls: {verdict}"
