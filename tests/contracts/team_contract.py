"""What a store adds for a team, whichever database is under it: keys, audit log, idempotent jobs, pages, trust, use."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

import pytest

from kernelwright.db import JobRequest, RecordState, Store, Trust
from kernelwright.db.engine import session_scope
from kernelwright.db.nearby import MOST_CANDIDATES
from kernelwright.db.rows import Parts, insert_new, record_row
from kernelwright.db.tables import RecordRow
from kernelwright.errors import UsageError
from kernelwright.types import Measurement, Schedule, Status, TuningRecord
from tests.db.values import H100, L4, OLDER_TOOLCHAIN, TOOLCHAIN, matmul, record, trial


class AccessContract:
    """Keys and audit log."""

    def test_a_key_is_found_by_its_hash_until_it_is_revoked(self, store: Store) -> None:
        made = store.add_key("ci ✗\x00", "a" * 64, ["tune", "read"])
        assert store.find_key_by_hash("a" * 64) == made
        assert made.scopes == {"read", "tune"} and made.revoked_at is None and made.created_at > "2020"
        assert store.find_key_by_hash("b" * 64) is None
        store.touch_key([made.id, "nosuch"])
        found = store.find_key_by_hash("a" * 64)
        assert found is not None and found.last_used_at is not None
        assert store.revoke_key(made.id) and not store.revoke_key(made.id) and not store.revoke_key("nosuch")
        assert store.find_key_by_hash("a" * 64) is None
        (listed,) = store.list_keys()
        assert listed.id == made.id and listed.revoked_at is not None

    def test_a_secret_is_stored_once(self, store: Store) -> None:
        store.add_key("one", "a" * 64, ["read"])
        with pytest.raises(UsageError, match="make a new secret"):
            store.add_key("two", "a" * 64, ["read"])

    def test_the_audit_log_is_told_newest_first(self, store: Store) -> None:
        for number in range(5):
            store.audit("open", "submit", f"job {number}", "x\x00")
        assert [entry.subject for entry in store.audit_entries(limit=2, offset=1)] == ["job 3", "job 2"]
        (entry,) = store.audit_entries(limit=1)
        assert (entry.who, entry.action, entry.detail) == ("open", "submit", "x\N{REPLACEMENT CHARACTER}")


class PageContract:
    """Jobs made once, and reading in pages."""

    def test_a_named_request_makes_one_job(self, store: Store) -> None:
        request = JobRequest(matmul(), "cuda", trials=8)
        job = store.submit(request, "once")
        assert store.submit(request, "once") == job
        assert store.submit(request, "again").id != job.id
        assert store.submit(request).id != store.submit(request).id
        with pytest.raises(UsageError, match="'once' belongs to another request"):
            store.submit(dataclasses.replace(request, trials=9), "once")
        assert store.count_jobs()["queued"] == 4

    def test_jobs_go_on_after_the_last_of_a_page(self, store: Store) -> None:
        jobs = [store.submit(JobRequest(matmul(), "cuda")).id for _ in range(5)][::-1]
        page = store.jobs(limit=2)
        assert [job.id for job in page] == jobs[:2]
        assert [job.id for job in store.jobs(limit=2, after=page[-1].id)] == jobs[2:4]
        assert store.jobs(after="nosuch") == []

    def test_trials_go_on_after_the_last_of_a_page(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "cuda"))
        failed = trial(9, measurement=Measurement(Status.CRASHED))
        store.add_trial(trial(0))
        store.add_trials([*(trial(number) for number in range(1, 6)), failed], job.id)
        page = store.trial_page(job_id=job.id, limit=2)
        assert [one.trial for one in page] == [trial(1), trial(2)]
        rest = store.trial_page(job_id=job.id, after=page[-1].id)
        assert [one.trial for one in rest] == [trial(3), trial(4), trial(5), failed]
        assert list(store.trials_of_job(job.id, after=rest[2].id)) == [failed]
        assert store.trial_page(job_id=job.id, after=rest[-1].id) == []
        found = store.trial_page(workload_key=matmul().key, device_key=H100.key, status="crashed")
        assert [one.trial for one in found] == [failed]

    def test_records_go_on_after_the_last_of_a_page(self, store: Store) -> None:
        # Equal moments, so that the id has to tell them apart.
        made = [record(matmul(m)) for m in range(1, 6)]
        for value in made:
            store.put_winner(value)
        page = store.records(limit=2)
        assert page == made[:2:-1]
        assert store.records(limit=2, after=page[-1].key) == made[2:0:-1]
        assert store.records(after="nosuch") == []

    def test_trials_are_counted_by_status_for_a_workload(self, store: Store) -> None:
        store.add_trials([trial(1), trial(2, measurement=Measurement(Status.TIMEOUT)), trial(3, workload=matmul(65))])
        assert store.count_trials(matmul().key, H100.key) == {"ok": 1, "timeout": 1}
        assert store.count_trials(matmul().key, L4.key) == {}

    def test_the_pareto_front_is_what_nothing_beats_in_both(self, store: Store) -> None:
        points = [(10.0, 1e-2), (11.0, 1e-3), (12.0, 5e-3), (13.0, 1e-4), (9.0, None), (14.0, None)]
        trials = [
            trial(number, measurement=Measurement(Status.OK, us, error=error))
            for number, (us, error) in enumerate(points)
        ]
        vendor = trial(50, schedule=Schedule("vendor", {"call": "torch.mm"}), measurement=Measurement(Status.OK, 1.0))
        older = trial(51, toolchain=OLDER_TOOLCHAIN, measurement=Measurement(Status.OK, 1.0, error=1e-9))
        store.add_trials([older, *trials, vendor, trial(52, measurement=Measurement(Status.CRASHED))])
        front = [trials[4], trials[0], trials[1], trials[3]]
        assert store.pareto(matmul().key, H100.key, TOOLCHAIN.key) == front
        assert store.pareto(matmul().key, H100.key) == front
        assert store.pareto(matmul().key, H100.key, OLDER_TOOLCHAIN.key) == [older]
        assert store.pareto("nosuch", H100.key) == []


class TrustContract:
    """Quarantine and use."""

    def test_a_record_in_quarantine_is_not_served(self, store: Store) -> None:
        bad, good = record(), record(matmul(65))
        store.put_winner(bad)
        store.put_winner(good)
        assert store.quarantine(bad.key, "wrong \x00")
        assert store.find_records(bad.workload.key, H100.key) == [] and store.records() == [good]
        assert store.neighbours(matmul(66), H100.key) == [good]
        assert store.get_record(bad.key) == bad
        state = RecordState(Trust.QUARANTINED, reason="wrong \N{REPLACEMENT CHARACTER}")
        assert store.record_state(bad.key) == state and store.record_state("nosuch") is None
        assert store.count_trust() == {"measured": 1, "quarantined": 1}

    def test_uses_add_up(self, store: Store) -> None:
        store.put_winner(record())
        store.count_use([])
        store.count_use([record().key, "other", record().key])
        store.count_use([record().key])
        state = store.record_state(record().key)
        assert state is not None and state.uses == 3

    def test_what_to_refresh(self, store: Store) -> None:
        codes = {"pointer": "f" * 20}
        old = [record(matmul(m), toolchain=OLDER_TOOLCHAIN) for m in (64, 65, 66)]
        renewed = record(matmul(66))
        other_source = record(matmul(67), template_fingerprint="e" * 20)
        for value in (*old, renewed, other_source, record(matmul(68)), record(device=L4, toolchain=OLDER_TOOLCHAIN)):
            store.put_winner(value)
        store.count_use([old[0].key, old[0].key, other_source.key])
        wanted = [old[0], other_source, old[1]]
        assert store.to_refresh(H100.key, TOOLCHAIN.key, codes) == wanted
        assert store.to_refresh(H100.key, TOOLCHAIN.key, codes, limit=1) == wanted[:1]
        assert len(store.to_refresh(H100.key, TOOLCHAIN.key, {})) == 5


class FamilyContract:
    """Neighbours in a family of thousands."""

    def test_the_nearest_are_found_among_thousands(self, store: Store) -> None:
        draw = random.Random(3)
        sizes = {(draw.randrange(1, 9000), draw.choice([4096, 8192]), draw.choice([4096, 512])) for _ in range(900)}
        sizes |= {(m, 2048, 2048) for m in range(1, 700)}
        fill(store, [record(matmul(*size)) for size in sorted(sizes)])
        for asked in (matmul(300, 2048, 2048), matmul(5000, 4096, 4096), matmul(7000, 8192, 512)):
            found = store.neighbours(asked, H100.key, limit=8)
            others = [one for one in sizes if matmul(*one) != asked]
            best = sorted(others, key=lambda size: _distance(size, asked.dims))[:8]
            distances = [_distance(tuple(r.workload.dims[name] for name in "MNK"), asked.dims) for r in found]
            assert distances == pytest.approx([_distance(size, asked.dims) for size in best])
        assert len(sizes) > 4 * MOST_CANDIDATES


def fill(store: Store, records: list[TuningRecord]) -> None:
    """Store many records in one transaction."""
    parts = Parts()
    rows = [record_row(value, parts) for value in records]
    with session_scope(store.engine, write=True) as session:
        parts.save(session)
        insert_new(session, RecordRow, rows)


def _distance(size: tuple[int, ...], dims: Mapping[str, int]) -> float:
    return math.hypot(*(math.log2(a) - math.log2(dims[name]) for a, name in zip(size, "MNK", strict=True)))


class TeamContract(AccessContract, PageContract, TrustContract, FamilyContract):
    """All of it."""
