"""How the GPUs of this machine are opened."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.search.local_fleet import _open_gpu


@pytest.mark.parametrize(("count", "expected"), [(1, ""), (2, "GPU-b"), (8, "GPU-b")])
def test_only_one_of_several_is_named(count: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process one slice of a GPU at most, and knows it by another name than a whole one's."""
    opened: list[Any] = []
    monkeypatch.setattr("kernelwright.kernels.device.gpu_count", lambda: count)
    monkeypatch.setattr("kernelwright.kernels.device.gpu_uuid", lambda index: "GPU-b")
    monkeypatch.setattr(
        "kernelwright.search.child_runner.ChildRunner", lambda index, **options: opened.append((index, options))
    )
    _open_gpu(0)
    assert opened == [(0, {"compile_workers": 1, "visible": expected})]
