"""What a store does, whichever database is under it. A test module subclasses these and has a `store` fixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelwright.db import JobRequest, JobState, Store
from kernelwright.errors import UsageError
from kernelwright.types import Measurement, Schedule, Status, Trial, TuningRecord
from tests.db import values
from tests.db.values import H100, L4, OLDER_TOOLCHAIN, TOOLCHAIN, matmul, record, trial

# One store for all examples is meant: a value must come back whatever else is stored.
any_value = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


class TrialContract:
    """Trials."""

    def test_a_trial_is_stored_once(self, store: Store) -> None:
        assert store.add_trial(trial(1)) is True
        assert store.add_trial(trial(1)) is False
        assert list(store.trials()) == [trial(1)]

    def test_failures_are_kept(self, store: Store) -> None:
        failed = trial(1, measurement=Measurement(Status.CRASHED, message="died: \x00 \ud800 ✗"))
        store.add_trials([failed, trial(2)])
        assert failed in list(store.trials())
        assert store.count_trials() == {"crashed": 1, "ok": 1}

    def test_many_come_back_in_the_order_of_storing(self, store: Store) -> None:
        pages = [trial(number) for number in range(1203)]
        assert store.add_trials(pages[:600]) == 600
        assert store.add_trials(iter(pages)) == 603
        assert list(store.trials()) == pages

    def test_repeats_in_one_call_are_stored_once(self, store: Store) -> None:
        assert store.add_trials([trial(1), trial(2), trial(1)]) == 2

    @pytest.mark.parametrize(
        "odd",
        [
            trial(2, workload=matmul(65)),
            trial(2, device=L4),
            trial(2, toolchain=OLDER_TOOLCHAIN),
            trial(2, workload=matmul(operator="conv2d")),
        ],
        ids=["workload", "device", "toolchain", "operator"],
    )
    def test_trials_are_found_by_each_key(self, store: Store, odd: Trial) -> None:
        store.add_trials([trial(1), odd])
        places = [
            {"workload_key": t.workload.key, "device_key": t.device.key, "toolchain_key": t.toolchain.key}
            | {"operator": t.workload.operator}
            for t in (trial(1), odd)
        ]
        assert list(store.trials(**places[0])) == [trial(1)]
        assert list(store.trials(**places[1])) == [odd]
        (differing,) = {name for name in places[0] if places[0][name] != places[1][name]} - (
            {"workload_key"} if odd.workload.operator == "conv2d" else set()
        )
        assert list(store.trials(**{differing: places[1][differing]})) == [odd]

    def test_devices_that_differ_in_name_only_are_told_apart(self, store: Store) -> None:
        renamed = dataclasses.replace(H100, name="H100 of the other lab", source="measured")
        assert renamed.key == H100.key
        store.add_trials([trial(1), trial(2, device=renamed)])
        assert {t.device.name for t in store.trials(device_key=H100.key)} == {H100.name, renamed.name}

    def test_a_job_keeps_its_trials(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "replay:h100"))
        store.add_trial(trial(1), job_id=job.id)
        store.add_trial(trial(2))
        store.add_trials([trial(3)], job.id)
        assert list(store.trials_of_job(job.id)) == [trial(1), trial(3)]

    def test_a_trial_of_no_job_is_refused(self, store: Store) -> None:
        with pytest.raises(UsageError, match="job must exist, got nosuch"):
            store.add_trial(trial(1), job_id="nosuch")
        assert list(store.trials()) == []

    def test_a_reader_may_stop_or_write_meanwhile(self, store: Store) -> None:
        store.add_trials(trial(number) for number in range(501))
        reader: Iterator[Trial] = store.trials()
        next(reader)
        store.add_trial(trial(1000))
        assert len(list(reader)) == 501

    @any_value
    @given(found=st.lists(values.trials, max_size=4))
    def test_any_trial_comes_back_as_it_was(self, store: Store, found: list[Trial]) -> None:
        known = {value.key for value in store.trials()}
        store.add_trials(found)
        stored = {value.key: value for value in store.trials()}
        for key, value in reversed([(value.key, value) for value in found]):
            if key not in known and [other.key for other in found].count(key) == 1:
                assert stored[key] == value
                assert stored[key].to_json() == value.to_json()


class RecordContract:
    """Records."""

    def test_a_winner_replaces_one_of_the_same_key(self, store: Store) -> None:
        better = record(schedule=Schedule("skinny", {"block_m": 16}), trials=48)
        assert store.put_winner(record()) == store.put_winner(better) == better.key
        assert store.get_record(better.key) == better
        assert store.records() == [better]
        assert store.count_records() == 1

    def test_a_miss_is_none_or_empty(self, store: Store) -> None:
        assert store.get_record("nosuch") is None
        assert store.find_records("nosuch", "nosuch") == []
        assert store.neighbours(matmul(), H100.key) == []

    def test_records_of_a_workload_come_newest_first(self, store: Store) -> None:
        older = record(toolchain=OLDER_TOOLCHAIN, created_at="2026-03-01T00:30:00+02:00")
        newer = record(created_at="2026-02-28T23:00:00Z")
        for value in (newer, older, record(matmul(65)), record(device=L4)):
            store.put_winner(value)
        assert store.find_records(matmul().key, H100.key) == [newer, older]

    def test_neighbours_differ_in_sizes_only_and_come_nearest_first(self, store: Store) -> None:
        near, far, own = record(matmul(80)), record(matmul(640)), record(matmul(64))
        others = [
            record(matmul(65, dtypes={"a": "fp16", "b": "fp16", "out": "fp16"})),
            record(matmul(65, layouts={"a": "row", "b": "row", "out": "row"})),
            record(matmul(65, epilogue=("bias",))),
            record(matmul(65, attributes={"batch": 2})),
            record(matmul(65, error_budget=0.1)),
            record(matmul(65, operator="linear")),
            record(matmul(65), device=L4),
        ]
        for value in (far, own, *others, near):
            store.put_winner(value)
        assert store.neighbours(matmul(64), H100.key) == [near, far]
        assert store.neighbours(matmul(639), H100.key, limit=1) == [far]

    def test_a_neighbour_shows_its_newest_record(self, store: Store) -> None:
        newer = record(matmul(80), toolchain=TOOLCHAIN, created_at="2026-05-01T00:00:00+00:00")
        older = record(matmul(80), toolchain=OLDER_TOOLCHAIN, created_at="2026-04-01T00:00:00+00:00")
        store.put_winner(newer)
        store.put_winner(older)
        assert store.neighbours(matmul(0), H100.key) == [newer]

    def test_records_are_listed_by_page(self, store: Store) -> None:
        made = [record(matmul(m), created_at=f"2026-01-{m:02}T00:00:00+00:00") for m in range(1, 8)]
        for value in made:
            store.put_winner(value)
        store.put_winner(record(device=L4))
        newest_first = made[::-1]
        assert store.records(device_key=H100.key, limit=3, offset=2) == newest_first[2:5]
        assert store.records("matmul", H100.key, limit=None) == newest_first
        assert store.records("conv2d") == []

    @any_value
    @given(value=values.records)
    def test_any_record_comes_back_as_it_was(self, store: Store, value: TuningRecord) -> None:
        record_id = store.put_winner(value)
        found = store.get_record(record_id)
        assert found == value
        assert found is not None and found.to_json() == value.to_json()
        assert value in store.find_records(value.workload.key, value.device.key)


class JobContract:
    """Jobs."""

    def test_a_request_comes_back_as_a_queued_job(self, store: Store) -> None:
        request = JobRequest(matmul(), "replay:h100", strategy="random", trials=24, seconds=60.5, seed=2**40)
        job = store.submit(request)
        assert store.get_job(job.id) == job
        assert {name: getattr(job, name) for name in request.__dict__} == request.__dict__
        assert (job.state, job.worker, job.done, job.total) == (JobState.QUEUED, None, 0, 24)
        assert store.get_job("nosuch") is None

    def test_jobs_are_claimed_first_come_first_served(self, store: Store) -> None:
        submitted = [store.submit(JobRequest(matmul(m), "cuda")) for m in (1, 2, 3)]
        claimed = [store.claim(f"worker {number}") for number in range(4)]
        assert [job and job.id for job in claimed] == [*(job.id for job in submitted), None]
        assert claimed[0] is not None
        assert (claimed[0].state, claimed[0].worker, claimed[0].attempts) == ("running", "worker 0", 1)

    def test_a_worker_may_take_only_jobs_of_its_devices(self, store: Store) -> None:
        store.submit(JobRequest(matmul(), "cuda"))
        wanted = store.submit(JobRequest(matmul(), "replay:h100"))
        claimed = store.claim("w", ["replay:h100", "replay:l4"])
        assert claimed is not None and claimed.id == wanted.id
        assert store.claim("w", ["replay:h100"]) is None

    def test_only_the_claiming_worker_reports(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "cuda"))
        assert not store.heartbeat(job.id, "a") and not store.finish(job.id, "a", "r")
        store.claim("a")
        for worker, own in (("b", False), ("a", True)):
            assert store.heartbeat(job.id, worker) is own
            assert store.progress(job.id, worker, 7, 30) is own
        assert not store.finish(job.id, "b", "r") and not store.fail(job.id, "b", "no")
        assert store.finish(job.id, "a", "r" * 20)
        done = store.get_job(job.id)
        assert done is not None
        assert (done.state, done.record_id, done.done, done.total) == ("done", "r" * 20, 7, 30)

    def test_an_ended_job_stays_as_it_is(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "cuda"))
        store.claim("a")
        assert store.fail(job.id, "a", "no schedule \x00 worked \ud800")
        failed = store.get_job(job.id)
        assert failed is not None and failed.state.is_final and "no schedule" in failed.message
        assert not store.finish(job.id, "a", "r") and not store.cancel(job.id) and not store.heartbeat(job.id, "a")
        assert store.requeue_stale(0) == 0 and store.claim("b") is None
        assert store.get_job(job.id) == failed

    def test_cancelling(self, store: Store) -> None:
        running = store.submit(JobRequest(matmul(), "cuda"))
        store.claim("a")
        queued = store.submit(JobRequest(matmul(), "cuda"))
        assert store.cancel(running.id) and store.cancel(queued.id)
        assert not store.cancel("nosuch")
        assert not store.heartbeat(running.id, "a") and not store.finish(running.id, "a", "r")
        assert store.claim("b") is None

    def test_a_dead_workers_job_returns_to_its_place_in_the_queue(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "cuda"))
        store.submit(JobRequest(matmul(), "cuda"))
        store.claim("dead")
        assert store.requeue_stale(older_than_seconds=60) == 0
        assert store.requeue_stale(older_than_seconds=0) == 1
        again = store.claim("alive")
        assert again is not None and (again.id, again.attempts) == (job.id, 2)
        assert not store.heartbeat(job.id, "dead") and not store.finish(job.id, "dead", "r")
        assert store.finish(job.id, "alive", "r")

    def test_a_job_that_loses_every_worker_fails(self, store: Store) -> None:
        job = store.submit(JobRequest(matmul(), "cuda"))
        for attempt in range(3):
            assert store.claim(f"w{attempt}") is not None
            assert store.requeue_stale(0) == (1 if attempt < 2 else 0)
        failed = store.get_job(job.id)
        assert failed is not None and failed.state == "failed" and "went away 3 times" in failed.message

    def test_jobs_are_listed_and_counted_by_state(self, store: Store) -> None:
        jobs = [store.submit(JobRequest(matmul(), "cuda")) for _ in range(3)]
        store.claim("a")
        assert [job.id for job in store.jobs()] == [job.id for job in reversed(jobs)]
        assert [job.id for job in store.jobs("queued", limit=1, offset=1)] == [jobs[1].id]
        assert store.count_jobs() == {"queued": 2, "running": 1, "done": 0, "failed": 0, "cancelled": 0}
        with pytest.raises(UsageError, match="must be one of queued, running"):
            store.jobs("lost")

    def test_a_worker_needs_a_name(self, store: Store) -> None:
        with pytest.raises(UsageError, match="needs a name"):
            store.claim("")


class StoreContract(TrialContract, RecordContract, JobContract):
    """All of it."""
