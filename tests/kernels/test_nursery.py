"""Forked children: what ChildProcess promises holds for them, and they share what the nursery imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelwright.kernels.child_process import ChildDied, ChildProcess, ChildRaised, ChildTimeout
from kernelwright.kernels.nursery import Nursery
from tests.kernels.test_child_process import TARGETS, running, wait_until_gone

TARGET = "kw_child_target:work"


@pytest.fixture
def nursery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    monkeypatch.syspath_prepend(TARGETS)
    nursery = Nursery("kw_child_target:preload", {"KW_TEST": "all"})
    yield nursery
    nursery.close()


@pytest.fixture
def child(nursery: Nursery) -> Iterator[ChildProcess]:
    with ChildProcess(TARGET, nursery=nursery) as child:
        yield child


def test_children_are_forks_of_one_process_that_imported_once(
    nursery: Nursery, child: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KW_LATE", "seen")
    with ChildProcess(TARGET, env={"KW_TEST": "own"}, nursery=nursery) as other:
        pids = {child.call(("pid",)), other.call(("pid",)), os.getpid()}
        assert len(pids) == 3
        parents = {child.call(("parent",)), other.call(("parent",))}
        assert len(parents) == 1 and not parents & pids
        assert child.call(("preloaded",)) == other.call(("preloaded",)) != os.getpid()
        assert (child.call(("env", "KW_TEST")), other.call(("env", "KW_TEST"))) == ("all", "own")
        assert other.call(("env", "KW_LATE")) == "seen"


def test_the_next_fork_has_what_was_loaded_once(child: ChildProcess) -> None:
    before = [child.call((what,)) for what in ("preloaded", "parent")]
    child.kill()
    assert child.call(("double", "x" * 200_000), 30) == "x" * 400_000
    assert [child.call((what,)) for what in ("preloaded", "parent")] == before


def test_aborts_exits_and_exceptions_are_told_and_survived(child: ChildProcess) -> None:
    with pytest.raises(ChildDied, match="killed by SIGABRT") as caught:
        child.call(("abort", "UNREACHABLE executed"), 30)
    assert caught.value.exit_code == -signal.SIGABRT and "UNREACHABLE" in str(caught.value)
    with pytest.raises(ChildDied) as caught:
        child.call(("exit", 7), 30)
    assert caught.value.exit_code == 7
    with pytest.raises(ChildRaised, match="LookupError: lost") as raised:
        child.call(("raise", "lost"), 30)
    assert "context on stdout" in raised.value.stderr


def test_a_hang_takes_only_that_child_and_what_it_started(
    nursery: Nursery, child: ChildProcess, tmp_path: Path
) -> None:
    with ChildProcess(TARGET, nursery=nursery) as other:
        kept = other.call(("pid",))
        with pytest.raises(ChildTimeout, match="about to hang"):
            child.call(("hang", str(tmp_path / "pids")), 1.0)
        assert wait_until_gone(*map(int, (tmp_path / "pids").read_text().split()))
        assert other.call(("pid",)) == kept


def test_a_nursery_that_died_is_replaced_and_its_children_count_as_dead(child: ChildProcess) -> None:
    first, gone = child.call(("pid",)), child.call(("parent",))
    os.kill(gone, signal.SIGKILL)
    assert wait_until_gone(gone)
    assert child.call(("pid",)) != first and child.call(("parent",)) != gone
    assert wait_until_gone(first)


def test_closing_ends_a_fork_that_waits_and_refuses_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    nursery = Nursery("kw_child_target:slow_preload")
    child = ChildProcess(TARGET, nursery=nursery)
    found: list[BaseException] = []

    def start() -> None:
        try:
            child.start()
        except ChildDied as error:
            found.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    while nursery._process is None:
        time.sleep(0.01)
    begin = time.monotonic()
    nursery.close()
    thread.join(60.0)
    assert not thread.is_alive() and time.monotonic() - begin < 30.0 and len(found) == 1
    with pytest.raises(ChildDied, match="closed"):
        child.start()
    nursery.close()


def test_a_nursery_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    monkeypatch.setattr("kernelwright.kernels.nursery._ANSWER_S", 0.5)
    nursery = Nursery("kw_child_target:slow_preload")
    with ChildProcess(TARGET, nursery=nursery) as child, pytest.raises(ChildDied, match="does not answer"):
        child.start()
    assert nursery._process is not None and nursery._process.poll() is not None
    nursery.close()


def test_imports_that_fail_are_told_by_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = Nursery("no_such_module:nothing")
    with ChildProcess("no_such_module:nothing", nursery=nursery) as child, pytest.raises(ChildRaised, match="no_such"):
        child.start()
    nursery.close()


def test_nothing_outlives_the_parent() -> None:
    words = (
        "import sys; sys.path.insert(0, sys.argv[1]); from kernelwright.kernels.child_process import ChildProcess; "
        "from kernelwright.kernels.nursery import Nursery; n = Nursery('kw_child_target:preload'); "
        "c = ChildProcess('kw_child_target:work', nursery=n); "
        "print(c.call(('pid',)), c.call(('parent',)), flush=True); import os; os.kill(os.getpid(), 9)"
    )
    told = subprocess.run([sys.executable, "-c", words, str(TARGETS)], stdout=subprocess.PIPE, text=True).stdout
    pids = [int(word) for word in told.split()]
    assert len(pids) == 2 and wait_until_gone(*pids) and not any(map(running, pids))


def zombies_of(*pids: int) -> set[int]:
    """Those that ended and that nobody waited for."""
    return {pid for pid in pids if Path(f"/proc/{pid}").exists() and not running(pid)}


def test_closing_leaves_no_children_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first process of a container waits for no orphans, each would be a zombie for good."""
    monkeypatch.syspath_prepend(TARGETS)
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here
    try:
        nursery = Nursery("kw_child_target:preload")
        children = [ChildProcess(TARGET, nursery=nursery) for _ in range(4)]
        pids = [child.call(("pid",)) for child in children]
        nursery.close()
        assert wait_until_gone(*pids) and not zombies_of(*pids)
        for child in children:
            child.close()
        with pytest.raises(ChildProcessError):
            os.waitpid(-pids[0], os.WNOHANG)
    finally:
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def test_a_machine_without_room_for_one_more_process_keeps_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    nursery = Nursery("kw_child_target:no_more_processes")
    children = [ChildProcess(TARGET, nursery=nursery) for _ in range(3)]
    pids = [child.call(("pid",)) for child in children[:2]]
    for _ in range(2):
        with pytest.raises(ChildDied, match="cannot fork"):
            children[2].start()
    assert [child.call(("pid",)) for child in children[:2]] == pids
    nursery.close()
    for child in children:
        child.close()


@pytest.mark.parametrize("forked", [True, False])
def test_children_work_however_many_files_are_open(
    nursery: Nursery, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child takes five; machines have hundreds of cores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the machine allows no more open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with ChildProcess(TARGET, nursery=nursery if forked else None) as child:
            first = child.call(("pid",))
            assert child.call(("pid",)) == first
            with pytest.raises(ChildDied, match="code 7"):
                child.call(("exit", 7), 30)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spare", range(9))
def test_a_child_for_which_no_files_are_left_leaves_none_open(nursery: Nursery, spare: int) -> None:
    with ChildProcess(TARGET, nursery=nursery) as other, ChildProcess(TARGET, nursery=nursery) as child:
        other.start()
        limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), open_files()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 10, limits[1]))
        full = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    full.append(os.dup(0))
            for _ in range(spare):
                os.close(full.pop())
            with pytest.raises(ChildDied, match="Too many open files"):
                child.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in full:
                os.close(fd)
        assert open_files() == before
        assert child.call(("double", 2)) == 4


def open_files() -> set[int]:
    """The descriptors of this process."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")}
