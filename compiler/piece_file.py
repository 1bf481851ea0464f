"""The pieces of a model that `kernelwright tune model.py` times after it has tuned the model's workloads."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph

from kernelwright.compiler.backend import Options, known_answers
from kernelwright.compiler.collect import DEVICES, copied, load_model, visit
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.pieces import KnownPieces, Meter, WantedPiece, timed, unknown
from kernelwright.db.store import Store
from kernelwright.pieces import PieceTimes


def wanted_of(target: str, options: Options) -> list[WantedPiece]:
    """The pieces in one step of a model that are worth timing, each once, with what the records would put in."""
    judge = Replace(known_answers(options), how=options.how, devices=DEVICES)
    found: dict[str, WantedPiece] = {}

    def look(graph: Graph) -> None:
        own = copied(graph)
        judge.simplify(own)
        for one in judge.pieces(own):
            before = found.get(one.piece.key, dataclasses.replace(one, options={}, calls=0))
            both = {**before.options, **one.options}
            found[one.piece.key] = WantedPiece(one.piece, both, before.calls + one.calls)

    model, inputs = load_model(target)
    visit(model, inputs, None, look)
    return list(found.values())


def begin(
    target: str, db: str | None, device_index: int, seconds: float | None
) -> Callable[[object], dict[str, Any] | None]:
    """Called once in a process: returns the function that gives the next of `time_file`, None behind the last."""
    told = time_file(target, db, device_index, seconds)
    return lambda _: next(told, None)


def time_file(target: str, db: str | None, device_index: int, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Time what is not known yet, and tell as JSON values how many pieces these are, then each as it was timed.

    target: a model as for `load_model`; device_index: of the GPU; seconds: for all of it at most, None for no limit.
    """
    began = time.monotonic()
    with contextlib.closing(Meter(device_index)) as meter, Store.open(db) as store:
        meter.warm_up()
        wanted = wanted_of(target, Options(db=db))
        calls = {one.piece.key: one.calls for one in wanted}
        missing = unknown(wanted, KnownPieces(store.pieces(meter.device.key, meter.toolchain.key)))
        yield {"missing": len(missing)}
        left = None if seconds is None else seconds - (time.monotonic() - began)
        for times in timed(missing, meter, store, left):
            yield told(times, calls[times.piece])


def told(times: PieceTimes, calls: int) -> dict[str, Any]:
    """A timed piece as JSON values."""
    return {
        "piece": times.text,
        "calls": calls,
        "theirs_us": times.theirs_us,
        "ours_us": min(times.ours_us.values(), default=None),
        "replaced": any(map(times.wins, times.ours_us)),
        "failures": list(times.failures.values()),
    }
