"""Kernels of a graph are compiled in parallel ahead of their launches; launches wait for those under way only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kernelwright.compiler import prebuild
from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.prebuild import FEWEST, build_ahead, wait_for
from kernelwright.errors import BuildFailed
from kernelwright.kernels import get_operator
from kernelwright.kernels.built import is_built, note_built
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Schedule, Workload
from tests.compiler.conftest import SCHEDULE, Recorder

DEVICE = named_device("h100")


class FakePool:
    """Builds when it is let; `failing` schedules do not build."""

    made: list[FakePool] = []  # noqa: RUF012

    def __init__(self, workers: int) -> None:
        self.workers, self.closed = workers, threading.Event()
        self.begun: list[Workload] = []
        self.go, self.fail = threading.Event(), False
        FakePool.made.append(self)

    def build(self, workload: Workload, schedule: Schedule, device: DeviceSpec) -> None:
        self.begun.append(workload)
        assert self.go.wait(30)
        if self.fail:
            raise BuildFailed("no")
        note_built(workload, schedule, device)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FakePool]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prebuild, "BuildPool", FakePool)
    monkeypatch.setattr(prebuild, "compilers", lambda: 2)
    FakePool.made = []
    yield FakePool.made
    for pool in FakePool.made:
        pool.go.set()
        assert pool.closed.wait(30)
    prebuild._pending.clear()


def answers(count: int, size: int = 64) -> list[Answer]:
    return [
        Answer("measured", matmul_workload(size + n, size, size, "fp16"), DEVICE, SCHEDULE, "kernel")
        for n in range(count)
    ]


def test_few_kernels_are_left_to_their_launches(pools: list[FakePool]) -> None:
    assert build_ahead(answers(FEWEST - 1)) == 0
    assert build_ahead([answers(1)[0]] * 20) == 0
    assert not pools


def test_a_launch_waits_for_what_is_being_compiled_and_for_nothing_else(pools: list[FakePool]) -> None:
    asked = answers(6)
    assert build_ahead(asked) == 6
    (pool,) = pools
    assert pool.workers == 2
    while len(pool.begun) < 2:
        time.sleep(0.01)
    queued = [answer for answer in asked if answer.workload not in pool.begun]
    for answer in queued:
        wait_for(answer.workload, SCHEDULE)
    running = asked[0].workload
    assert running in pool.begun
    waiting = threading.Thread(target=wait_for, args=(running, SCHEDULE))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    pool.go.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert pool.closed.wait(30)
    assert len(pool.begun) == 2
    assert [is_built(a.workload, SCHEDULE, DEVICE) for a in asked] == [a.workload in pool.begun for a in asked]


def test_what_the_cache_holds_is_not_compiled_again(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = answers(5)
    for answer in asked[:3]:
        note_built(answer.workload, SCHEDULE, DEVICE)
    assert build_ahead(asked) == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert not is_built(asked[0].workload, SCHEDULE, DEVICE)
    assert build_ahead(asked) == 5
    pools[0].go.set()
    assert pools[0].closed.wait(30)
    assert not is_built(asked[0].workload, SCHEDULE, DEVICE)


def test_a_failed_build_is_the_launch_s_own_matter(pools: list[FakePool]) -> None:
    asked = answers(4)
    assert build_ahead(asked) == 4
    pools[0].fail = True
    pools[0].go.set()
    for answer in asked:
        wait_for(answer.workload, SCHEDULE)
    assert pools[0].closed.wait(30)
    assert not any(is_built(answer.workload, SCHEDULE, DEVICE) for answer in asked)


def test_another_source_or_gpu_is_another_kernel(pools: list[FakePool]) -> None:
    workload = answers(1)[0].workload
    note_built(workload, SCHEDULE, DEVICE)
    assert is_built(workload, SCHEDULE, DEVICE)
    assert not is_built(workload, SCHEDULE, named_device("a100"))
    assert not is_built(workload, Schedule("pointer", {**SCHEDULE.knobs, "num_warps": 8}), DEVICE)
    assert not is_built(matmul_workload(65, 64, 64, "bf16"), SCHEDULE, DEVICE)


def test_the_backend_builds_for_the_gpu_that_is_present_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelwright.compiler import backend

    passes = []
    monkeypatch.setattr(backend, "Replace", lambda *_, **options: passes.append(options["chosen"]))
    monkeypatch.setattr(backend, "joined", lambda *_: None)
    ours = backend.Options(answers=lambda workload: answers(1)[0])
    backend.kernel_settings(ours, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend.kernel_settings(ours, {})
    backend.kernel_settings(backend.Options(answers=ours.answers, device="h100"), {})
    assert passes == [None, build_ahead, None]


def test_the_pass_tells_what_a_graph_got(recorder: Callable[..., Recorder]) -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a @ b, b @ a

    told: list[Answer] = []
    graph = make_fx(model, tracing_mode="fake")(torch.randn(64, 32), torch.randn(32, 64)).graph
    narrow = recorder(lambda workload: workload.dims["M"] == 32)
    Replace(narrow, devices=("cpu",), chosen=told.extend)(graph)
    assert [(answer.workload.dims["M"], answer.schedule) for answer in told] == [(32, SCHEDULE)]


@pytest.mark.parametrize(
    ("layers", "x"),
    [
        pytest.param((torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32)), torch.randn(2, 16, 9, 9), id="conv2d"),
        pytest.param((torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)), torch.randn(8, 16), id="matmul"),
    ],
)
def test_folded_batch_norms_launch_the_kernel_that_was_measured(
    layers: Sequence[torch.nn.Module], x: torch.Tensor, forced: Any
) -> None:
    """Another one, for vectors of another type, would be in no cache, however long was tuned."""
    model = torch.nn.Sequential(*layers, torch.nn.ReLU()).bfloat16().eval()
    with torch.no_grad():
        forced.compile(model)(x.bfloat16())
    (call,) = (node for graph in forced.graphs for node in graph.nodes if node.target is CALL)
    operands, names, text, *_ = call.args
    workload = Workload.from_json(json.loads(text))
    assert workload.epilogue[:2] == ("scale_vec", "bias")
    launched = {name: node.meta["val"].dtype for name, node in zip(names.split(","), operands, strict=True)}
    measured = get_operator(workload.operator).make_inputs(workload, 0, "meta")
    assert launched == {name: tensor.dtype for name, tensor in measured.items()}
    assert launched["scale_vec"] is torch.float32


def test_triton_hashes_itself_while_the_graph_is_compiled(pools: list[FakePool]) -> None:
    """It would before the first launch, for half a second."""
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    prebuild.hashing.cache_clear()
    build_ahead([])
    assert prebuild.hashing.cache_info().currsize == 0
    build_ahead(answers(1))
    prebuild.hashing().join()
    assert triton_key.cache_info().currsize == 1
