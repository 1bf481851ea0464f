"""The problem sets read as workloads: layouts from strides, epilogues cut, and a reason for everything left out."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
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


def test_a_chain_is_cut_where_it_cannot_be_fused(problems: ModuleType) -> None:
    core = {entry.id: entry for entry in problems.load_matmul("core")}
    cut = core["mm_m16384_n1024_k4096_nt_bf16_14ba39"]
    assert (cut.workload.epilogue, cut.dropped) == (("bias",), ("dropout", "residual_add"))
    assert problems.split_epilogue(["scale", "tanh", "scale"]) == ((), ("scale", "tanh", "scale"))
    assert problems.split_epilogue(["bias", "relu", "silu"]) == (("bias", "relu"), ("silu",))


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
        ("row", (8, 4), (12, 3), None),
        ("row", (8, 4), (1, 1), None),
        ("row", (8, 4), (0, 1), None),
        ("row", (8, 4), (-4, 1), None),
    ],
)
def test_layout_from_strides(
    problems: ModuleType, named: str, shape: tuple[int, int], stride: tuple[int, int] | None, layout: str | None
) -> None:
    assert problems.layout_of(named, shape, stride) == layout


def test_left_out_for_the_right_reason(problems: ModuleType) -> None:
    reasons = {
        entry.id: entry.reason for name in ("core", "extra", "awkward") for entry in problems.skipped_matmul(name)
    }
    assert "bmm" in reasons["mm_b2048_m27_n27_k128_nt_fp16_1e642b"]
    assert "quantised" in reasons["extra24_mm_m16_n6144_k4096_nt_fp8e4m3_tensorwise"]
    assert "aligned" in reasons["awk12_mm_b1_m256_n256_k256_rr_fp16"]
    assert "unit stride" in reasons["awk13_mm_b1_m128_n96_k160_rr_fp16"]
    assert "is 0" in reasons["awk07_mm_b1_m64_n32_k0_rr_fp16"]


def test_groups(problems: ModuleType) -> None:
    cases = {
        "fp32": matmul_workload(4096, 4096, 4096, "fp32"),
        "unaligned": matmul_workload(2048, 4096, 4095),
        "skinny": matmul_workload(16, 4096, 4096),
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
