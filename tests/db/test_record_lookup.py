"""Many workloads read at once give what the store gives for each."""

from __future__ import annotations

from pathlib import Path

from kernelwright.db import Store, export_archive, import_archive
from kernelwright.db.record_lookup import RecordLookup
from tests.contracts.team_contract import fill
from tests.db.values import H100, L4, OLDER_TOOLCHAIN, matmul, record


def test_it_finds_what_the_store_finds(store: Store, tmp_path: Path) -> None:
    with Store.open("sqlite://") as other:
        other.put_winner(record(matmul(66), toolchain=OLDER_TOOLCHAIN))
        export_archive(other, tmp_path / "a")
    import_archive(store, tmp_path / "a")
    bad = record(matmul(67))
    for value in (record(), record(toolchain=OLDER_TOOLCHAIN), record(device=L4), record(matmul(65)), bad):
        store.put_winner(value)
    store.quarantine(bad.key, "wrong")
    workloads = [matmul(m) for m in (64, 65, 66, 67, 68)]
    for _ in range(2):
        found = RecordLookup(store).find(workloads, H100.key)
        for workload in workloads:
            place = (workload.key, H100.key)
            assert found.find_records(*place) == store.find_records(*place)
            assert found.find_untrusted(*place) == store.find_untrusted(*place)
    assert len(found.find_untrusted(matmul(66).key, H100.key)) == 1
    assert found.neighbours(matmul(63), H100.key) == store.neighbours(matmul(63), H100.key)


def test_neighbours_are_those_of_the_store(store: Store) -> None:
    with Store.open("sqlite://") as empty:
        assert RecordLookup(empty).neighbours(matmul(), H100.key) == []
    sizes = [(m, n) for m in range(1, 200, 7) for n in (512, 4096)]
    fill(store, [record(matmul(m, n)) for m, n in sizes])
    store.put_winner(record(matmul(8), toolchain=OLDER_TOOLCHAIN))
    lookup = RecordLookup(store)
    for workload in (matmul(9), matmul(64, 700), matmul(1, 1, 1), matmul(0)):
        for limit in (1, 8, 32):
            near = lookup.neighbours(workload, H100.key, limit)
            assert near == store.neighbours(workload, H100.key, limit) and len(near) == limit
