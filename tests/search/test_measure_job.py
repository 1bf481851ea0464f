"""The measuring process: which operands stay loaded on the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search import measure_job
from kernelwright.search.measure_job import Operands, _Loaded
from kernelwright.types import Workload

A, B, C = (matmul_workload(64, 64, size, "fp16") for size in (64, 128, 192))


class FakeGpu:
    """Every workload takes 10 bytes of 100, those named in `large` more; `loads` are in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **large: int) -> None:
        self.large = large
        self.loads: list[tuple[int, int]] = []
        self.alive: dict[int, int] = {}
        monkeypatch.setattr(measure_job, "_load", self.load)

    def load(self, workload: Workload, seed: int) -> _Loaded:
        size = self.large.get(f"k{workload.dims['K']}", 10)
        self.loads.append((workload.dims["K"], seed))
        if self.allocated() + size > 100:
            raise RuntimeError("CUDA out of memory")
        return _Loaded(workload, seed, None, {}, Held(self.alive, size), None)  # type: ignore[arg-type]

    def allocated(self) -> int:
        return sum(self.alive.values())


class Held:
    """Memory that is given back when nobody refers to it."""

    def __init__(self, alive: dict[int, int], size: int) -> None:
        self._alive = alive
        alive[id(self)] = size

    def __del__(self) -> None:
        self._alive.pop(id(self), None)


def used(operands: Operands, *asked: Any) -> None:
    for workload, seed in asked:
        assert operands.of(workload, seed).workload == workload


def test_two_workloads_can_take_turns_without_loading_anything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    used(Operands(gpu.allocated, 100), (A, 1), (B, 1), (A, 1), (B, 1), (A, 1))
    assert gpu.loads == [(64, 1), (128, 1)]


def test_of_more_workloads_and_of_other_seeds_the_last_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(measure_job, "KEPT_WORKLOADS", 2)
    operands = Operands(gpu.allocated, 100)
    used(operands, (A, 1), (B, 1), (A, 1), (C, 1), (A, 1))
    assert gpu.loads == [(64, 1), (128, 1), (192, 1)] and gpu.allocated() == 20
    used(operands, (A, 2), (A, 1), (C, 1))
    assert gpu.loads[3:] == [(64, 2), (192, 1)] and gpu.allocated() == 20


def test_what_is_too_large_beside_another_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, k128=15)
    operands = Operands(gpu.allocated, 20)
    used(operands, (A, 1), (C, 1))
    assert gpu.allocated() == 20
    used(operands, (B, 1))
    assert gpu.allocated() == 15
    used(operands, (A, 1))
    assert gpu.allocated() == 10


def test_a_workload_that_finds_no_room_beside_others_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, k128=95, k192=105)
    operands = Operands(gpu.allocated, 1000)
    used(operands, (A, 1), (B, 1))
    assert gpu.loads == [(64, 1), (128, 1), (128, 1)] and gpu.allocated() == 95
    with pytest.raises(RuntimeError, match="out of memory"):
        operands.of(C, 1)
    assert gpu.loads[3:] == [(192, 1), (192, 1)] and gpu.allocated() == 0
