"""The pieces of a model that `kernelwright tune model.py` times after it has tuned the model's workloads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph

from kernelwright.compiler.backend import Options, known_answers
from kernelwright.compiler.collect import DEVICES, copied, load_model, visit
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.pieces import Meter, WantedPiece, timed
from kernelwright.db.store import Store
from kernelwright.pieces import PieceTimes


def wanted_of(target: str, options: Options) -> list[WantedPiece]:
    """The pieces in one step of a model that are worth timing, with what the records would put in."""
    judge = Replace(known_answers(options), how=options.how, devices=DEVICES)
    found: list[WantedPiece] = []

    def look(graph: Graph) -> None:
        found.extend(judge.pieces(copied(graph)))

    model, inputs = load_model(target)
    visit(model, inputs, None, look)
    return found


def time_file(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Time what is not known yet, and tell every piece that was timed now as JSON values.

    job: `target`, a model as for `load_model`; `db`; `device_index` of the GPU; `seconds` for all of it at most, None
    for no limit.
    """
    began, seconds = time.monotonic(), job["seconds"]
    wanted = wanted_of(job["target"], Options(db=job["db"]))
    calls = {one.piece.key: one.calls for one in wanted}
    with contextlib.closing(Meter(job["device_index"])) as meter, Store.open(job["db"]) as store:
        left = None if seconds is None else seconds - (time.monotonic() - began)
        return told(list(timed(wanted, meter, store, left)), calls)


def told(times: Sequence[PieceTimes], calls: Mapping[str, int]) -> list[dict[str, Any]]:
    """Timed pieces as JSON values."""
    return [
        {
            "piece": one.text,
            "calls": calls.get(one.piece, 0),
            "theirs_us": one.theirs_us,
            "ours_us": min(one.ours_us.values(), default=None),
            "replaced": any(map(one.wins, one.ours_us)),
            "failures": list(one.failures.values()),
        }
        for one in times
    ]
