"""Trials and records as a file, to carry them from one database to another.

JSON lines (gzip when the name ends in .gz): a header with the format's name and version, one line for each trial and
record, and an end line with their counts and the SHA-256 of every line before it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import itertools
import json
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from kernelwright.db.engine import session_scope
from kernelwright.db.record_store import merge_record
from kernelwright.db.rows import Parts, insert_new, lock_bulk_writers, record_row, trial_row
from kernelwright.db.store import Store
from kernelwright.db.tables import TrialRow
from kernelwright.db.trial_store import PAGE
from kernelwright.errors import ArchiveError
from kernelwright.types import Trial, TuningRecord, canonical_json

FORMAT = "kernelwright-archive"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many trials and records were written or, on import, were new."""

    trials: int = 0
    records: int = 0


def export_archive(store: Store, path: Path, operator: str | None = None, device_key: str | None = None) -> Counts:
    """Write the trials and records of this operator and device (None: any) to `path`, which appears when complete.

    Raises ArchiveError when the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        with _open(partial, "wb", path) as file:
            counts = _write(file, store, operator, device_key)
        os.replace(partial, path)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written: {error.strerror or error}; choose another path") from error
    finally:
        partial.unlink(missing_ok=True)
    return counts


def import_archive(store: Store, path: Path) -> Counts:
    """Merge a file into the store and return what was new.

    A trial that is there is left alone; of two records with one key the newer stays. Raises ArchiveError for a file
    that is damaged, of a later version or not ours, and then nothing has changed: it is one transaction.
    """
    path = Path(path)
    parts = Parts()
    for value in _read(path):
        parts.columns(value)
    trials = records = 0
    with session_scope(store.engine, write=True) as session:
        lock_bulk_writers(session)
        # All parts come first, so that this long transaction never waits for one of a writer that waits for it.
        parts.save(session)
        values = _read(path)
        while page := list(itertools.islice(values, PAGE)):
            trials += insert_new(session, TrialRow, [trial_row(v, parts) for v in page if isinstance(v, Trial)])
            rows = [record_row(v, parts) for v in page if isinstance(v, TuningRecord)]
            records += sum(merge_record(session, row) for row in rows)
    return Counts(trials, records)


def _open(path: Path, mode: str, named: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, mode) if named.suffix == ".gz" else open(path, mode))


def _write(file: IO[bytes], store: Store, operator: str | None, device_key: str | None) -> Counts:
    seen = hashlib.sha256()

    def put(line: dict[str, Any]) -> None:
        text = canonical_json(line).encode() + b"\n"
        seen.update(text)
        file.write(text)

    put({"format": FORMAT, "version": VERSION})
    trials = records = 0
    for trial in store.trials(operator=operator, device_key=device_key):
        put({"trial": trial.to_json()})
        trials += 1
    for record in store.records(operator, device_key, limit=None):
        put({"record": record.to_json()})
        records += 1
    put({"end": {"trials": trials, "records": records, "sha256": seen.hexdigest()}})
    return Counts(trials, records)


def _read(path: Path) -> Iterator[Trial | TuningRecord]:
    """The values of a file; ArchiveError as soon as something is wrong, at the latest after the last value."""
    try:
        with _open(path, "rb", path) as file:
            yield from _values(path, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArchiveError(f"{path} cannot be read: {reason}; check the path, or export it again") from error


def _values(path: Path, file: IO[bytes]) -> Iterator[Trial | TuningRecord]:
    seen = hashlib.sha256()
    trials = records = 0
    for number, text in enumerate(file, start=1):
        line = _parse(path, number, text)
        if number == 1:
            _check_header(path, line)
        elif "end" in line:
            _check_end(path, line["end"], {"trials": trials, "records": records, "sha256": seen.hexdigest()})
            if file.read(1):
                raise _damaged(path, number + 1, "something follows the end line")
            return
        else:
            value = _value(path, number, line)
            trials += isinstance(value, Trial)
            records += isinstance(value, TuningRecord)
            yield value
        seen.update(text)
    raise _damaged(path, 0, "the end line is missing, so the file was cut off")


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _not_ours(path) if number == 1 else _damaged(path, number, str(error)) from error
    if not isinstance(line, dict):
        raise _not_ours(path) if number == 1 else _damaged(path, number, "it is not a JSON object")
    return line


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, got {name}")


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise _not_ours(path)
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise _damaged(path, 1, f"version must be a whole number, got {version!r}")
    if version > VERSION:
        raise ArchiveError(
            f"{path} has archive version {version}, this release reads up to {VERSION}; upgrade kernelwright"
        )


def _check_end(path: Path, told: object, found: dict[str, Any]) -> None:
    if told != found:
        raise ArchiveError(f"{path} is damaged: its end line says {told}, its content gives {found}; export it again")


def _value(path: Path, number: int, line: dict[str, Any]) -> Trial | TuningRecord:
    try:
        if "trial" in line:
            return Trial.from_json(line["trial"])
        return TuningRecord.from_json(line["record"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, number, f"no trial or record can be made of it ({error!r})") from error


def _not_ours(path: Path) -> ArchiveError:
    return ArchiveError(f"{path} must be a file that `kernelwright export` wrote, but it does not begin like one")


def _damaged(path: Path, number: int, why: str) -> ArchiveError:
    place = f" in line {number}" if number else ""
    return ArchiveError(f"{path} is damaged{place}: {why}; export it again")
