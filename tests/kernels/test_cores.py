"""Cores that may be used, where a machine has more."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import pytest

from kernelwright.kernels import cores
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.cores import compilers, usable_cores
from kernelwright.kernels.nursery import Nursery
from tests.kernels.test_child_process import TARGETS


@pytest.mark.parametrize(
    ("allowed", "quota", "expected"),
    [
        (range(224), "max 100000", 224),
        (range(224), "400000 100000", 4),
        (range(224), "150000 100000", 2),
        (range(224), "1000 100000", 1),
        (range(3), "400000 100000", 3),
        (range(8), None, 8),
        (range(8), "", 8),
        (range(8), "100000 0", 8),
    ],
)
def test_a_container_has_its_share(
    allowed: range, quota: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert (usable_cores(), compilers()) == (expected, max(1, expected - 1))


@pytest.mark.parametrize(("files", "expected"), [(1024, 102), (64, 6), (4, 1), (resource.RLIM_INFINITY, 223)])
def test_compilers_leave_open_files_to_others(files: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    monkeypatch.setattr(cores, "usable_cores", lambda: 224)
    assert compilers() == expected


def test_a_child_takes_no_more_files_than_is_reckoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    nursery = Nursery("kw_child_target:preload")
    with contextlib.closing(nursery), ChildProcess("kw_child_target:work", nursery=nursery) as first:
        first.start()
        before = len(os.listdir("/proc/self/fd"))
        with ChildProcess("kw_child_target:work", nursery=nursery) as second:
            second.start()
            assert len(os.listdir("/proc/self/fd")) - before == cores.FILES


def test_systems_that_do_not_tell_have_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "none")
    assert usable_cores() == 6
