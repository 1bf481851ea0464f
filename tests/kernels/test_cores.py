"""Cores that may be used, where a machine has more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelwright.kernels import cores
from kernelwright.kernels.cores import compilers, usable_cores


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert (usable_cores(), compilers()) == (expected, max(1, expected - 1))


def test_systems_that_do_not_tell_have_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "none")
    assert usable_cores() == 6
