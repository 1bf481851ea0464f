"""Neighbours take turns on a GPU, throttled clocks are seen, and a machine unlike its kind is named."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kernelwright.search import device_guard
from kernelwright.search.device_guard import Clocks, DeviceLock, Probe, parse_clocks, read_clocks, why_unfit
from kernelwright.search.measure_job import Reply, _Worker
from kernelwright.search.probe_job import ProbeJob

QUICK = Probe(500.0, 300.0)


def hold(folder: Path, told: Any, finished: Any) -> None:
    """Another process that measures for a moment."""
    with DeviceLock("GPU-1", folder).held():
        told.set()
        time.sleep(0.3)
        finished.set()


def test_two_processes_take_turns_on_one_gpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told, finished = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, told, finished))
    other.start()
    assert told.wait(60)
    with DeviceLock("GPU-2", tmp_path).held():
        assert not finished.is_set()
    with DeviceLock("GPU-1", tmp_path).held():
        assert finished.is_set()
    other.join()


def test_a_folder_that_cannot_be_written_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lock = DeviceLock("GPU-1", tmp_path / "file")
    with lock.held():
        pass
    lock.close()
    lock.close()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1980, 1980, 0x0000000000000000\n", Clocks(1980, 1980)),
        ("1410, 1980, 0x0000000000000004\n", Clocks(1410, 1980)),
        ("345, 1980, 0x0000000000000048\n", Clocks(345, 1980, ("hardware slowdown", "too hot (hardware)"))),
        ("[N/A], 1980, 0x0\n", None),
        ("", None),
    ],
)
def test_clocks_are_read_as_the_driver_writes_them(line: str, expected: Clocks | None) -> None:
    assert parse_clocks(line) == expected


def test_without_a_driver_there_are_no_clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_clocks("0") is None
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\n[ \"$1\" = --id=GPU-1 ] && echo '1200, 1980, 0x20'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert read_clocks("GPU-1") == Clocks(1200, 1980, ("too hot (driver)",))
    assert read_clocks("GPU-2") is None


def test_of_two_that_differ_none_is_blamed_and_of_three_the_odd_one() -> None:
    slow = Probe(530.0, 300.0)
    assert why_unfit(slow, {"a": QUICK, "b": slow}) == ""
    peers = {"a": QUICK, "b": slow, "c": QUICK}
    assert "product takes 530.0 us, 500.0 us on 3 devices" in why_unfit(slow, peers)
    assert why_unfit(QUICK, peers) == ""
    assert "copy takes" in why_unfit(Probe(500.0, 350.0), peers)
    held = Probe(500.0, 300.0, Clocks(345, 1980, ("power brake",)))
    assert "clocks are held down (power brake): 345 of 1980 MHz" in why_unfit(held, {})
    assert device_guard.PROBE_BAND < 0.06


def test_the_measuring_process_runs_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelwright.search.measure_job.probe_times", lambda timer: (500.0, 300.0))
    worker = _Worker(0)
    worker._timer = None  # type: ignore[assignment]
    assert worker.do(ProbeJob()) == Reply((), probe_us=(500.0, 300.0))


@pytest.mark.parametrize("again", [True, False])
def test_a_lock_closed_while_it_is_held_is_free_and_harms_nobody(tmp_path: Path, again: bool) -> None:
    lock = DeviceLock("GPU-1", tmp_path)
    with lock.held():
        lock.close()
        # may get the number that the lock's file had
        with DeviceLock("GPU-1", tmp_path).held() if again else contextlib.nullcontext():
            pass
    with DeviceLock("GPU-1", tmp_path).held():
        pass


@pytest.mark.parametrize("end", ["close", "interrupt", "turn", "late"])
def test_a_wait_for_a_process_that_is_stopped_can_be_ended(tmp_path: Path, end: str, monkeypatch: Any) -> None:
    """Someone pressed Ctrl-Z during a trial."""
    monkeypatch.setattr(device_guard, "_TOLD_S", 0.05)
    words = (
        "import sys; from pathlib import Path; from kernelwright.search.device_guard import DeviceLock\n"
        "with DeviceLock('GPU-1', Path(sys.argv[1])).held(): print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", words, str(tmp_path)], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        other.send_signal(signal.SIGSTOP)
        lock, inside = DeviceLock("GPU-1", tmp_path), threading.Event()
        if end == "interrupt":
            monkeypatch.setattr(device_guard.logger, "warning", interrupt)
            with pytest.raises(KeyboardInterrupt), lock.held():
                pass
        elif end == "late":
            with pytest.raises(TimeoutError, match=r"for 0.2 s"), lock.held(0.2):
                pass
        else:
            thread = threading.Thread(target=enter, args=(lock, inside))
            thread.start()
            assert not inside.wait(0.3)
            if end == "close":
                lock.close()
                assert inside.wait(60)
                thread.join(60)
        other.send_signal(signal.SIGCONT)
        other.communicate(b"")
    if end == "turn":
        assert inside.wait(60)
        thread.join(60)
    with DeviceLock("GPU-1", tmp_path).held():
        pass
    wait_until(lambda: not any(thread.name == "kernelwright-turn" for thread in threading.enumerate()))
    with DeviceLock("GPU-1", tmp_path).held():
        pass
    lock.close()


def enter(lock: DeviceLock, inside: threading.Event) -> None:
    with lock.held():
        inside.set()


def interrupt(*words: Any) -> None:
    raise KeyboardInterrupt


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
