"""Records that ship with the package, made by our own runs, so that a first start has answers."""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path

from sqlalchemy import exists, select

from kernelwright.db.archive import ArchiveReader
from kernelwright.db.engine import session_scope
from kernelwright.db.record_store import merge_record
from kernelwright.db.rows import Mark, Parts, record_row
from kernelwright.db.store import Store
from kernelwright.db.tables import RecordRow, TrialRow
from kernelwright.db.trust import Trust
from kernelwright.types import TuningRecord

SOURCE = "pretuned"


def pretuned_files() -> list[Traversable]:
    """The record sets in the package, one a device."""
    folder = importlib.resources.files("kernelwright.db") / "pretuned_sets"
    return sorted((file for file in folder.iterdir() if file.name.endswith(".jsonl.gz")), key=lambda file: file.name)


def load_pretuned(store: Store) -> int:
    """Fill a database that has neither records nor trials with the records of the package; returns how many.

    They count as trusted. What is measured here later takes their place or comes before them. ArchiveError when the
    package's file is damaged.
    """
    if not _is_empty(store):
        return 0
    return sum(_load(store, file) for file in pretuned_files())


def _is_empty(store: Store) -> bool:
    with session_scope(store.engine) as session:
        found = session.execute(select(exists().select_from(RecordRow), exists().select_from(TrialRow))).one()
        return not any(found)


def _load(store: Store, file: Traversable) -> int:
    with importlib.resources.as_file(file) as path:
        records = [value for value, _ in ArchiveReader(Path(path), None).read() if isinstance(value, TuningRecord)]
    parts, mark = Parts(), Mark(Trust.TRUSTED, SOURCE)
    rows = [record_row(record, parts, mark) for record in records]
    with session_scope(store.engine, write=True) as session:
        parts.save(session)
        return sum(merge_record(session, row) for row in rows)
