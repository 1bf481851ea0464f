"""Stream-K by numbers on the CPU: tiles shared by several programs, flags down again, the same bits twice."""

from __future__ import annotations

import random

import pytest
import torch

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul import stream_k_kernel
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.stream_k import STREAM_K
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import verify
from kernelwright.types import Schedule, Workload

KNOBS = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "num_warps": 4,
    "num_stages": 2,
    "group_m": 4,
    "split_k": 1,
    "stream_waves": 1,
    "subtile": 1,
    "blocks_per_sm": 1,
    "repack": 0,
}


def schedule(workload: Workload, **change: object) -> Schedule:
    precision = "ieee" if workload.dtypes["a"] == "fp32" else workload.dtypes["a"]
    return Schedule("stream_k", {**KNOBS, "precision": precision, **change})  # type: ignore[arg-type]


@pytest.fixture(params=[1, 3, 5, 7])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(stream_k_kernel, "multiprocessors", lambda tensor: request.param)
    return int(request.param)


@pytest.mark.parametrize(
    ("workload", "change"),
    [
        (matmul_workload(130, 128, 520, "fp16"), {}),
        (matmul_workload(130, 200, 264, "fp16", "nn", ("bias", "gelu", "residual")), {"subtile": 2}),
        (matmul_workload(200, 136, 264, "fp32", "nt"), {"stream_waves": 2}),
        (matmul_workload(72, 256, 320, "fp16", "nt", ("bias", "swiglu")), {}),
        (matmul_workload(70, 72, 264, "fp16", batch=3), {}),
        (matmul_workload(64, 61, 333, "fp16"), {"repack": 1}),
    ],
)
def test_every_way_to_share(programs: int, workload: Workload, change: dict[str, object]) -> None:
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    out = MATMUL.empty_output(workload, "cpu")
    launches = MATMUL.plan(workload, schedule(workload, **change), inputs, out)
    reference, tolerance = MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)
    launch_all(launches)
    first = out.clone()
    assert verify(first, reference, tolerance).right
    out.fill_(float("nan"))
    launch_all(launches)
    assert torch.equal(out, first), "a second launch of the same plan gives other bits"


def test_offered_only_where_the_last_wave_is_not_full() -> None:
    device = named_device("h100")
    assert len(STREAM_K.space(matmul_workload(2048, 1280, 8192), device))
    assert not len(STREAM_K.space(matmul_workload(16384, 16384, 4096), device))
    assert not len(STREAM_K.space(matmul_workload(2048, 1280, 8192), named_device("a100")))
    limited = matmul_workload(2048, 1280, 8192, attributes={"workspace_bytes": 2**20})
    assert not len(STREAM_K.space(limited, device))
    sampled = STREAM_K.space(matmul_workload(2048, 1280, 8192), device).sample(random.Random(0), 3)
    assert all(s.knobs["split_k"] == 1 for s in sampled)
