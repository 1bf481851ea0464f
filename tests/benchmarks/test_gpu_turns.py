"""Turns on a GPU: among processes, and of what Inductor measures."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime import benchmarking

gpu_turns = pytest.importorskip("gpu_turns")

HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from gpu_turns import Turns
with Turns("7").taken():
    print("mine", flush=True)
    sys.stdin.readline()
print("given back", flush=True)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpu_turns.tempfile, "tempdir", None)


def is_taken(path: Path) -> bool:
    """Whether somebody has the turn of this file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_process_waits_for_the_turn_of_another() -> None:
    folder = str(Path(gpu_turns.__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "mine\n"
        with gpu_turns.Turns("8").taken():
            pass
        turns = gpu_turns.Turns("7")
        assert is_taken(turns.path)
        other.stdin.write("go on\n")
        other.stdin.flush()
        with turns.taken(), turns.taken():
            assert other.stdout.readline() == "given back\n" and is_taken(turns.path)
    assert not is_taken(turns.path)


def test_inductor_measures_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seen = gpu_turns.Turns("7"), []
    kind: Any = type(benchmarking.benchmarker)

    def measured(self: object, call: str) -> str:
        seen.append((call, turns._depth))
        return f"{call} took"

    monkeypatch.setattr(kind, "benchmark_gpu", measured)
    with gpu_turns.inductor_in_turns(turns):
        assert benchmarking.benchmarker.benchmark_gpu("one") == "one took"
    benchmarking.benchmarker.benchmark_gpu("two")
    assert seen == [("one", 1), ("two", 0)] and turns._depth == 0 and kind.benchmark_gpu is measured
