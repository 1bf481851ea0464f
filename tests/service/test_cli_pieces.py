"""The pieces of a model are timed on a GPU of this machine, in the seconds that are kept for them."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from kernelwright.kernels.child_process import ChildDied
from kernelwright.service import cli_pieces
from kernelwright.service.cli_fleet import Where
from kernelwright.service.settings import load_settings

PIECE = {"piece": "mm+relu", "calls": 3, "theirs_us": 10.0, "ours_us": 8.0, "replaced": True, "failures": []}


class Child:
    """Stands in for the process that times."""

    jobs: ClassVar[list[tuple[dict[str, Any], float | None]]] = []

    def __init__(self, target: str) -> None:
        assert target == "kernelwright.compiler.piece_file:time_file"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, job: dict[str, Any], timeout_s: float | None) -> list[dict[str, Any]]:
        self.jobs.append((job, timeout_s))
        return [PIECE]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[Child]:
    Child.jobs = []
    monkeypatch.setattr(cli_pieces, "ChildProcess", Child)
    return Child


@pytest.mark.parametrize(
    ("where", "index"),
    [
        (Where("cuda"), 0),
        (Where("cuda:1"), 1),
        (Where("gpu"), 0),
        (Where("cuda:2,cuda:3"), 2),
        (Where("replay:h100"), None),
        (Where("cuda", "ray"), None),
    ],
    ids=str,
)
def test_only_a_gpu_of_this_machine_times_pieces(
    where: Where, index: int | None, child: type[Child], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_pieces.for_workloads(where, 100.0) == (100.0 if index is None else 80.0)
    assert cli_pieces.for_workloads(where, None) is None
    cli_pieces.time_pieces("model.py", load_settings(), where, time.monotonic(), None)
    assert [(job["target"], job["device_index"], job["seconds"]) for job, _ in child.jobs] == (
        [] if index is None else [("model.py", index, None)]
    )
    told = capsys.readouterr().err
    assert told == ("" if index is None else "mm+relu: ours 8.00 us, Inductor 10.00 us, 3 calls: ours\n")


def test_pieces_get_what_is_left(child: type[Child], capsys: pytest.CaptureFixture[str]) -> None:
    for spent in (70.0, 95.0, 200.0):
        cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), time.monotonic() - spent, 100.0)
    ((job, timeout_s),) = child.jobs
    assert 29.0 <= job["seconds"] <= 30.0 and timeout_s == job["seconds"] + cli_pieces._GRACE_S
    assert capsys.readouterr().err.count("no time is left") == 2


def test_failure_is_told_and_harmless(
    child: type[Child], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Child, job: Any, timeout_s: float | None) -> Any:
        raise ChildDied(-9, "")

    monkeypatch.setattr(child, "call", fail)
    cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), time.monotonic(), None)
    assert "were not timed" in capsys.readouterr().err
