"""Matmul workloads: what they may be, and what is said of those that may not."""

from __future__ import annotations

import pytest

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.matmul.workload import Layout, matmul_workload, parse_layout, problem_of
from kernelwright.types import Workload


def test_linear_layout_is_row_by_column() -> None:
    problem = problem_of(matmul_workload(3, 5, 7))
    assert (problem.a, problem.b, problem.out) == (Layout("row", 7), Layout("col", 7), Layout("row", 5))
    assert problem.b.strides() == (1, 7)


@pytest.mark.parametrize(("n", "aligned"), [(8, True), (9, False), (4096, True), (50257, False)])
def test_alignment_counts_bytes(n: int, aligned: bool) -> None:
    assert problem_of(matmul_workload(4, n, 16)).aligned("out") is aligned


def test_fp32_rows_of_four_are_aligned() -> None:
    assert problem_of(matmul_workload(4, 4, 4, "fp32")).aligned("a")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"layout": "xx"}, "layout must be one of nt, nn, tn, tt"),
        ({"m": -1}, "dimension M must be a whole number of 0 or more"),
        ({"epilogue": ("softmax",)}, "epilogue steps must be among bias"),
        ({"epilogue": ("swiglu", "glu")}, "can have one of swiglu"),
        ({"epilogue": ("swiglu",), "n": 5}, "needs an even N, got 5"),
        ({"epilogue": ("residual", "swiglu")}, "cannot read a matrix"),
        ({"scaling": "column"}, "scaling must be one of tensor, row"),
        ({"dtype": "fp8e4m3", "scaling": "block128", "k": 100}, "K must be a multiple of 128"),
        ({"b_dtype": "int4", "scaling": "group:64", "k": 64, "layout": "nn"}, "both dense along K"),
        ({"batch": 2, "dtype": "int8", "scaling": "row"}, "batched matmul cannot be quantised"),
        ({"groups": 2, "batch": 2}, "neither batched nor quantised"),
        ({"attributes": {"workspace_bytes": -1}}, "workspace_bytes must be a whole number"),
        ({"attributes": {"speed": 1}}, "deterministic, scaling, workspace_bytes at will"),
        ({"error_budget": 2.0}, "error_budget must lie between 0 and 1"),
    ],
)
def test_misuse_is_told_plainly(kwargs: dict[str, object], words: str) -> None:
    arguments = {"m": 4, "n": 4, "k": 4, **kwargs}
    with pytest.raises(InvalidWorkload, match=words):
        matmul_workload(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp64", "int8", "fp8e4m3", "int4", "float33"])
def test_unsupported_dtypes_are_named(dtype: str) -> None:
    with pytest.raises(UnsupportedDtype, match=dtype):
        matmul_workload(4, 4, 4, dtype)


def test_mixed_operands_are_refused() -> None:
    base = matmul_workload(4, 4, 4)
    mixed = Workload("matmul", base.dims, {"a": "bf16", "b": "fp16", "out": "bf16"}, base.layouts)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedDtype, match="one dtype"):
        problem_of(mixed)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("row", Layout("row", 8, 64)),
        ("col:16", Layout("col", 16, 128)),
        ("row@0", Layout("row", 8, 0)),
        ("col:9@144+1", Layout("col", 9, 144, 1)),
        ("strided:960,3@5", Layout("strided", 960, 5, 0, 3)),
        ("strided:0,1", Layout("strided", 0, 0, 0, 1)),
    ],
)
def test_layouts_are_read(text: str, layout: Layout) -> None:
    assert parse_layout("a", text, 8, 8, batched=True) == layout


def test_gated_units_halve_the_columns() -> None:
    problem = problem_of(matmul_workload(4, 64, 8, epilogue=("bias", "swiglu", "scale_vec")))
    assert (problem.paired, problem.out_n, problem.out) == (True, 32, Layout("row", 32))


@pytest.mark.parametrize("layout", ["row+1", "strided:8,2", "row:9", "row@4"])
def test_what_the_copy_engine_cannot_read_is_not_aligned(layout: str) -> None:
    base = matmul_workload(8, 8, 8, batch=2)
    workload = Workload("matmul", base.dims, base.dtypes, {**base.layouts, "a": layout})  # type: ignore[arg-type]
    assert not problem_of(workload).aligned("a")
    assert problem_of(base).aligned("a")


@pytest.mark.parametrize("layout", ["diag", "row:3", "row:x", "col:", "row+", "strided:3"])
def test_bad_layouts_are_refused(layout: str) -> None:
    base = matmul_workload(8, 8, 8)
    bad = Workload("matmul", base.dims, base.dtypes, {**base.layouts, "a": layout})  # type: ignore[arg-type]
    with pytest.raises(InvalidWorkload):
        problem_of(bad)


def test_missing_dimension_is_named() -> None:
    base = matmul_workload(8, 8, 8)
    with pytest.raises(InvalidWorkload, match="must be K, M, N"):
        problem_of(Workload("matmul", {"M": 8, "N": 8}, base.dtypes, base.layouts))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "out_dtype", "budget"), [("bf16", "bf16", 1e-4), ("fp32", "fp32", 1e-7)])
def test_a_budget_that_nothing_keeps_is_refused(dtype: str, out_dtype: str, budget: float) -> None:
    with pytest.raises(InvalidWorkload, match="larger error_budget"):
        matmul_workload(64, 64, 64, dtype, out_dtype=out_dtype, error_budget=budget)
