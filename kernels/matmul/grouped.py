"""Templates "grouped" (TMA, sm_90 and later) and "grouped_pointer" (any GPU): products of experts' rows."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.own_limits import OwnLimits
from kernelwright.kernels.matmul.template import Knobs, element_bytes, multiplies, number, over, tma_constraint
from kernelwright.kernels.matmul.workload import TMA_ALIGNMENT, Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

NARROWEST_WGMMA = 64
"""Fewer rows on the tensor cores' wide side than this leave them partly idle."""

MOST_GROUPS = 4096
"""Every program holds the row ends of all groups in registers."""


def mean_rows(problem: Problem) -> int:
    """Rows that an expert has on average, at least 1."""
    return max(1, math.ceil(problem.m / max(1, problem.groups)))


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _accumulators(problem: Problem, knobs: Knobs) -> float:
    tile = number(knobs, "block_m") * number(knobs, "block_n") * (2 if problem.paired else 1)
    return tile / (32 * number(knobs, "num_warps"))


def _experts(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """What both templates require: experts, and tiles that suit their rows."""

    def grouped(knobs: Knobs) -> str | None:
        if not problem.groups:
            return "computes grouped products (dimension G)"
        if problem.groups > MOST_GROUPS:
            return over(problem.groups, MOST_GROUPS, "groups")
        return multiplies(problem.a_dtype, device)

    def rows(knobs: Knobs) -> str | None:
        block, mean = number(knobs, "block_m"), mean_rows(problem)
        most, least = max(32, 2 * _power(mean)), min(64, _power(mean) // 2)
        return None if least <= block <= most else f"block_m {block} for experts of {mean} rows"

    def columns(knobs: Knobs) -> str | None:
        block, most = number(knobs, "block_n"), max(32, _power(problem.out_n))
        return f"block_n {block} for {problem.out_n} columns" if block > most else None

    def steps(knobs: Knobs) -> str | None:
        count = math.ceil(max(problem.k, 1) / number(knobs, "block_k"))
        if number(knobs, "block_k") > max(64, _power(problem.k)):
            return f"block_k {knobs['block_k']} for a K of {problem.k}"
        return (
            f"{knobs['num_stages']} stages for {count} steps" if number(knobs, "num_stages") > count + 1 > 2 else None
        )

    def accumulators(knobs: Knobs) -> str | None:
        each = _accumulators(problem, knobs)
        if each < 4:
            return f"a thread holds {each:g} accumulators, fewer than 4: too many warps for the tile"
        # the parts of an operand stand in registers beside the accumulators
        several = str(knobs["precision"]) in ("tf32x3", "bf16x3", "bf16x6")
        return over(each, 64 if several else 128, "accumulator registers a thread")

    def order(knobs: Knobs) -> str | None:
        height = max(1, 2 * mean_rows(problem) // number(knobs, "block_m"))
        group = number(knobs, "group_m")
        return f"group_m {group} for about {height} rows of tiles" if group > height > 0 and group > 1 else None

    return [
        Constraint("grouped", grouped),
        Constraint("rows", rows),
        Constraint("columns", columns),
        Constraint("steps", steps),
        Constraint("accumulators", accumulators),
        Constraint("order", order),
    ]


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    # the bulk copy engine writes whole pieces of 16 bytes: it would run over the end of other rows
    whole = problem.out_n * DTYPES[problem.out_dtype] % (8 * TMA_ALIGNMENT) == 0
    stores = (1, 0) if whole and problem.aligned("out") and problem.out.order == "row" else (0,)
    return [
        Knob("block_m", (16, 32, 64, 128, 256), "log2"),
        Knob("block_n", (64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128) if element_bytes(problem) > 2 else (64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("swap", (0, 1), "category"),
        Knob("tma_store", stores, "category"),
        Knob("blocks_per_sm", (1, 2)),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + (2 * n if problem.paired else n)) * k * number(knobs, "num_stages") * element_bytes(problem)
    # a tile goes out through shared memory, by pointers in two halves
    halves = 1 if number(knobs, "tma_store") else 2
    return ring + m * n * DTYPES[problem.out_dtype] // 8 // halves + 1024


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def sides(knobs: Knobs) -> str | None:
        if problem.a.order != "row":
            # experts begin at any row, and the bulk copy engine wants multiples of 16 bytes in the dense dimension
            return "needs a in row layout"
        swapped = bool(knobs["swap"])
        block_m, block_n = number(knobs, "block_m"), number(knobs, "block_n")
        wide = block_n if swapped else block_m
        if wide < NARROWEST_WGMMA:
            return f"{wide} rows on the tensor cores' wide side; swap=1 puts the weight there"
        if swapped and block_m > NARROWEST_WGMMA:
            return f"swap=1 is for tiles of few rows, not {block_m}"
        if swapped and 16 * number(knobs, "num_warps") > block_n:
            return f"{knobs['num_warps']} warps need a block_n of {16 * number(knobs, 'num_warps')}"
        return None

    def residency(knobs: Knobs) -> str | None:
        per_sm = number(knobs, "blocks_per_sm")
        if per_sm == 1:
            return None
        registers = 32 * number(knobs, "num_warps") * per_sm * (_accumulators(problem, knobs) + 64)
        if registers > device.registers:
            return f"{per_sm} blocks need about {registers:g} registers, {device.registers} there"
        return over(per_sm * (_shared(problem, knobs) + 1024), device.shared_memory_bytes, "bytes of shared memory")

    def wide_elements(knobs: Knobs) -> str | None:
        if element_bytes(problem) == 2:
            return None
        if problem.b.order == "row":
            return "the tensor cores cannot read 4-byte elements across K"
        inner = number(knobs, "block_k") * element_bytes(problem)
        return over(inner, 256, "bytes in a tile's row of 4-byte elements")

    return [
        *_experts(problem, device),
        Constraint("sides", sides),
        Constraint("residency", residency),
        Constraint("wide_elements", wide_elements),
        tma_constraint(problem, device, ("a", "b")),
    ]


def _pointer_knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _pointer_shared(problem: Problem, knobs: Knobs) -> int:
    columns = number(knobs, "block_n") * (2 if problem.paired else 1)
    tile = (number(knobs, "block_m") + columns) * number(knobs, "block_k")
    return tile * number(knobs, "num_stages") * element_bytes(problem)


def _pointer_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def loads(knobs: Knobs) -> str | None:
        if problem.aligned("a") and problem.aligned("b"):
            return None
        # elements that are loaded one by one pass through registers, each with its own address
        each = _pointer_shared(problem, knobs) / number(knobs, "num_stages") / element_bytes(problem)
        return over(each / (32 * number(knobs, "num_warps")), 32, "registers a thread for unaligned operands")

    return [*_experts(problem, device), Constraint("loads", loads)]


GROUPED = OwnLimits("grouped", "kernelwright.kernels.matmul.grouped_kernel", _knobs, _constraints, _shared)
"""Grouped matmul by the bulk copy engine: one program a multiprocessor walks over the tiles of all experts."""

GROUPED_POINTER = OwnLimits(
    "grouped_pointer",
    "kernelwright.kernels.matmul.grouped_pointer_kernel",
    _pointer_knobs,
    _pointer_constraints,
    _pointer_shared,
)
"""Grouped matmul by plain pointers: any strides, any GPU."""
