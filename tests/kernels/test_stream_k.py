"""Stream-K built for a GPU that is not here: the loop stays pipelined, parts stay in their threads, copies are wide."""

from __future__ import annotations

import pytest

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.stream_k import STREAM_K
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")


def member(workload: Workload, **wanted: object) -> Schedule:
    """A schedule of the space with the wanted knobs."""
    return next(
        s for s in STREAM_K.space(workload, H100) if all(s.knobs[name] == value for name, value in wanted.items())
    )


@pytest.mark.parametrize(
    ("workload", "tile"),
    [
        (matmul_workload(2048, 1280, 8192, epilogue=("bias", "gelu")), (128, 256, 64)),
        (matmul_workload(2048, 1280, 8192, "fp8e4m3", scaling="row"), (128, 128, 128)),
    ],
)
def test_the_one_loop_stays_pipelined(pool: BuildPool, workload: Workload, tile: tuple[int, int, int]) -> None:
    knobs = dict(zip(("block_m", "block_n", "block_k"), tile, strict=True))
    schedule = member(workload, **knobs, num_warps=8, num_stages=3, subtile=2, stream_waves=1)
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    code = str(report.artifact["matmul_stream_k.ttgir"])
    assert "isAsync = true" in code
    assert "pendings = 1" in code, "the product is waited for before the next one starts"
    assert report.spills == 0
    # a part that passed through shared memory would need a whole fp32 tile there
    assert report.shared_bytes < STREAM_K.shared_bytes(workload, schedule) + 1024


def test_fp32_products_without_matrix_units_keep_their_registers() -> None:
    workload = matmul_workload(1000, 1000, 1000, "fp32", error_budget=1e-3)
    exact = [s for s in STREAM_K.space(workload, H100) if s.knobs["precision"] == "ieee"]
    assert exact
    assert all(int(s.knobs["block_m"]) * int(s.knobs["block_n"]) <= 1024 * int(s.knobs["num_warps"]) for s in exact)
