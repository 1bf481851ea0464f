"""What one rank of a job runs in `test_ranks.py`: it compiles a graph for each case, in its turn, and says what it got.

A case: rows (of the product), first (the rank whose turn it is, None: all compile at once), patience (how long a rank
waits for what others say), databases (a URL for each rank), locked (the rank that finds its database locked, or None),
url, served and served_from (of a service, the ranks that it answers, and what it knows).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler import agreement, backend
from kernelwright.compiler.dispatch import local_answers
from kernelwright.compiler.report import Report
from kernelwright.db import engine

REDUCED = 64


def graph_of(rows: int) -> torch.fx.Graph:
    """A product of so many rows with an activation behind it."""
    inputs = torch.randn(rows, REDUCED), torch.randn(REDUCED, 256)
    with torch.no_grad():
        module = make_fx(lambda x, w: torch.relu(x @ w), tracing_mode="fake")(*inputs)
    graph: torch.fx.Graph = module.graph
    return graph


@contextmanager
def locked(url: str) -> Iterator[None]:
    """The database is another connection's alone."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("CREATE TABLE held (it INTEGER)")
        yield


def compiled(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """What is put into the graph, what is kept of it, and what is complained of."""
    url, report, told = case["databases"][rank], Report(), {}
    options = backend.Options(db=url, device="h100", devices=("cpu",), report=report, url=case["url"])
    if rank in case["served"]:
        backend.service_answers = lambda source: local_answers(case["served_from"], "h100")
    settings = backend.kernel_settings(options, {"fx_graph_cache": True})
    if backend.SLOT in settings:
        settings[backend.SLOT](graph_of(case["rows"]))
        told["kept"] = settings[backend.SLOT].uuid() is not None
    return {**told, "replaced": [str(one.workload) for one in report.replaced], "warnings": report.warnings}


def start(folder: str) -> Callable[[int], list[dict[str, Any]]]:
    """A child that is asked to be a rank of the job whose cases lie in the folder."""
    return lambda rank: run(rank, Path(folder))


def run(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Compile in turns, or all at once; what was got of each case."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    engine.BUSY_TIMEOUT_MS = 100
    real = backend.service_answers
    told = []
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8")):
        agreement.PATIENCE_S = case["patience"]
        for turn in (case["first"], 1 - case["first"]) if case["first"] is not None else (rank,):
            if turn == rank:
                with locked(case["databases"][rank]) if case["locked"] == rank else nullcontext():
                    told.append(compiled(case, rank))
                backend.service_answers = real
            distributed.barrier()
    distributed.destroy_process_group()
    return told
