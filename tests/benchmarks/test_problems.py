"""The problem sets read as workloads: layouts from strides, epilogues renamed, and a reason for what is left out."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.kernels.matmul.workload import matmul_workload, parse_layout, problem_of
from kernelwright.search.recording_files import parse_wanted

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def problems() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_problems", BENCHMARKS / "problems.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["core", "extra", "awkward", "smoke"])
def test_every_matmul_is_read_or_left_out_with_a_reason(problems: ModuleType, name: str) -> None:
    data = json.loads((BENCHMARKS / "workloads" / f"{name}.json").read_text(encoding="utf-8"))
    ids = {problem["id"] for problem in data["problems"] if problem["family"] == "matmul"}
    read, skipped = problems.load_matmul(name), problems.skipped_matmul(name)
    assert {entry.id for entry in read} | {entry.id for entry in skipped} == ids
    assert len(read) + len(skipped) == len(ids)
    assert read and all(entry.reason for entry in skipped)
    for entry in read:
        problem_of(entry.workload)


def test_a_traced_linear_is_the_workload_that_the_command_line_makes(problems: ModuleType) -> None:
    core = {entry.id: entry for entry in problems.load_matmul("core")}
    assert core["mm_m4096_n4096_k4096_nt_bf16_94a68a"].workload == matmul_workload(4096, 4096, 4096)
    gelu = core["mm_m1000_n3072_k768_nn_bf16_1c7c58"]
    assert gelu.workload == matmul_workload(1000, 3072, 768, layout="nn", epilogue=("bias", "gelu_tanh"))
    assert core["mm_m50257_n768_k8192_tn_bf16_e31a9f"].workload.layouts["a"] == "col"
    assert core["hand_mm_b1_m4096_n4096_k4096_rr_fp32"].workload.dtypes["out"] == "fp32"


def test_chains_are_kept_whole_under_the_names_of_workloads(problems: ModuleType) -> None:
    entries = {entry.id: entry for name in ("core", "extra") for entry in problems.load_matmul(name)}
    chains = {
        "mm_m16384_n1024_k4096_nt_bf16_14ba39": ("bias", "residual"),
        "mm_m8192_n28672_k8192_nt_bf16_dd2faf": ("multiply",),
        "mm_m1_n256000_k3584_nt_bf16_3a81bf": ("scale", "tanh", "scale"),
        "mm_m4608_n3072_k15360_nt_bf16_62bbc9": ("bias", "scale_vec", "residual"),
        "mm_m16384_n4096_k1024_nn_bf16_f13c09": ("gelu_backward",),
        "mm_m2048_n16384_k3072_nt_bf16_a4cb54": ("swiglu",),
        "mm_m2048_n10240_k1280_nt_fp16_a434de": ("bias", "geglu"),
        "mm_m256_n5760_k2880_nn_bf16_1e1635": ("bias", "glu"),
        "extra01_mm_m1_n28672_k4096_nt_bf16": ("swiglu",),
    }
    assert {id: entries[id].workload.epilogue for id in chains} == chains
    dropped = {entry.id: entry.dropped for entry in entries.values() if entry.dropped}
    assert dropped == {"mm_m16384_n1024_k4096_nt_bf16_14ba39": ("dropout",)}
    assert problem_of(entries["extra01_mm_m1_n28672_k4096_nt_bf16"].workload).out_n == 14336


def test_batches_and_groups(problems: ModuleType) -> None:
    entries = {entry.id: entry.workload for name in ("core", "awkward") for entry in problems.load_matmul(name)}
    heads = problem_of(entries["mm_b128_m8_n512_k128_nn_bf16_dde2c6"])
    assert (heads.batch, heads.batched) == (128, True)
    assert (heads.a.strides(), heads.a.batch, heads.b.batch) == ((24576, 1), 192, 65536)
    assert problem_of(entries["mm_b2048_m27_n27_k128_nt_fp16_1e642b"]).b.batch == 27 * 128
    assert problem_of(entries["awk16_mm_b12_m77_n64_k80_rr_fp16"]).b.batch == 0
    assert problem_of(entries["awk10_mm_b0_m16_n16_k16_rr_fp16"]).batch == 0
    experts = problem_of(entries["gmm_g252_t1024_n4096_k7168_nt_bf16_88225e"])
    assert (experts.groups, experts.m, experts.n, experts.k) == (252, 1024, 4096, 7168)


def test_quantised_operands(problems: ModuleType) -> None:
    extra = {entry.id: entry.workload for entry in problems.load_matmul("extra")}
    shape = (16, 6144, 4096)
    fp8, int8 = ({"dtype": dtype, "out_dtype": "bf16"} for dtype in ("fp8e4m3", "int8"))
    assert extra["extra24_mm_m16_n6144_k4096_nt_fp8e4m3_tensorwise"] == matmul_workload(*shape, **fp8, scaling="tensor")
    assert extra["extra25_mm_m16_n6144_k4096_nt_fp8e4m3_rowwise"] == matmul_workload(*shape, **fp8, scaling="row")
    assert extra["extra27_mm_m16_n6144_k4096_nt_int8_rowwise"] == matmul_workload(*shape, **int8, scaling="row")
    assert extra["extra26_mm_m16_n6144_k4096_nt_int4w_group128"] == matmul_workload(
        *shape, "bf16", b_dtype="int4", scaling="group:128"
    )
    assert extra["extra32_mm_m16_n7168_k2048_nt_fp8e4m3_blockwise128"] == matmul_workload(
        16, 7168, 2048, **fp8, scaling="block128"
    )


@pytest.mark.parametrize(
    ("named", "shape", "stride", "layout"),
    [
        ("row", (8, 4), None, "row"),
        ("row", (8, 4), (4, 1), "row"),
        ("row", (8, 4), (6, 1), "row:6"),
        ("col", (8, 4), (1, 8), "col"),
        ("col", (8, 4), (1, 9), "col:9"),
        ("row", (8, 4), (1, 8), "col"),
        ("row", (8, 1), (1, 8), "row"),
        ("row", (1, 4), (99, 1), "row"),
        ("row", (8, 4), (12, 3), "strided:12,3"),
        ("row", (8, 4), (1, 1), "strided:1,1"),
        ("row", (8, 4), (0, 1), "strided:0,1"),
        ("row", (8, 4), (-4, 1), None),
        ("row", (8, 0), (1, 1), "row"),
        ("row", (3, 8, 4), (32, 4, 1), "row"),
        ("row", (3, 8, 4), (48, 6, 1), "row:6"),
        ("row", (3, 8, 4), (0, 4, 1), "row@0"),
        ("col", (3, 8, 4), (4, 1, 12), "col:12@4"),
        ("row", (1, 8, 4), (7, 4, 1), "row"),
        ("row", (3, 8, 4), (100, 12, 3), "strided:12,3@100"),
    ],
)
def test_layout_from_strides(
    problems: ModuleType, named: str, shape: tuple[int, ...], stride: tuple[int, ...] | None, layout: str | None
) -> None:
    assert problems.layout_of(named, shape, stride) == layout
    if layout is not None and stride is not None and 0 not in shape:
        read = parse_layout("a", layout, *shape[-2:], len(shape) == 3)
        got = ((read.batch,) if len(shape) == 3 else ()) + read.strides()
        assert all(mine == his for mine, his, size in zip(got, stride, shape, strict=True) if size > 1)


def test_nothing_is_left_out_but_what_torch_cannot_hold(problems: ModuleType) -> None:
    reasons = {
        entry.id: entry.reason
        for name in ("core", "extra", "awkward", "smoke")
        for entry in problems.skipped_matmul(name)
    }
    assert list(reasons) == ["awk26_mm_b1_m64_n64_k64_rr_fp16"]
    assert "negative stride" in reasons["awk26_mm_b1_m64_n64_k64_rr_fp16"]


def test_exact_tensors_are_kept_where_they_are_the_point(problems: ModuleType) -> None:
    awkward = {entry.id: entry for entry in problems.load_matmul("awkward")}
    misaligned = awkward["awk12_mm_b1_m256_n256_k256_rr_fp16"]
    assert (misaligned.workload.layouts["a"], misaligned.workload.layouts["b"]) == ("row+1", "row+3")
    assert awkward["awk14_mm_b1_m512_n256_k768_rr_fp16"].workload.layouts["a"] == "row:2304"
    assert awkward["awk25_mm_b1_m33_n33_k33_rr_fp16"].tensors["a"]["fill"] == "nan_outside"
    unread = awkward["awk24_mm_b1_m48_n40_k56_rr_fp16"]
    assert unread.workload.epilogue == () and unread.tensors["bias"]["fill"] == "nan"
    assert all(entry.tensors is None for entry in problems.load_matmul("core"))


def test_groups(problems: ModuleType) -> None:
    cases = {
        "grouped": matmul_workload(1024, 1536, 2048, groups=8),
        "batched": matmul_workload(27, 27, 128, batch=64),
        "w4a16": matmul_workload(16, 4096, 4096, b_dtype="int4", scaling="group:128"),
        "fp8": matmul_workload(16, 4096, 4096, "fp8e4m3", scaling="row"),
        "int8": matmul_workload(16, 4096, 4096, "int8", scaling="row"),
        "fp32": matmul_workload(4096, 4096, 4096, "fp32"),
        "unaligned": matmul_workload(2048, 4096, 4095),
        "skinny": matmul_workload(16, 4096, 4096, epilogue=("silu",)),
        "tall_k": matmul_workload(256, 256, 65536),
        "epilogue": matmul_workload(4096, 4096, 4096, epilogue=("silu",)),
        "large": matmul_workload(4096, 4096, 4096),
        "medium": matmul_workload(512, 1024, 4096),
    }
    assert {name: problems.group(workload) for name, workload in cases.items()} == {name: name for name in cases}


def test_unknown_set_names_the_sets(problems: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"core, extra, awkward, smoke.*got 'huge'"):
        problems.load_matmul("huge")


def test_a_sweep_samples_the_first_of_each_group_densely(problems: ModuleType) -> None:
    entries = problems.load_matmul("core")
    lines = problems.to_record([*entries, *entries], dense=9, sparse=4)
    wanted = parse_wanted("\n".join(json.dumps(line) for line in lines))
    assert {one.workload for one in wanted} == {entry.workload for entry in entries}
    assert len(lines) == len(wanted)
    dense = Counter(problems.group(one.workload) for one in wanted if one.count == 9)
    groups = {problems.group(entry.workload) for entry in entries}
    assert set(dense) == groups and max(dense.values()) <= problems.DENSE_PER_GROUP
    assert [one.count for one in wanted] == sorted((one.count for one in wanted), reverse=True)
