"""Answers from the local database, and what becomes of a compile when there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelwright.compiler import dispatch
from kernelwright.compiler.dispatch import RecordedAnswers, local_answers
from kernelwright.compiler.pieces import local_pieces
from kernelwright.db.store import Store
from kernelwright.errors import DatabaseError, DatabaseUnavailable, UnknownDevice
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Measurement, Status, TuningRecord

H100 = named_device("h100")
TOOLCHAIN = current_toolchain(TIMER_VERSION)
WORKLOAD = matmul_workload(2048, 4096, 4096)
Maker = Callable[..., TuningRecord]


def test_a_measured_win_is_ours(record_of: Maker) -> None:
    answer = RecordedAnswers([record_of(WORKLOAD)], H100, TOOLCHAIN)(WORKLOAD)
    assert (answer.how, answer.choice) == ("measured", "kernel")


def test_a_measured_loss_is_the_vendors(record_of: Maker) -> None:
    assert RecordedAnswers([record_of(WORKLOAD, ours_us=99.9)], H100, TOOLCHAIN)(WORKLOAD).choice == "vendor"


def test_nothing_known_is_the_vendors() -> None:
    answer = RecordedAnswers([], H100, TOOLCHAIN)(WORKLOAD)
    assert (answer.how, answer.choice, answer.schedule) == ("vendor", "vendor", None)


def test_another_toolchain_makes_it_stale(record_of: Maker) -> None:
    newer = dataclasses.replace(TOOLCHAIN, driver="999.0")
    assert RecordedAnswers([record_of(WORKLOAD)], H100, newer)(WORKLOAD).how == "stale"


def test_a_neighbour_is_found_in_the_same_family_only(record_of: Maker) -> None:
    near = matmul_workload(4096, 4096, 4096)
    answers = RecordedAnswers([record_of(near)], H100, TOOLCHAIN)
    assert answers(WORKLOAD).how == "nearest"
    assert answers(matmul_workload(2048, 4096, 4096, epilogue=("bias",))).how == "vendor"


def test_state_changes_with_the_records_and_not_with_their_order(record_of: Maker) -> None:
    one, two = record_of(WORKLOAD), record_of(matmul_workload(64, 64, 64))
    slower = dataclasses.replace(one, measurement=Measurement(Status.OK, 99.9))

    def state(*records: TuningRecord) -> str:
        return RecordedAnswers(records, H100, TOOLCHAIN).state

    assert state(one, two) == state(two, one)
    assert len({state(), state(one), state(one, two), state(slower)}) == 4


def test_local_answers_come_from_the_database(tmp_path: Path, record_of: Maker) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    with Store.open(url) as store:
        store.put_winner(record_of(WORKLOAD))
    assert local_answers(url, "h100")(WORKLOAD).choice == "kernel"
    assert local_answers(url, "b200")(WORKLOAD).choice == "vendor"


def test_asking_makes_no_database(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    with pytest.raises(DatabaseError, match="kernelwright tune"):
        local_answers(f"sqlite:///{path}", "h100")
    assert not path.exists()


@pytest.mark.parametrize("url", ["sqlite:////", "nonsense", "mysql://host/name"])
def test_a_database_that_cannot_be_used_is_a_database_error(url: str) -> None:
    with pytest.raises(DatabaseError):
        local_answers(url, "h100")


def test_without_a_gpu_there_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    Store.open(url).close()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    with pytest.raises(UnknownDevice):
        local_answers(url)


@pytest.mark.parametrize(("waited", "asked"), [(30.0, 1), (0.01, 3)], ids=["in vain", "not at all"])
def test_a_database_that_was_waited_for_in_vain_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: float, asked: int
) -> None:
    """Else a locked one would be waited for again by every graph of a model."""
    url, now, opened = f"sqlite:///{tmp_path / 'locked.db'}", [0.0], []
    Store.open(url).close()

    def locked(url: str | None) -> Store:
        opened.append(url)
        now[0] += waited
        raise DatabaseUnavailable("the database is locked")

    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(dispatch, "_resting", {})
    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", locked)
        for look in (local_answers, local_pieces, local_answers):
            with pytest.raises(DatabaseUnavailable, match="is locked"):
                look(url, "h100")
    assert len(opened) == asked
    now[0] += dispatch.REST_SECONDS
    assert len(local_pieces(url, "h100")) == 0
