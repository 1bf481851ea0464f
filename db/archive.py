"""Trials and records as a file, to carry them from one database to another.

An archive is a sequence of lines: a header with the format's name and version, one line for each trial and record, and
an end line with their counts, the SHA-256 of every line before it, and a signature of that where a key is shared. It is
kept as JSON lines (gzip when the name ends in .gz) or, when the name ends in .parquet, as a table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from kernelwright.db.archive_checks import check_text, check_value
from kernelwright.db.archive_lines import Line, damaged, encode, not_ours, read_lines, unreadable, write_lines
from kernelwright.db.archive_parquet import is_parquet, read_parquet, write_parquet
from kernelwright.db.engine import session_scope
from kernelwright.db.record_store import merge_record
from kernelwright.db.rows import OWN, Mark, Parts, insert_new, lock_bulk_writers, record_row, trial_row
from kernelwright.db.store import Store
from kernelwright.db.tables import TrialRow
from kernelwright.db.trial_store import PAGE
from kernelwright.db.trust import Trust
from kernelwright.errors import ArchiveError
from kernelwright.types import Trial, TuningRecord

FORMAT = "kernelwright-archive"
VERSION = 2

Marked = tuple[Trial | TuningRecord, Mark]


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many trials and records were written or, on import, were new or better than what was there.

    trusted: whether the file has a signature that was made with our key.
    """

    trials: int = 0
    records: int = 0
    trusted: bool = False


def export_archive(
    store: Store,
    path: Path,
    operator: str | None = None,
    device_key: str | None = None,
    *,
    key: str | None = None,
) -> Counts:
    """Write the trials and records of this operator and device (None: any) to `path`, which appears when complete.

    Records in quarantine stay behind. key: shared secret to sign the file with. Raises ArchiveError when the file
    cannot be written.
    """
    path = Path(path)
    lines = ArchiveLines(store, operator, device_key, key)
    partial = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        if path.suffix == ".parquet":
            write_parquet(partial, lines)
        else:
            write_lines(partial, lines, packed=path.suffix == ".gz")
        os.replace(partial, path)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written: {error.strerror or error}; choose another path") from error
    finally:
        partial.unlink(missing_ok=True)
    return lines.counts


def import_archive(store: Store, path: Path, *, key: str | None = None, source: str | None = None) -> Counts:
    """Merge a file into the store and return what was new.

    A trial that is there is left alone; which of two records with one key stays, `merge_record` says. What a file
    without a valid signature brings is untrusted until it is measured here. key: the shared secret that a signature is
    checked with. source: kept beside what is new as its provenance, by default "import:<name of the file>".
    Raises ArchiveError for a file that is damaged, of a later version, hostile or not ours, and then nothing has
    changed: it is one transaction.
    """
    path = Path(path)
    parts, first = Parts(), ArchiveReader(path, key)
    for value, _ in first.read():
        parts.columns(value)
    if source is None:
        source = f"import:{''.join(c if c.isprintable() else '?' for c in path.name)}"
    trials = records = 0
    with session_scope(store.engine, write=True) as session:
        lock_bulk_writers(session)
        # All parts come first, so that this long transaction never waits for one of a writer that waits for it.
        parts.save(session)
        second = ArchiveReader(path, key)
        values = second.read(Mark(Trust.TRUSTED if first.trusted else Trust.UNTRUSTED, source))
        while page := list(itertools.islice(values, PAGE)):
            trials += _add_trials(session, [(v, mark) for v, mark in page if isinstance(v, Trial)])
            rows = [record_row(v, Parts(), mark) for v, mark in page if isinstance(v, TuningRecord)]
            records += sum(merge_record(session, row) for row in rows)
        if (second.sha256, second.trusted) != (first.sha256, first.trusted):
            raise ArchiveError(f"{path} changed while it was read; import it when it is complete")
    return Counts(trials, records, first.trusted)


class ArchiveLines:
    """The lines that a store is written as; `counts` holds once they were iterated over."""

    def __init__(self, store: Store, operator: str | None, device_key: str | None, key: str | None) -> None:
        self._store = store
        self._operator = operator
        self._device_key = device_key
        self._key = key
        self.counts = Counts()

    def __iter__(self) -> Iterator[Line]:
        """Header, trials, records, end."""
        seen = hashlib.sha256()
        trials = records = 0
        for line in itertools.chain([{"format": FORMAT, "version": VERSION}], self._trials(), self._records()):
            trials += "trial" in line
            records += "record" in line
            seen.update(encode(line))
            yield line
        end = {"trials": trials, "records": records, "sha256": seen.hexdigest()}
        if self._key:
            end["signature"] = signature(self._key, seen.hexdigest())
        yield {"end": end}
        self.counts = Counts(trials, records, trusted=bool(self._key))

    def _trials(self) -> Iterator[Line]:
        for trial, mark in self._store.marked_trials(self._operator, self._device_key):
            yield {"trial": trial.to_json(), **_told(mark)}

    def _records(self) -> Iterator[Line]:
        records = self._store.records(self._operator, self._device_key, limit=None)
        for start in range(0, len(records), PAGE):
            page = records[start : start + PAGE]
            states = self._store.record_states(record.key for record in page)
            for record in page:
                state = states[record.key]
                yield {"record": record.to_json(), **_told(Mark(state.trust, state.source))}


class ArchiveReader:
    """Reads and checks a file; `sha256` and `trusted` hold once `read` came to its end."""

    def __init__(self, path: Path, key: str | None) -> None:
        self.sha256 = ""
        self.trusted = False
        self._path = path
        self._key = key

    def read(self, mark: Mark = OWN) -> Iterator[Marked]:
        """The values of a file, marked; ArchiveError as soon as something is wrong, at the latest after the last."""
        counts = {"trials": 0, "records": 0}
        for number, (line, sha256) in enumerate(self._lines(), start=1):
            if self.sha256:
                raise damaged(self._path, number, "something follows the end line")
            if number == 1:
                _check_header(self._path, line)
            elif "end" in line:
                self._end(line["end"], counts | {"sha256": sha256})
            else:
                value = _value(self._path, number, line)
                counts["trials" if isinstance(value, Trial) else "records"] += 1
                yield value, _mark(self._path, number, line, mark)
        if not self.sha256:
            raise damaged(self._path, 0, "the end line is missing, so the file was cut off")

    def _lines(self) -> Iterator[tuple[Line, str]]:
        try:
            parquet = is_parquet(self._path)
        except OSError as error:
            raise unreadable(self._path, error) from error
        return read_parquet(self._path) if parquet else read_lines(self._path)

    def _end(self, told: object, found: dict[str, Any]) -> None:
        signed = told.get("signature") if isinstance(told, dict) else None
        if not isinstance(told, dict) or {k: v for k, v in told.items() if k != "signature"} != found:
            raise ArchiveError(
                f"{self._path} is damaged: its end line says {told!s:.300}, its content gives {found}; export it again"
            )
        self.sha256 = found["sha256"]
        if self._key and isinstance(signed, str):
            self.trusted = hmac.compare_digest(signed.encode(), signature(self._key, self.sha256).encode())


def signature(key: str, sha256: str) -> str:
    """The HMAC-SHA256, in hex, of an archive's checksum under a shared secret."""
    return hmac.new(key.encode(), f"{FORMAT}:{sha256}".encode(), hashlib.sha256).hexdigest()


def _add_trials(session: Session, page: list[tuple[Trial, Mark]]) -> int:
    rows = [trial_row(trial, Parts(), mark=mark) for trial, mark in page]
    vouched = [row["key"] for row in rows if row["trust"] == Trust.TRUSTED.value]
    if vouched:
        doubted = TrialRow.trust == Trust.UNTRUSTED.value
        session.execute(update(TrialRow).where(TrialRow.key.in_(vouched), doubted).values(trust=Trust.TRUSTED.value))
    return insert_new(session, TrialRow, rows)


def _told(mark: Mark) -> Line:
    """What a line says beside its value: that nobody vouches for it, and where it came from first."""
    told = {"trust": mark.trust.value} if mark.trust is Trust.UNTRUSTED else {}
    return told | ({"source": mark.source} if mark.source else {})


def _mark(path: Path, number: int, line: Line, default: Mark) -> Mark:
    source = line.get("source", default.source)
    try:
        check_text(source, "source")
    except ValueError as error:
        raise damaged(path, number, str(error)) from error
    return Mark(Trust.UNTRUSTED if "trust" in line else default.trust, source)


def _check_header(path: Path, header: Line) -> None:
    if header.get("format") != FORMAT:
        raise not_ours(path)
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise damaged(path, 1, f"version must be a whole number, got {version!r}")
    if version > VERSION:
        raise ArchiveError(
            f"{path} has archive version {version}, this release reads up to {VERSION}; upgrade kernelwright"
        )


def _value(path: Path, number: int, line: Line) -> Trial | TuningRecord:
    try:
        value = Trial.from_json(line["trial"]) if "trial" in line else TuningRecord.from_json(line["record"])
        check_value(value)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, number, f"no trial or record can be made of it ({error!r:.300})") from error
    return value
