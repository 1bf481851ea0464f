"""Tuning what a compile finds no record of: before the graph is compiled (tune="missing"), or beside the running model
(tune="background", see `kernelwright.compiler.improving`).

A child process does it, by the command line's own `kernelwright tune --workloads`, which puts trials and winners into
the database and tunes first where most is to be saved. It ends by itself once its seconds are over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import platformdirs
import torch

from kernelwright.compiler.dispatch import Answers, Prepared
from kernelwright.errors import KernelwrightError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload, digest

MODES = ("never", "missing", "background")

SECONDS = 60.0
"""How long the workloads of one graph are tuned, all together, where nothing else is said."""

GRACE_S = 60.0
"""What a child may take longer than it was given: to start, to end a trial, and for its last comparison."""

_COMMAND = "from kernelwright.service.cli import main; main()"

_tried: dict[tuple[str | None, Workload], bool] = {}
"""What this process has tuned, by database, and whether that went well."""

_log = logging.getLogger(__name__)

Calls = Mapping[Workload, int]
"""How often a step runs each workload."""


@runtime_checkable
class Tuning(Protocol):
    """A source of answers that wants to know what a graph would run, before it is asked."""

    def tune(self, calls: Calls) -> None:
        """Do something about workloads that nothing was measured of."""
        ...


def tune_in_child(calls: Calls, db: str | None, seconds: float) -> bool:
    """Tune the workloads on the present GPU in a child process; False, logged, when that failed, now or before. What
    this process has tuned already, with whatever outcome, is not tuned again."""
    new = {workload: count for workload, count in calls.items() if (db, workload) not in _tried}
    if new:
        went = _run_child(new, db, seconds)
        _tried.update(((db, workload), went) for workload in new)
    return all(_tried[db, workload] for workload in calls)


def _run_child(calls: Calls, db: str | None, seconds: float) -> bool:
    with tempfile.TemporaryDirectory(prefix="kernelwright-tune-") as folder:
        listed = Path(folder) / "workloads.json"
        entries = [{"workload": workload.to_json(), "calls": count} for workload, count in calls.items()]
        listed.write_text(json.dumps(entries), encoding="utf-8")
        command = [sys.executable, "-c", _COMMAND, "tune", "--workloads", str(listed), "--seconds", f"{seconds:g}"]
        command += ["--device", f"cuda:{torch.cuda.current_device()}"] if torch.cuda.is_available() else []
        command += ["--db", db] if db else []
        began = time.monotonic()
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds + GRACE_S)
        except subprocess.CalledProcessError as error:
            _log.warning("tuning failed: %s", error.stderr.strip().splitlines()[-1:] or error)
            return False
        except subprocess.TimeoutExpired as error:
            # what it has finished is in the database
            _log.warning("tuning was cut short: %s", error)
            return True
        except OSError as error:
            _log.warning("tuning failed: %s", error)
            return False
        _log.info("tuned %d workloads in %.0f s", len(calls), time.monotonic() - began)
        return True


class Failures:
    """How often tuning for a database has failed, kept between processes: a graph that was compiled after a failure
    must not be found in Inductor's cache by a process that may have more luck. A folder that cannot be written to
    forgets."""

    def __init__(self, db: str | None, folder: Path | None = None) -> None:
        folder = folder or platformdirs.user_cache_path("kernelwright") / "failed-tunings"
        self._file = folder / digest([db])

    @property
    def count(self) -> int:
        """One byte stands for each."""
        return self._file.stat().st_size if self._file.exists() else 0

    def add(self) -> None:
        """Count one more."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as file:
                file.write(b".")


class MissingTuned:
    """Answers that are measured before they are given: what has none is tuned first, within `seconds` for a graph.

    read: reads the answers anew; it raises KernelwrightError where there is no database yet, and `empty` answers then.
    """

    def __init__(
        self,
        read: Callable[[], Answers],
        empty: Answers,
        tune: Callable[[Calls, float], bool],
        seconds: float,
        failures: Failures,
    ) -> None:
        self._read, self._empty, self._tune, self._seconds = read, empty, tune, seconds
        self._failures = failures
        self._source = self._present()

    def prepare(self, workloads: list[Workload]) -> None:
        """See `kernelwright.compiler.dispatch.Prepared`."""
        if isinstance(self._source, Prepared):
            self._source.prepare(workloads)

    def tune(self, calls: Calls) -> None:
        """See `Tuning`."""
        missing = unmeasured(self._source, calls)
        if missing:
            if not self._tune(missing, self._seconds):
                self._failures.add()
            # a child that failed may have stored something before
            self._source = self._present()

    def __call__(self, workload: Workload) -> Answer:
        """What is fastest for the workload."""
        return self._source(workload)

    @property
    def state(self) -> str:
        """That of the answers, marked: a graph that was compiled after tuning, or after it failed, is another one."""
        return f"{self._source.state}/tuned within {self._seconds:g} s/{self._failures.count} failed"

    def _present(self) -> Answers:
        try:
            return self._read()
        except KernelwrightError as error:
            _log.info("nothing is recorded yet: %s", error)
            return self._empty


class MissingNoted:
    """Answers as they are; what they have no measurement of is added to `missing`."""

    def __init__(self, source: Callable[[Workload], Answer], missing: dict[Workload, int]) -> None:
        self._source, self._missing = source, missing

    def prepare(self, workloads: list[Workload]) -> None:
        """See `kernelwright.compiler.dispatch.Prepared`."""
        if isinstance(self._source, Prepared):
            self._source.prepare(workloads)

    def tune(self, calls: Calls) -> None:
        """See `Tuning`."""
        for workload, count in unmeasured(self._source, calls).items():
            self._missing[workload] = self._missing.get(workload, 0) + count

    def __call__(self, workload: Workload) -> Answer:
        """What is fastest for the workload."""
        return self._source(workload)


def unmeasured(answers: Callable[[Workload], Answer], calls: Calls) -> dict[Workload, int]:
    """Those that nothing was measured of on this GPU, with this software."""
    return {workload: count for workload, count in calls.items() if answers(workload).how != "measured"}
