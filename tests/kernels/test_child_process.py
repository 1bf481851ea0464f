"""ChildProcess: results come back; aborts, hangs and exceptions are told and survived."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import OutOfResources
from kernelwright.kernels import child_process
from kernelwright.kernels.child_process import ChildDied, ChildError, ChildProcess, ChildRaised, ChildTimeout

TARGETS = Path(__file__).parents[1] / "assets" / "child_targets"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    monkeypatch.syspath_prepend(TARGETS)
    with ChildProcess("kw_child_target:work", env={"KW_TEST": "seen"}) as child:
        yield child


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie; nobody can wait for one before all its threads have ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> bool:
    deadline = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(running, pids))


def test_jobs_run_one_after_another_in_one_other_process(child: ChildProcess) -> None:
    first = child.call(("pid",))
    assert first == child.call(("pid",)) == child.pid != os.getpid()
    assert child.call(("double", "x" * 200_000), 30) == "x" * 400_000
    assert child.call(("env", "KW_TEST")) == "seen"
    assert child.call(("main",)) == (None, True)


def test_abort_is_told_with_signal_and_last_words_and_survived(child: ChildProcess) -> None:
    first = child.call(("pid",))
    with pytest.raises(ChildDied, match="killed by SIGABRT") as caught:
        child.call(("abort", "UNREACHABLE executed at Lowering.cpp:42"), 30)
    assert caught.value.exit_code == -signal.SIGABRT
    assert "Lowering.cpp:42" in str(caught.value)
    assert child.call(("pid",)) != first


def test_exit_code_is_kept(child: ChildProcess) -> None:
    with pytest.raises(ChildDied, match="exited with code 3"):
        child.call(("exit", 3), 30)


def test_hang_is_killed_with_everything_it_started(child: ChildProcess, tmp_path: Path) -> None:
    child.start()
    started = time.monotonic()
    with pytest.raises(ChildTimeout, match=r"after 0.5 s") as caught:
        child.call(("hang", str(tmp_path / "pids")), 0.5)
    assert time.monotonic() - started < 30
    assert "about to hang" in caught.value.stderr
    assert wait_until_gone(*map(int, (tmp_path / "pids").read_text().split()))
    assert child.pid is None
    assert child.call(("double", 4), 30) == 8


def test_exceptions_come_back_and_the_process_goes_on(child: ChildProcess) -> None:
    first = child.call(("pid",))
    with pytest.raises(ChildRaised, match="LookupError: no such knob") as caught:
        child.call(("raise", "no such knob"))
    assert "do_raise" in caught.value.trace
    assert caught.value.stderr == "context on stdout"
    with pytest.raises(OutOfResources, match="needs 300000 bytes"):
        child.call(("resources", "needs 300000 bytes"))
    with pytest.raises(ChildRaised, match="pickle"):
        child.call(("unpicklable",))
    assert child.call(("pid",)) == first


def test_last_words_are_of_this_job_only(child: ChildProcess) -> None:
    with pytest.raises(ChildRaised):
        child.call(("raise", "first"))
    with pytest.raises(ChildDied) as caught:
        child.call(("abort", "second"), 30)
    assert caught.value.stderr == "second"


def test_a_child_killed_between_jobs_is_replaced(child: ChildProcess) -> None:
    pid = child.call(("pid",))
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid)
    assert child.call(("double", 1), 30) == 2


def test_abandoning_from_another_thread_ends_a_call_and_all_later_ones(child: ChildProcess) -> None:
    child.start()
    killer = threading.Timer(0.2, child.abandon)
    killer.start()
    with pytest.raises(ChildDied, match="SIGKILL"):
        child.call(("hang",), 30)
    killer.join()
    with pytest.raises(ChildDied):
        child.call(("double", 1))
    assert child.pid is None


def test_an_abandoned_child_is_not_started(child: ChildProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_spawn", lambda nursery: pytest.fail("a process"))
    child.abandon()
    with pytest.raises(ChildDied):
        child.call(("double", 1))


def test_error_lines_before_a_long_dump_are_kept(child: ChildProcess) -> None:
    with pytest.raises(ChildDied) as caught:
        child.call(("abort", "a.py:1: error: bad layout\n" + "dump\n" * 5000), 30)
    assert caught.value.stderr.startswith("a.py:1: error: bad layout")
    assert len(caught.value.stderr) < 5000


def test_init_makes_a_job_function_with_state(child: ChildProcess) -> None:
    with ChildProcess("kw_child_target:Counter", init={"start": 10}) as counter:
        assert [counter.call(1), counter.call(5)] == [11, 16]
        counter.kill()
        assert counter.call(1) == 11


@pytest.mark.parametrize(
    ("target", "init", "words"),
    [
        ("kw_child_target:broken_init", {}, "RuntimeError: no GPU today"),
        ("kw_child_target:absent", None, "AttributeError"),
        ("kw_no_such_module:x", None, "ModuleNotFoundError"),
    ],
)
def test_a_start_that_fails_says_why(child: ChildProcess, target: str, init: dict[str, int] | None, words: str) -> None:
    broken = ChildProcess(target, init=init)
    with pytest.raises(ChildRaised, match=words):
        broken.call(1)
    assert broken.pid is None


def test_errors_survive_pickling() -> None:
    for error in (ChildDied(-6, "words"), ChildTimeout(2.0, "words"), ChildRaised("T", "m", "t", "words")):
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, ChildError)
        assert (type(copy), str(copy), copy.stderr) == (type(error), str(error), "words")


PARENT = """
import sys
sys.path.insert(0, {targets!r})
from kernelwright.kernels.child_process import ChildProcess
print(ChildProcess("kw_child_target:work").call(("double", 21)), flush=True)
ChildProcess("kw_child_target:work").call(("hang", {pids!r}))
"""


def test_children_of_a_killed_parent_die_with_it(tmp_path: Path) -> None:
    """Also: works in a parent that reads its program from stdin."""
    pids = tmp_path / "pids"
    program = PARENT.format(targets=str(TARGETS), pids=str(pids))
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(program)
        parent.stdin.close()
        assert parent.stdout.readline() == "42\n"
        deadline = time.monotonic() + 20
        while not (pids.exists() and pids.read_text().count(" ")) and time.monotonic() < deadline:
            time.sleep(0.02)
        child, helper = map(int, pids.read_text().split())
        assert running(child) and running(helper)
        parent.kill()
    assert wait_until_gone(child, helper)


def test_closing_an_abandoned_child_waits_for_the_thread_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that both end it would close its files twice, and those of others that got their numbers."""
    monkeypatch.syspath_prepend(TARGETS)
    child = ChildProcess("kw_child_target:work")
    found: list[BaseException] = []

    def hang() -> None:
        try:
            child.call(("hang",), 60)
        except BaseException as error:
            found.append(error)

    # as on a slow machine
    monkeypatch.setattr(child, "_death", slowed(child._death))
    child.start()
    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.2)
    child.abandon()
    child.close()
    thread.join()
    assert [type(error) for error in found] == [ChildDied]


def slowed(do: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, a little later."""

    def later(value: Any) -> Any:
        time.sleep(0.2)
        return do(value)

    return later
