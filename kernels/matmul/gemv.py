"""Template "gemv": products with few rows or few columns, without tensor cores; any strides, any GPU."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.own_limits import OwnLimits
from kernelwright.kernels.matmul.template import Knobs, element_bytes, multiplies, number, over
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.precision import own_precision
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_VECTORS = 8
"""Beyond so many, tensor cores are the better tool."""

SPLITS = (1, 2, 4, 8, 16, 32, 64)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def rows_are_vectors(problem: Problem) -> bool:
    """Whether the short side of the product is its rows; the long side are then its columns."""
    return problem.m <= problem.out_n


def _along_k(problem: Problem) -> bool:
    """Whether neighbours in memory of the large operand lie along K; else they are neighbouring outputs."""
    return problem.b.order != "row" if rows_are_vectors(problem) else problem.a.order != "col"


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    vectors = (_power(max(1, min(problem.m, problem.out_n, MOST_VECTORS))),)
    outputs = (1, 2, 4, 8, 16, 32) if _along_k(problem) else (32, 64, 128, 256, 512)
    chunks = (64, 128, 256, 512, 1024, 2048) if _along_k(problem) else (1, 2, 4, 8, 16, 32, 64)
    by_rows = rows_are_vectors(problem)
    return [
        Knob("block_m", vectors if by_rows else outputs, "log2"),
        Knob("block_n", outputs if by_rows else vectors, "log2"),
        Knob("block_k", chunks, "log2"),
        Knob("num_warps", (1, 2, 4, 8), "log2"),
        Knob("num_stages", (1, 3, 5)),
        Knob("split_k", SPLITS, "log2"),
        Knob("precision", tuple(p for p in precisions if p == _own(problem)), "category"),
    ]


def _line(problem: Problem) -> int:
    """Elements that a warp loads along K in one go: 16 bytes a thread, or one element where those are not aligned."""
    large = "b" if rows_are_vectors(problem) else "a"
    return 32 * (16 // element_bytes(problem) if problem.aligned(large) else 1)


def _own(problem: Problem) -> str:
    """Sums are kept in fp32 (int32) and products are exact to it: the operands' own precision."""
    return own_precision(problem.a_dtype, problem.b_dtype)


def _sides(problem: Problem, knobs: Knobs) -> tuple[int, int]:
    """(block of vectors, block of outputs)."""
    m, n = number(knobs, "block_m"), number(knobs, "block_n")
    return (m, n) if rows_are_vectors(problem) else (n, m)


def _shared(problem: Problem, knobs: Knobs) -> int:
    vectors, outputs = _sides(problem, knobs)
    stages = number(knobs, "num_stages")
    ring = (vectors + outputs) * number(knobs, "block_k") * element_bytes(problem) * (stages if stages > 1 else 0)
    warps = number(knobs, "num_warps")
    return ring * (2 if problem.paired else 1) + 4 * vectors * outputs * warps


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    longest, shortest = max(problem.m, problem.out_n), min(problem.m, problem.out_n)

    def short(knobs: Knobs) -> str | None:
        if problem.groups:
            return "computes single products and batches"
        if problem.scaling not in ("", "tensor", "row"):
            return f"has no way to apply scaling {problem.scaling}"
        if shortest > MOST_VECTORS:
            return f"is for at most {MOST_VECTORS} rows or columns, the problem has {shortest}"
        return multiplies(problem.a_dtype, device) or multiplies(problem.b_dtype, device)

    def blocks(knobs: Knobs) -> str | None:
        outputs, chunk = _sides(problem, knobs)[1], number(knobs, "block_k")
        if outputs > max(32 if not _along_k(problem) else 1, _power(longest)):
            return f"blocks of {outputs} for {longest} outputs"
        return f"block_k {chunk} for a K of {problem.k}" if chunk > max(64, _power(problem.k)) else None

    def registers(knobs: Knobs) -> str | None:
        vectors, outputs = _sides(problem, knobs)
        loaded = outputs * number(knobs, "block_k") / (32 * number(knobs, "num_warps"))
        if loaded < 2:
            return f"a thread loads {loaded:g} elements at a time, fewer than 2"
        if _along_k(problem) and number(knobs, "num_warps") > max(1, number(knobs, "block_k") // _line(problem)):
            # the vector would be loaded in another layout, and pass through shared memory at every step
            return f"{knobs['num_warps']} warps share a block_k of {knobs['block_k']}: each should load its own part"
        sums = loaded * vectors * (2 if problem.paired else 1)
        return over(loaded, 32, "elements loaded at a time") or over(sums, 64, "sums in registers")

    return [
        Constraint("short_side", short),
        Constraint("blocks", blocks),
        Constraint("registers", registers),
        *_splits(problem, device),
    ]


def _splits(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """How the steps along K are divided."""
    longest = max(problem.m, problem.out_n)

    def steps(knobs: Knobs) -> str | None:
        count = math.ceil(max(problem.k, 1) / (number(knobs, "block_k") * number(knobs, "split_k")))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {count} steps along K" if stages > 1 and stages > count else None

    def parts(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        if split == 1:
            return None
        programs = problem.batch * math.ceil(longest / _sides(problem, knobs)[1])
        if programs * split > 16 * device.multiprocessors:
            return f"{programs} blocks fill the device without more parts"
        return "a part has no whole step" if problem.k < split * number(knobs, "block_k") else None

    def workspace(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        if problem.workspace_bytes is None or split == 1:
            return None
        needed = 4 * problem.batch * (split * problem.m * problem.n + math.ceil(longest / _sides(problem, knobs)[1]))
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [Constraint("steps", steps), Constraint("parts", parts), Constraint("parts_memory", workspace)]


GEMV = OwnLimits("gemv", "kernelwright.kernels.matmul.gemv_kernel", _knobs, _constraints, _shared)
"""Matmul with a short side, by plain multiply-adds: bound by the bytes of the large operand, whatever its strides."""
