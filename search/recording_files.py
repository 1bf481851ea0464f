"""Files around a recording: workloads to record, finished workloads as parts, and parts packed into one file.

A recording folder holds `<device slug>/<operator>.parquet`. While a sweep runs, every workload that is done is a file
of its own in `<operator>.parts` beside it, put in place at once, so that a killed sweep loses only what it was doing.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernelwright.errors import ArchiveError, UsageError
from kernelwright.kernels import get_operator
from kernelwright.search.recorded import load_recorded, recorded_folder, save_recorded
from kernelwright.search.recording import DEFAULT_COUNT, Wanted
from kernelwright.types import Trial, Workload

_LINES = (".jsonl", ".jsonl.gz")


class RecordingFolder:
    """Where a sweep writes to, and goes on from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, slug: str, operator: str) -> Path:
        """The packed recording of an operator on a device."""
        return self.folder / slug / f"{operator}.parquet"

    def known(self, slug: str, operator: str) -> list[Trial]:
        """What was recorded so far, packed or not, each trial once."""
        packed = self.path(slug, operator)
        files = [*([packed] if packed.exists() else []), *self._parts(slug, operator)]
        return list({trial.key: trial for path in files for trial in load_recorded(path)}.values())

    def add(self, trials: Sequence[Trial]) -> None:
        """Keep the trials of one workload."""
        first = trials[0]
        parts = self._parts_folder(first.device.slug, first.workload.operator)
        parts.mkdir(parents=True, exist_ok=True)
        save_recorded(trials, parts / f"{first.workload.key}-{first.key}.parquet")

    def pack(self, slug: str, operator: str, more: Iterable[Trial] = ()) -> int:
        """Put all parts, and more trials, into the packed recording; how many trials it then holds."""
        found = {trial.key: trial for trial in (*self.known(slug, operator), *more)}
        if not found:
            return 0
        parts = self._parts(slug, operator)
        path = self.path(slug, operator)
        path.parent.mkdir(parents=True, exist_ok=True)
        count = save_recorded(found.values(), path)
        for part in parts:
            part.unlink()
        if parts:
            self._parts_folder(slug, operator).rmdir()
        return count

    def _parts_folder(self, slug: str, operator: str) -> Path:
        return self.path(slug, operator).with_suffix(".parts")

    def _parts(self, slug: str, operator: str) -> list[Path]:
        return sorted(self._parts_folder(slug, operator).glob("*.parquet"))


def read_trials(paths: Iterable[Path] | None = None) -> Iterator[Trial]:
    """The trials in recordings: Parquet, JSON lines (.jsonl, .jsonl.gz), or folders of these; None for those packaged.

    UsageError for a path that is not there or holds none, ArchiveError for a file that is damaged.
    """
    for path in [recorded_folder()] if paths is None else paths:
        files = _recordings(path) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise UsageError(f"{path} must be a recording (.parquet, .jsonl, .jsonl.gz) or a folder of them, got none")
        for file in files:
            yield from _read_lines(file) if file.name.endswith(_LINES) else load_recorded(file)


def _recordings(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix == ".parquet" or path.name.endswith(_LINES))


def _read_lines(path: Path) -> Iterator[Trial]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Trial.from_json(json.loads(line))
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ArchiveError(f"{path} must hold one trial as JSON in each line, but is damaged: {error}") from error


def parse_wanted(text: str, count: int = DEFAULT_COUNT) -> list[Wanted]:
    """Workloads from JSON (a list, or an object with "workloads") or from JSON lines, each workload once.

    An entry is a workload as `Workload.to_json` writes it, or {"workload": ..., "count": ...}. count: for those that
    say none. UsageError tells which entry cannot be read.
    """
    wanted: dict[str, Wanted] = {}
    for number, entry in enumerate(entries_of(text), 1):
        try:
            one = _wanted(entry, count)
        except (ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
            raise UsageError(f"workload {number} cannot be read: {error}; got {json.dumps(entry)[:200]}") from error
        wanted.setdefault(one.workload.key, one)
    if not wanted:
        raise UsageError("there must be at least one workload to record, got none")
    return list(wanted.values())


def entries_of(text: str) -> list[Any]:
    """The entries of a list of workloads, not looked into yet; UsageError when the text is no JSON."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return [_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(data, dict) and "problems" in data:
        raise UsageError("a problem set must be turned into workloads first: python benchmarks/problems.py SET --jsonl")
    if isinstance(data, dict):
        data = data.get("workloads", [data])
    return list(data) if isinstance(data, list) else [data]


def _line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"workloads must be JSON or one JSON object a line, but line {number} is not: {error}"
        ) from error


def _wanted(entry: Any, count: int) -> Wanted:
    if "workload" in entry:
        count = int(entry.get("count", count))
        entry = entry["workload"]
    workload = Workload.from_json(entry)
    get_operator(workload.operator).validate(workload)
    if count < 1:
        raise ValueError(f"count must be 1 or more, got {count}")
    return Wanted(workload, count)
