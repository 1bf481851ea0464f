"""Steps: what takes time is told to who listens, from child processes as well, and costs nothing otherwise."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelwright.kernels.child_process import ChildProcess, ChildRaised
from kernelwright.kernels.steps import Collector, listening, step

TARGETS = Path(__file__).parents[1] / "assets" / "child_targets"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector().attach()
    yield collector
    collector.detach()


def test_steps_are_told_with_their_times_also_when_they_fail(collector: Collector) -> None:
    before = time.monotonic()
    with pytest.raises(ValueError, match="bad"), step("outer"):
        with step("inner"):
            time.sleep(0.02)
        raise ValueError("bad")
    inner, outer = collector.take()
    assert (inner.name, outer.name, inner.process) == ("inner", "outer", os.getpid())
    assert before <= outer.began <= inner.began <= inner.ended - 0.02 <= outer.ended <= time.monotonic()
    assert collector.take() == []


def test_steps_of_children_are_told_by_their_parent(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    with ChildProcess("kw_child_target:work") as child:
        child.call(("step", "deep inside", False))
        pid = child.pid
        with pytest.raises(ChildRaised, match="failed after"):
            child.call(("step", "at last", True))
    told = [(one.name, one.process) for one in collector.take()]
    assert told == [
        ("import kw_child_target", pid),
        ("start kw_child_target:work", os.getpid()),
        ("deep inside", pid),
        ("at last", pid),
    ]


def test_nobody_listens_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not listening()
    monkeypatch.syspath_prepend(TARGETS)
    with ChildProcess("kw_child_target:work") as child:
        assert child.call(("listening",)) is False
