"""Processes that the tests of one process share: to start one takes longer than most of what it does here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.nursery import Nursery

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def pool(own_environment: None) -> Iterator[BuildPool]:
    """One compiler in a process of its own; what it has compiled once it takes from its cache."""
    with BuildPool(1, timeout_s=110.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter(own_environment: None) -> Iterator[Nursery]:
    """It has imported torch and Triton's interpreter, and forks processes that run Python files with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        nursery = Nursery("child_script:preload", {"TRITON_INTERPRET": "1"})
        yield nursery
        nursery.close()


@pytest.fixture
def run(interpreter: Nursery, tmp_path: Path) -> Run:
    """Runs the text of a rendered file on the CPU, in a process and a folder of its own."""

    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "kernel.py"
        file.write_text(source, encoding="utf-8")
        with ChildProcess("child_script:start", init={}, nursery=interpreter) as child:
            done: subprocess.CompletedProcess[str] = child.call([str(file), *arguments], 120.0)
            return done

    return run
