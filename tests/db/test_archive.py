"""Carrying trials and records from one database to another as a file."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.db import Store, export_archive, import_archive
from kernelwright.db.archive import Counts
from kernelwright.errors import ArchiveError
from tests.db.values import H100, L4, matmul, record, trial

TRIALS = [trial(number, workload=matmul(64 + number % 3)) for number in range(20)]
RECORDS = [record(matmul(64 + number)) for number in range(3)]
Spoil = Callable[[list[bytes]], list[bytes]]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A sound file of TRIALS and RECORDS."""
    with Store.open("sqlite://") as store:
        store.add_trials(TRIALS)
        for value in RECORDS:
            store.put_winner(value)
        assert export_archive(store, tmp_path / "all.jsonl") == Counts(20, 3)
    return tmp_path / "all.jsonl"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """Another database, with something in it."""
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as opened:
        opened.add_trial(trial(100))
        yield opened


def content(store: Store) -> tuple[set[Any], set[Any]]:
    return set(store.trials()), set(store.records(limit=None))


def test_a_file_brings_all_to_either_database_and_nothing_twice(store: Store, exported: Path) -> None:
    assert import_archive(store, exported) == Counts(20, 3)
    assert content(store) == (set(TRIALS), set(RECORDS))
    assert import_archive(store, exported) == Counts(0, 0)
    assert content(store) == (set(TRIALS), set(RECORDS))


def test_merging_adds_to_what_is_there(other: Store, exported: Path) -> None:
    other.add_trial(TRIALS[3])
    other.put_winner(RECORDS[1])
    assert import_archive(other, exported) == Counts(19, 2)
    assert content(other) == ({trial(100), *TRIALS}, set(RECORDS))


@pytest.mark.parametrize(("there", "stays"), [("2025-01-01T00:00:00Z", False), ("2027-01-01T00:00:00Z", True)])
def test_of_two_records_with_one_key_the_newer_stays(store: Store, exported: Path, there: str, stays: bool) -> None:
    mine = record(RECORDS[0].workload, created_at=there, trials=1)
    store.put_winner(mine)
    with Store.open("sqlite://") as other:
        import_archive(other, exported)
        for value in RECORDS:
            other.put_winner(value)
        export_archive(other, exported, key="ours")
    assert import_archive(store, exported, key="ours").records == (2 if stays else 3)
    assert store.get_record(mine.key) == (mine if stays else RECORDS[0])


def test_a_part_may_be_exported(other: Store, tmp_path: Path) -> None:
    other.add_trials([trial(1, device=L4), trial(2, workload=matmul(operator="conv2d"))])
    other.put_winner(record(device=L4))
    assert export_archive(other, tmp_path / "part", operator="matmul", device_key=L4.key) == Counts(1, 1)
    assert export_archive(other, tmp_path / "part", device_key=H100.key) == Counts(2, 0)


def test_a_name_in_gz_is_compressed(other: Store, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    export_archive(other, path)
    assert gzip.decompress(path.read_bytes()).startswith(b'{"format":"kernelwright-archive","version":2}')
    with Store.open("sqlite://") as store:
        assert import_archive(store, path) == Counts(1, 0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArchiveError, match=r"cannot be read: Compressed file ended"):
        import_archive(other, path)


def signed(lines: list[bytes], trials: int, records: int) -> list[bytes]:
    """The lines with an end line that fits them, as a hand that knows the format would write."""
    end = {"trials": trials, "records": records, "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
    return [*lines, json.dumps({"end": end}).encode()]


SPOILED: dict[str, tuple[Spoil, str]] = {
    "empty": (lambda lines: [], "is damaged: the end line is missing"),
    "cut off": (lambda lines: lines[:-1], "the end line is missing, so the file was cut off"),
    "cut in a line": (lambda lines: [*lines[:5], lines[5][:40]], "is damaged in line 6"),
    "line lost": (lambda lines: [*lines[:5], *lines[6:]], "its end line says"),
    "digit changed": (lambda lines: [*lines[:5], lines[5].replace(b"10.5", b"10.6"), *lines[6:]], "its end line says"),
    "lines swapped": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "its end line says"),
    "something after": (lambda lines: [*lines, b"{}\n"], "something follows the end line"),
    "no archive": (lambda lines: [b"hello\n", *lines[1:]], "must be a file that `kernelwright export` wrote"),
    "a list": (lambda lines: [b"[1]\n", *lines[1:]], "must be a file that `kernelwright export` wrote"),
    "other json": (lambda lines: [b'{"name": "x"}\n', *lines[1:]], "must be a file that `kernelwright export` wrote"),
    "binary": (lambda lines: [bytes(range(256))], "must be a file that `kernelwright export` wrote"),
    "later version": (
        lambda lines: signed([lines[0].replace(b":2}", b":3}"), *lines[1:-1]], 20, 3),
        "has archive version 3, this release reads up to 2; upgrade kernelwright",
    ),
    "version in words": (lambda lines: [lines[0].replace(b":2}", b':"1"}')], "version must be a whole number, got '1'"),
    "unknown kind": (lambda lines: signed([*lines[:5], b'{"job":{}}\n'], 4, 0), "line 6: no trial or record"),
    "unknown field": (lambda lines: signed([lines[0], b'{"trial":{"colour":1}}\n'], 1, 0), "Trial has no field colour"),
    "part missing": (lambda lines: signed([lines[0], b'{"trial":{}}\n'], 1, 0), "line 2: no trial or record"),
    "not finite": (
        lambda lines: signed([*lines[:5], lines[5].replace(b"10.5", b"NaN")], 5, 0),
        "line 6: numbers must be finite, got NaN",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILED.values(), ids=SPOILED.keys())
def test_a_bad_file_is_told_and_changes_nothing(exported: Path, other: Store, spoil: Spoil, said: str) -> None:
    before = content(other)
    exported.write_bytes(b"".join(spoil(exported.read_bytes().splitlines(keepends=True))))
    with pytest.raises(ArchiveError, match=said):
        import_archive(other, exported)
    assert content(other) == before


def test_a_hand_written_file_is_read(exported: Path, other: Store) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    exported.write_bytes(b"".join(signed(lines[:4], 3, 0)))
    assert import_archive(other, exported) == Counts(3, 0)


def test_a_file_that_changes_while_it_is_read_changes_nothing(
    exported: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelwright.db import archive

    real = archive.lock_bulk_writers

    def change_file(session: Any) -> None:
        real(session)
        exported.write_bytes(exported.read_bytes().replace(b"10.5", b"10.6", 1))

    monkeypatch.setattr(archive, "lock_bulk_writers", change_file)
    with pytest.raises(ArchiveError, match="its end line says"):
        import_archive(store, exported)
    assert content(store) == (set(), set())


def test_a_missing_file_is_told(other: Store, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"nosuch cannot be read: No such file"):
        import_archive(other, tmp_path / "nosuch")


def test_a_file_that_cannot_be_written_is_told(other: Store, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"cannot be written: No such file or directory; choose another path"):
        export_archive(other, tmp_path / "nowhere" / "x")


def test_an_export_that_fails_leaves_the_old_file(
    exported: Path, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = exported.read_bytes()
    monkeypatch.setattr(other, "records", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(other, exported)
    assert exported.read_bytes() == before
    assert not [path for path in exported.parent.iterdir() if path.name.startswith(".")]
