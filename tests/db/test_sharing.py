"""What comes from elsewhere: marked, told where it is from, kept once, and refused where it is hostile."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernelwright.db import Store, Trust, archive_lines, export_archive, import_archive
from kernelwright.db.archive import Counts
from kernelwright.errors import ArchiveError
from kernelwright.types import Measurement, Status
from tests.db.values import H100, matmul, record, trial

TRIALS = [trial(number, workload=matmul(64 + number % 3)) for number in range(8)]
RECORDS = [record(matmul(64 + number)) for number in range(3)]


@pytest.fixture
def ours() -> Iterator[Store]:
    """A database with trials and records of its own."""
    with Store.open("sqlite://") as store:
        store.add_trials(TRIALS)
        for value in RECORDS:
            store.put_winner(value)
        yield store


@pytest.fixture
def theirs() -> Iterator[Store]:
    """An empty database."""
    with Store.open("sqlite://") as store:
        yield store


def everything(store: Store) -> tuple[Any, ...]:
    records = store.records(limit=None)
    return list(store.marked_trials()), set(records), store.record_states(r.key for r in records)


def trusts(store: Store) -> set[Trust]:
    return {mark.trust for _, mark in store.marked_trials()} | {
        state.trust for state in store.record_states(record.key for record in RECORDS).values()
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize(
    ("written", "read", "trust"),
    [
        ("secret", "secret", Trust.TRUSTED),
        ("secret", "other", Trust.UNTRUSTED),
        ("secret", None, Trust.UNTRUSTED),
        (None, "secret", Trust.UNTRUSTED),
    ],
)
def test_what_nobody_vouches_for_is_untrusted(
    ours: Store, theirs: Store, tmp_path: Path, name: str, written: str | None, read: str | None, trust: Trust
) -> None:
    export_archive(ours, tmp_path / name, key=written)
    counts = import_archive(theirs, tmp_path / name, key=read)
    assert counts == Counts(8, 3, trusted=trust is Trust.TRUSTED)
    assert trusts(theirs) == {trust}
    assert list(theirs.trials()) == TRIALS and set(theirs.records(limit=None)) == set(RECORDS)
    served = theirs.find_records(RECORDS[0].workload.key, H100.key)
    doubted = theirs.find_untrusted(RECORDS[0].workload.key, H100.key)
    assert (served, doubted) == (([RECORDS[0]], []) if trust is Trust.TRUSTED else ([], [RECORDS[0]]))
    assert bool(theirs.neighbours(matmul(65), H100.key)) is (trust is Trust.TRUSTED)
    assert len(list(theirs.trials(trusted=True))) == (8 if trust is Trust.TRUSTED else 0)


def test_both_forms_hold_the_same(ours: Store, tmp_path: Path) -> None:
    with_message = trial(9, measurement=Measurement(Status.CRASHED, message="died: \x00 \ud800 ✗"))
    ours.add_trial(with_message)
    ends = []
    for name in ("a.jsonl", "a.parquet"):
        export_archive(ours, tmp_path / name)
        with Store.open("sqlite://") as store:
            import_archive(store, tmp_path / name, source="here")
            ends.append(everything(store))
            assert with_message in list(store.trials())
    assert ends[0] == ends[1]
    table = pq.read_table(tmp_path / "a.parquet", columns=["kind", "operator", "median_us"])
    assert table.num_rows == 9 + 3 + 2 and 10.0 in table["median_us"].to_pylist()


def test_provenance_is_kept_once_and_a_round_trip_changes_nothing(ours: Store, theirs: Store, tmp_path: Path) -> None:
    before = everything(ours)
    export_archive(ours, tmp_path / "from a.jsonl")
    import_archive(theirs, tmp_path / "from a.jsonl")
    export_archive(theirs, tmp_path / "from b.jsonl", key="b")
    assert import_archive(ours, tmp_path / "from b.jsonl", key="b") == Counts(0, 0, trusted=True)
    assert everything(ours) == before
    with Store.open("sqlite://") as third:
        import_archive(third, tmp_path / "from b.jsonl", key="b")
        assert {mark.source for _, mark in third.marked_trials()} == {"import:from a.jsonl"}
        assert trusts(third) == {Trust.UNTRUSTED}
        state = third.record_state(RECORDS[0].key)
    assert state is not None and state.source == "import:from a.jsonl"


def test_a_signature_that_comes_later_makes_trusted(ours: Store, theirs: Store, tmp_path: Path) -> None:
    export_archive(ours, tmp_path / "a", key="k")
    import_archive(theirs, tmp_path / "a")
    assert import_archive(theirs, tmp_path / "a", key="k") == Counts(0, 3, trusted=True)
    assert trusts(theirs) == {Trust.TRUSTED}
    assert import_archive(theirs, tmp_path / "a") == Counts(0, 0)
    assert trusts(theirs) == {Trust.TRUSTED}


def test_what_nobody_vouches_for_never_takes_the_place_of_our_own(ours: Store, theirs: Store, tmp_path: Path) -> None:
    newer = record(RECORDS[0].workload, created_at="2030-01-01T00:00:00+00:00", vendor_us=1000.0)
    theirs.put_winner(newer)
    export_archive(theirs, tmp_path / "a")
    assert import_archive(ours, tmp_path / "a").records == 0
    assert ours.get_record(newer.key) == RECORDS[0]


def test_quarantine_outlasts_imports_and_ends_with_a_measurement(ours: Store, theirs: Store, tmp_path: Path) -> None:
    theirs.put_winner(record(RECORDS[0].workload, created_at="2030-01-01T00:00:00+00:00"))
    export_archive(theirs, tmp_path / "a", key="k")
    assert ours.quarantine(RECORDS[0].key, "wrong at [0, 0]") and not ours.quarantine("nosuch", "")
    import_archive(ours, tmp_path / "a", key="k")
    state = ours.record_state(RECORDS[0].key)
    assert state is not None and (state.trust, state.reason) == (Trust.QUARANTINED, "wrong at [0, 0]")
    assert ours.find_records(RECORDS[0].workload.key, H100.key) == []
    assert RECORDS[0] not in ours.records() and ours.quarantined() == [RECORDS[0]]
    assert export_archive(ours, tmp_path / "b").records == 2
    ours.put_winner(RECORDS[0])
    assert ours.find_records(RECORDS[0].workload.key, H100.key) == [RECORDS[0]]


Change = Callable[[dict[str, Any]], Any]

HOSTILE: dict[str, tuple[Change, str]] = {
    "operator is a number": (lambda r: r["workload"].update(operator=5), "operator must be a text, got int"),
    "size is a fraction": (lambda r: r["workload"]["dims"].update(M=1.5), "dimension M must be a whole number"),
    "size is enormous": (lambda r: r["workload"]["dims"].update(M=2**70), "must fit into 64 bits"),
    "knob is a list": (lambda r: r["schedule"]["knobs"].update(block_m=[1]), "unhashable type"),
    "time is a text": (lambda r: r["measurement"].update(median_us="fast"), "median_us must be float"),
    "time is true": (lambda r: r["measurement"].update(median_us=True), "median_us must be float"),
    "name is a path over lines": (lambda r: r["device"].update(name="../../x\nrm"), "name must be printable"),
    "name with NUL": (lambda r: r["workload"].update(operator="mat\x00mul"), "operator must be printable"),
    "call over lines": (lambda r: r.update(vendor="torch.mm\nimport os"), "vendor must be printable"),
    "long text": (lambda r: r.update(origin="x" * 5000), "origin must have at most 1000 characters"),
    "many samples": (lambda r: r["measurement"].update(samples_us=[1.0] * 20000), "at most 10000 entries"),
    "long line": (lambda r: r.update(origin="x" * (2 << 20)), "has over 1048576 bytes"),
}


def hostile_file(path: Path, text: bytes) -> Path:
    """A file with one line of content and a checksum that fits."""
    body = b'{"format":"kernelwright-archive","version":2}\n' + text + b"\n"
    end = {"trials": 0, "records": 1, "sha256": hashlib.sha256(body).hexdigest()}
    path.write_bytes(body + json.dumps({"end": end}).encode())
    return path


@pytest.mark.parametrize(("change", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_value_is_told_and_changes_nothing(ours: Store, tmp_path: Path, change: Change, said: str) -> None:
    value = json.loads(json.dumps(record(matmul(999)).to_json()))
    import_archive(ours, hostile_file(tmp_path / "sound", json.dumps({"record": value}).encode()))
    before = everything(ours)
    change(value)
    with pytest.raises(ArchiveError, match=said):
        import_archive(ours, hostile_file(tmp_path / "hostile", json.dumps({"record": value}).encode()))
    assert everything(ours) == before


def test_deep_nesting_is_refused(ours: Store, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="line 2"):
        import_archive(ours, hostile_file(tmp_path / "deep", b'{"record":' + b"[" * 200_000 + b"]" * 200_000 + b"}"))


def test_a_bomb_is_refused(ours: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_lines, "FREE_BYTES", 1000)
    text = json.dumps({"record": record().to_json()}).encode() + b"\n"
    with gzip.open(tmp_path / "bomb.gz", "wb") as file:
        file.write(b'{"format":"kernelwright-archive","version":2}\n' + text * 6_000)
    with pytest.raises(ArchiveError, match="unpacks to over 200 times its size"):
        import_archive(ours, tmp_path / "bomb.gz")
    with gzip.open(tmp_path / "line.gz", "wb") as file:
        file.write(b" " * (4 << 20))
    with pytest.raises(ArchiveError, match="must be a file that"):
        import_archive(ours, tmp_path / "line.gz")


def test_a_bad_table_is_told(ours: Store, theirs: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    export_archive(ours, path)
    whole = path.read_bytes()
    table = pq.read_table(path)
    bad = {
        "damaged|cannot be read": lambda: path.write_bytes(whole[:-50]),
        "must be a file that": lambda: pq.write_table(pa.table({"x": [1]}), path),
        "cut off": lambda: pq.write_table(table.slice(0, 5), path),
        "its end line says": lambda: pq.write_table(pa.concat_tables([table.slice(0, 3), table.slice(4)]), path),
        "must have the columns": lambda: pq.write_table(table.drop_columns(["rest"]), path),
    }
    for said, spoil in bad.items():
        spoil()
        with pytest.raises(ArchiveError, match=said):
            import_archive(theirs, path)
        assert everything(theirs) == ([], set(), {})
