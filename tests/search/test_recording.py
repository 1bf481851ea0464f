"""Sweeps: what is sampled, how slices go on, and what a killed sweep leaves behind."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kernelwright.errors import ArchiveError, UsageError
from kernelwright.search.recorded import load_recorded
from kernelwright.search.recording import (
    FINALS_SECONDS,
    Limits,
    Wanted,
    is_complete,
    near_best,
    record_all,
    record_workload,
    sample,
)
from kernelwright.search.recording_files import RecordingFolder, parse_wanted, read_trials
from kernelwright.search.sweep import sweep
from kernelwright.types import VENDOR_TEMPLATE, DeviceSpec, Schedule, Trial, Workload
from tests.search.fakes import WORKLOAD, FakeRunner, HalfRightModel, fake_space, true_us, workload

WANTED = Wanted(WORKLOAD, 30)
MODEL = HalfRightModel()


def soon(seconds: float = 60.0) -> Limits:
    """Limits with so many seconds for measuring."""
    return Limits(time.monotonic() + FINALS_SECONDS + seconds)


def test_a_third_of_the_sample_is_the_models_choice() -> None:
    runner = FakeRunner()
    chosen = sample(WANTED, runner, MODEL)
    assert len(chosen) == len(set(chosen)) == 30
    ranked = sorted(fake_space(), key=lambda s: (-MODEL.predict(WORKLOAD, runner.device, [s])[0], s.key))
    assert chosen[:10] == ranked[:10]
    assert {schedule.template for schedule in chosen} == {"pointer", "skinny"}
    assert len(sample(Wanted(WORKLOAD, 1000), runner, MODEL)) == len(fake_space())


def test_a_workload_is_swept_then_its_best_are_surrounded_and_timed_with_the_vendor() -> None:
    runner = FakeRunner()
    schedules = sample(WANTED, runner, MODEL)
    trials = record_workload(WANTED, schedules, runner, soon())
    assert [trial.schedule for trial in trials[:30]] == schedules
    swept = [trial for trial in trials if trial.origin == "record"]
    assert 30 < len(swept) <= 40 and len({trial.schedule for trial in swept}) == len(swept)
    best = min(schedules, key=lambda s: (true_us(s), s.key))
    assert any(trial.schedule in fake_space().neighbours(best) for trial in swept[30:])
    assert is_complete(trials) and trials[-1].schedule.template == VENDOR_TEMPLATE


def test_neighbours_are_new_and_of_the_best() -> None:
    runner = FakeRunner()
    trials = list(sweep(WORKLOAD, runner, sample(WANTED, runner, MODEL), finals=False))
    more = near_best(WORKLOAD, trials, runner, 3)
    assert len(more) == 3 and not {trial.schedule for trial in trials} & set(more)


def test_a_slice_that_ends_early_is_gone_on_with() -> None:
    runner = FakeRunner(seconds_each=0.01)
    schedules = sample(WANTED, runner, MODEL)
    first = record_workload(WANTED, schedules, runner, soon(0.1))
    assert 0 < len(first) < 30 and not is_complete(first)
    rest = record_workload(WANTED, schedules, runner, soon(), known=first)
    assert is_complete(rest)
    again = {trial.schedule for trial in first} & {trial.schedule for trial in rest if trial.origin == "record"}
    assert not again, "nothing is measured twice"


def test_a_slow_workload_ends_by_its_own_limit_and_is_complete() -> None:
    runner = FakeRunner(seconds_each=0.01)
    limits = Limits(soon().end, workload_seconds=0.1)
    trials = record_workload(WANTED, sample(WANTED, runner, MODEL), runner, limits)
    assert is_complete(trials) and len([t for t in trials if t.origin == "record"]) < 30


def test_workloads_come_in_order_until_the_end() -> None:
    work = [(Wanted(workload(m), 6), []) for m in (64, 128, 256)]
    found = list(record_all(work, FakeRunner(), MODEL, soon()))
    assert [done.workload for done in found] == [wanted.workload for wanted, _ in work]
    assert all(done.complete and done.trials for done in found)
    assert list(record_all(work, FakeRunner(), MODEL, soon(-1))) == []


class Compilers:
    """Notes what is compiled ahead; `broken` ones die at once."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.built: list[tuple[Workload, int]] = []

    def build_all(
        self, workload: Workload, schedules: Sequence[Schedule], device: DeviceSpec
    ) -> Iterator[tuple[Schedule, None]]:
        if self.broken:
            raise RuntimeError("the compilers died")
        self.built.append((workload, len(schedules)))
        yield from ((schedule, None) for schedule in schedules)


def test_coming_workloads_are_compiled_ahead() -> None:
    work = [(Wanted(workload(m), 6), []) for m in (64, 128)]
    pool = Compilers()
    assert len(list(record_all(work, FakeRunner(), MODEL, soon(), pool))) == 2  # type: ignore[arg-type]
    assert pool.built == [(wanted.workload, 6) for wanted, _ in work]


def test_nobody_waits_for_compilers_that_died(caplog: pytest.LogCaptureFixture) -> None:
    work: list[tuple[Wanted, list[Trial]]] = [(Wanted(WORKLOAD, 6), [])]
    began = time.monotonic()
    assert len(list(record_all(work, FakeRunner(), MODEL, soon(), Compilers(broken=True)))) == 1  # type: ignore[arg-type]
    assert time.monotonic() - began < 30
    assert "compiling ahead ended" in caplog.text and "the compilers died" in caplog.text


def trials_of(m: int) -> list[Trial]:
    wanted = Wanted(workload(m), 6)
    return record_workload(wanted, sample(wanted, FakeRunner(), MODEL), FakeRunner(), soon())


def test_parts_are_there_at_once_and_packed_at_the_end(tmp_path: Path) -> None:
    folder = RecordingFolder(tmp_path)
    one, two = trials_of(64), trials_of(128)
    folder.add(one)
    folder.add(two)
    assert not folder.path("h100", "matmul").exists()
    after_a_kill = RecordingFolder(tmp_path)
    assert {trial.key for trial in after_a_kill.known("h100", "matmul")} == {trial.key for trial in one + two}
    count = after_a_kill.pack("h100", "matmul")
    assert count == len({trial.key for trial in one + two}) == len(load_recorded(folder.path("h100", "matmul")))
    assert [path.name for path in (tmp_path / "h100").iterdir()] == ["matmul.parquet"]
    assert folder.pack("h100", "matmul", more=one) == count, "what is there is not added again"
    assert folder.pack("h200", "matmul") == 0 and not (tmp_path / "h200").exists()


def test_trials_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    one, two = trials_of(64), trials_of(128)
    RecordingFolder(tmp_path).pack("h100", "matmul", more=one)
    with gzip.open(tmp_path / "two.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(trial.to_json()) + "\n" for trial in two)
    keys = {trial.key for trial in read_trials([tmp_path])}
    assert keys == {trial.key for trial in one + two}
    with pytest.raises(UsageError, match=r"must be a recording .* got none"):
        list(read_trials([tmp_path / "absent.parquet"]))
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ArchiveError, match=r"bad\.jsonl must hold one trial as JSON in each line"):
        list(read_trials([tmp_path / "bad.jsonl"]))


def test_workloads_to_record_are_read_as_json_or_lines() -> None:
    plain, other = WORKLOAD.to_json(), workload(16).to_json()
    expected = [Wanted(WORKLOAD, 7), Wanted(workload(16), 3)]
    entries = [plain, {"workload": other, "count": 3, "id": "x"}, plain]
    for text in (
        json.dumps(entries),
        json.dumps({"workloads": entries}),
        "\n\n".join(json.dumps(entry) for entry in entries),
    ):
        assert parse_wanted(text, count=7) == expected
    assert parse_wanted(json.dumps(plain), count=7) == expected[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one workload"),
        ("[]", "at least one workload"),
        ('{"operator": "matmul"}\nnonsense', "line 2 is not"),
        ('[{"operator": "fft", "dims": {}, "dtypes": {}}]', "workload 1 cannot be read: operator must be"),
        ('[{"operator": "matmul", "dims": {"M": 4}, "dtypes": {}}]', "workload 1 cannot be read"),
        ("[3]", "workload 1 cannot be read"),
        ('{"problems": []}', r"problems\.py SET --jsonl"),
    ],
)
def test_workloads_that_cannot_be_read_are_told(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_wanted(text)


def test_a_sample_has_at_least_one_schedule() -> None:
    with pytest.raises(UsageError, match="count must be 1 or more, got 0"):
        parse_wanted(json.dumps([{"workload": WORKLOAD.to_json(), "count": 0}]))
