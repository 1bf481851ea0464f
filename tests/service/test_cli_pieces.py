"""The pieces of a model are timed on a GPU of this machine, in the seconds that are kept for them."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from kernelwright.errors import UsageError
from kernelwright.kernels.child_process import ChildDied
from kernelwright.service import cli_pieces
from kernelwright.service.cli_fleet import Where
from kernelwright.service.cli_tune import SECONDS_HELP
from kernelwright.service.settings import load_settings

PIECE = {"piece": "mm+relu", "calls": 3, "theirs_us": 10.0, "ours_us": 8.0, "replaced": True, "failures": []}


class Child:
    """Stands in for the process that times."""

    jobs: ClassVar[list[tuple[dict[str, Any], float | None]]] = []
    replies: ClassVar[list[Any]] = []

    def __init__(self, target: str, init: dict[str, Any]) -> None:
        assert target == "kernelwright.compiler.piece_file:begin"
        self._job, self._left = init, list(self.replies)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, payload: None, timeout_s: float | None) -> Any:
        if len(self._left) == len(self.replies):
            self.jobs.append((self._job, timeout_s))
        reply = self._left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[Child]:
    Child.jobs, Child.replies = [], [{"missing": 1}, PIECE, None]
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
        [] if index is None else [("model.py", index, cli_pieces.UNBOUND_S)]
    )
    told = capsys.readouterr().err
    first, line = (
        "1 pieces of model.py are timed as a whole\n",
        "mm+relu: ours 8.00 us, Inductor 10.00 us, 3 calls: ours\n",
    )
    assert told == ("" if index is None else first + line)


def test_without_seconds_pieces_have_a_bound_all_the_same(child: type[Child]) -> None:
    """Whatever the tuning before it took: the bound counts from when pieces are begun."""
    for began in (time.monotonic(), time.monotonic() - 1e6):
        cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), began, None)
        job, timeout_s = child.jobs.pop()
        assert job["seconds"] == cli_pieces.UNBOUND_S > cli_pieces.LEAST_S
        assert timeout_s is not None and 0 < timeout_s <= cli_pieces.UNBOUND_S + cli_pieces._GRACE_S


def test_the_help_of_tune_tells_the_bound_of_pieces() -> None:
    assert f"({cli_pieces.UNBOUND_S:g} without --seconds)" in SECONDS_HELP


def test_pieces_get_what_is_left(child: type[Child], capsys: pytest.CaptureFixture[str]) -> None:
    for spent in (70.0, 95.0, 200.0):
        cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), time.monotonic() - spent, 100.0)
    ((job, timeout_s),) = child.jobs
    assert 29.0 <= job["seconds"] <= 30.0 and timeout_s == pytest.approx(job["seconds"] + cli_pieces._GRACE_S, abs=1.0)
    assert capsys.readouterr().err.count("no time is left") == 2


@pytest.mark.parametrize("error", [ChildDied(-9, ""), UsageError("planted")])
def test_failure_is_told_and_harmless(child: type[Child], error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """What was timed before it has been told already."""
    child.replies = [{"missing": 3}, PIECE, error]
    cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), time.monotonic(), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == cli_pieces.line_of(PIECE) and "were not timed any further" in lines[2]


def test_what_the_budget_left_out_is_told(child: type[Child], capsys: pytest.CaptureFixture[str]) -> None:
    child.replies = [{"missing": 3}, PIECE, None]
    cli_pieces.time_pieces("model.py", load_settings(), Where("cuda"), time.monotonic(), None)
    assert "2 pieces of model.py were not timed; tune again" in capsys.readouterr().err
