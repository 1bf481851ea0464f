"""Start the scripts beside this file as processes that begin at the same moment."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


@contextlib.contextmanager
def children(script: str, *arguments: tuple[str, ...]) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each tuple of arguments, all of them ready and none of them begun."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for own in arguments
    ]
    try:
        assert [line_of(process) for process in processes] == ["ready"] * len(processes)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def begin(process: subprocess.Popen[str]) -> None:
    """Let a process go."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that the process says; "" at its end."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outputs(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Let all go and wait for them; the lines that each said."""
    for process in processes:
        begin(process)
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return said
