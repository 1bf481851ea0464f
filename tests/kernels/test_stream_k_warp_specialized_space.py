"""The shared-out warp-specialised template's space and builds, without a GPU."""

from __future__ import annotations

import importlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import triton

from kernelwright.kernels import triton_adapter
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.matmul.stream_k_warp_specialized import STAGES, STREAM_K_WARP_SPECIALIZED, clocks, pieces
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import FrozenMap, Scalar, Schedule, Workload

H100 = named_device("h100")
LARGE = matmul_workload(2048, 1280, 8192)


def members(workload: Workload, slug: str = "h100") -> tuple[Any, ...]:
    return STREAM_K_WARP_SPECIALIZED.space(workload, named_device(slug)).members


@pytest.mark.parametrize(
    "workload",
    [
        matmul_workload(2048, 1280, 8192, "fp32"),
        matmul_workload(2048, 1280, 8192, batch=4),
        matmul_workload(2048, 1280, 8192, groups=4),
        matmul_workload(2048, 1280, 8192, epilogue=("swiglu",)),
        matmul_workload(2048, 1280, 8192, "int8", scaling="row"),
        matmul_workload(2048, 1280, 8192, "fp8e4m3", "nn", scaling="tensor"),
        matmul_workload(2048, 1280, 8192, b_dtype="int4", scaling="group:64"),
        matmul_workload(2048, 0, 512),
        matmul_workload(2048, 512, 0),
    ],
    ids=str,
)
def test_no_schedules_for_what_the_kernel_cannot_do(workload: Workload) -> None:
    assert not members(workload)


def test_schedules_are_for_hopper_and_fit_there() -> None:
    for slug in ("a100", "b200", "rtx5090", "mi300x"):
        assert not members(LARGE, slug)
    found = members(LARGE)
    assert 8 <= len(found) < 100
    assert all(STREAM_K_WARP_SPECIALIZED.shared_bytes(LARGE, s) <= H100.shared_memory_bytes for s in found)


def test_each_row_it_was_made_for_has_the_schedule_it_was_made_with() -> None:
    wanted = [
        (LARGE, (128, 256, 1)),
        (LARGE, (128, 160, 0)),
        (matmul_workload(2048, 4672, 4544), (128, 256, 1)),
        (matmul_workload(2048, 4672, 4544), (128, 144, 0)),
        (matmul_workload(1000, 3072, 768, "bf16", "nn", ("bias", "gelu_tanh")), (128, 192, 0)),
        (matmul_workload(729, 4304, 1152, "fp16", epilogue=("bias", "gelu")), (128, 256, 1)),
        (matmul_workload(729, 4304, 1152, "fp16", epilogue=("bias", "gelu")), (128, 256, 0)),
        (matmul_workload(1000, 1000, 1000), (128, 128, 1)),
    ]
    for workload, shape in wanted:
        names = ("block_m", "block_n", "stream_waves")
        assert shape in {tuple(s.knobs[name] for name in names) for s in members(workload)}, str(workload)


def test_nothing_is_shared_out_where_tiles_fill_their_waves_or_k_is_short() -> None:
    full = matmul_workload(128 * 132, 256, 8192)
    assert not any(s.knobs["stream_waves"] for s in members(full) if s.knobs["block_n"] == 256)
    assert not any(s.knobs["stream_waves"] for s in members(matmul_workload(2048, 1280, 128)))


def test_whole_tiles_of_powers_of_two_are_offered_where_the_epilogue_is_long() -> None:
    for epilogue, offered in (((), False), (("bias", "relu"), False), (("bias", "gelu"), True), (("silu",), True)):
        found = members(matmul_workload(729, 4304, 1152, "fp16", epilogue=epilogue))
        whole = any(s.knobs["block_n"] == 256 and not s.knobs["stream_waves"] for s in found)
        assert whole == offered, epilogue


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_only_the_deepest_ring_and_the_best_parts_of_a_tile_are_offered(out_dtype: str) -> None:
    workload = matmul_workload(2048, 1280, 8192, out_dtype=out_dtype)
    found = members(workload)
    shapes = {tuple(s.knobs[x] for x in ("block_m", "block_n", "stream_waves", "group_m", "a_held")) for s in found}
    assert len(shapes) == len(found)
    for schedule in found:
        deeper = [x for x in STAGES if x > int(schedule.knobs["num_stages"])]
        for stages in deeper:
            knobs = {**schedule.knobs, "num_stages": stages}
            assert STREAM_K_WARP_SPECIALIZED.shared(problem_of(workload), knobs) > H100.shared_memory_bytes


def test_clocks_are_those_of_the_head_of_the_file() -> None:
    problem = problem_of(LARGE)
    shape = {"block_m": 128, "block_n": 256, "stream_waves": 0, "a_held": 0}
    assert clocks(problem, H100, shape) == 128 * 1024
    # 80 tiles shared out by 132 multiprocessors
    assert clocks(problem, H100, {**shape, "stream_waves": 1}) == pytest.approx(128 * 1024 * 80 / 132, rel=0.08)
    # 25% more for 128 columns, 35% for 160, 42% for 144
    for columns, more, held in ((128, 1.25, 0), (160, 1.35, 0), (144, 1.42, 0), (160, 1.15, 1), (144, 1.19, 1)):
        rounds = -(-16 * -(-1280 // columns) // 132)
        found = clocks(problem, H100, {**shape, "block_n": columns, "a_held": held})
        assert found == pytest.approx(rounds * 128 * 128 * columns / 32 * more, rel=0.01), columns


def test_schedules_that_should_be_slow_are_left_out() -> None:
    space = STREAM_K_WARP_SPECIALIZED.space(matmul_workload(2048, 4672, 4544), H100)
    knobs = {
        "block_m": 128,
        "block_k": 64,
        "group_m": 8,
        "num_warps": 8,
        "split_k": 1,
        "repack": 0,
        "precision": "bf16",
    }
    wide = {**knobs, "block_n": 160, "num_stages": 5, "subtile": 2, "stream_waves": 0, "a_held": 0}
    reasons = space.why_illegal(Schedule("stream_k_warp_specialized", FrozenMap(wide)))
    assert any("times as long as the best" in reason for reason in reasons), reasons


def test_a_is_held_in_registers_only_by_tiles_of_two_pieces_of_16_bit_elements_along_k() -> None:
    def held(workload: Workload) -> set[Any]:
        return {(s.knobs["block_m"], s.knobs["block_n"]) for s in members(workload) if s.knobs["a_held"]}

    assert (128, 160) in held(LARGE)
    assert all(rows == 128 and pieces(columns)[1] for rows, columns in held(LARGE))
    assert not held(matmul_workload(2048, 1280, 8192, layout="tt"))
    assert not held(matmul_workload(2048, 1280, 8192, "fp8e4m3", scaling="row"))


def test_memory_for_parts_counts_as_workspace() -> None:
    limited = matmul_workload(2048, 1280, 8192, attributes={"workspace_bytes": 2**20})
    assert members(limited)
    assert not any(s.knobs["stream_waves"] for s in members(limited))


def test_a_piece_of_a_row_major_b_is_at_least_a_line() -> None:
    found = members(matmul_workload(2048, 1280, 8192, "bf16", "nn"))
    assert {s.knobs["block_n"] for s in found if pieces(int(s.knobs["block_n"]))[1]} == {192}


def complaints(compiled: Any) -> list[str]:
    """What the assembler says of products that it will not overlap."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            "--gpu-name=sm_90a",
            source,
            "-o",
            source.with_suffix(".cubin"),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in (ran.stdout + ran.stderr).splitlines() if "wgmma" in line]


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        (LARGE, {"block_n": 256, "num_stages": 4, "subtile": 4, "stream_waves": 1}),
        (LARGE, {"block_n": 128, "num_stages": 5, "subtile": 2, "stream_waves": 2}),
        (LARGE, {"block_n": 160, "num_stages": 5, "subtile": 2, "stream_waves": 0, "a_held": 1}),
        (LARGE, {"block_n": 144, "num_stages": 6, "subtile": 2, "stream_waves": 1, "a_held": 1}),
        (
            matmul_workload(1000, 3071, 768, "fp16", "nn", ("bias", "gelu_tanh"), out_dtype="fp32"),
            {"block_n": 192, "num_stages": 4, "subtile": 2, "stream_waves": 0, "repack": 1},
        ),
        (
            matmul_workload(2048, 1280, 8192, "fp8e4m3", scaling="row"),
            {"block_n": 144, "block_k": 128, "num_stages": 5, "subtile": 2, "stream_waves": 2},
        ),
    ],
    ids=str,
)
def test_builds_without_spills_and_as_large_as_estimated(workload: Workload, knobs: dict[str, Scalar]) -> None:
    chosen = {
        "block_m": 128,
        "block_k": 64,
        "group_m": 8,
        "num_warps": 8,
        "split_k": 1,
        "repack": 0,
        "a_held": 0,
        **knobs,
    }
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    kernel = importlib.import_module(STREAM_K_WARP_SPECIALIZED.kernel_module)
    with triton_adapter.targeting(H100):
        compiled = triton_adapter.compile_launch(kernel.plan(inputs, out, chosen, workload.epilogue)[-1])
    code = compiled.asm["ptx"]
    assert code.count("wgmma.mma_async") == 2 * 4 * len([piece for piece in pieces(int(knobs["block_n"])) if piece])
    assert not knobs.get("a_held") or code.count("ldmatrix") == 2 * 2 * 4
    # parts are left and fetched two numbers a thread, and announced
    streams = bool(knobs["stream_waves"])
    assert ("st.global.v2" in code and "ld.global.cg.v2" in code) == streams
    assert ("atom.global.gpu.release" in code and "atom.global.acquire.gpu" in code) == streams
    assert not complaints(compiled)
    assert triton_adapter.threads(compiled) == 12 * 32
    assert triton_adapter.registers_and_spills(compiled) == (168, 0)
    assert triton_adapter.shared_bytes(compiled) <= STREAM_K_WARP_SPECIALIZED.shared(problem_of(workload), chosen)


@pytest.mark.parametrize("block_n", [192, 256])
def test_a_long_epilogue_is_built_once_for_all_parts_of_a_piece(block_n: int) -> None:
    workload = matmul_workload(729, 4304, 1152, "fp16", epilogue=("bias", "gelu"))
    found = [s for s in members(workload) if s.knobs["block_n"] == block_n]
    assert found
    inputs, out = MATMUL.make_inputs(workload, 0, "meta"), MATMUL.empty_output(workload, "meta")
    with triton_adapter.targeting(H100):
        launch = MATMUL.plan(workload, found[0], inputs, out)[-1]
        compiled = triton_adapter.compile_launch(launch)
    # of each piece, by both warpgroups, 64 x 64 elements, 32 a thread
    pieces_there = len([piece for piece in pieces(block_n) if piece])
    assert compiled.asm["ptx"].count("ex2.approx.ftz.f32") == pieces_there * 2 * 32
    assert compiled.asm["ptx"].count("rcp.approx.ftz.f32") == pieces_there * 2 * 32
    assert triton_adapter.registers_and_spills(compiled) == (168, 0)
