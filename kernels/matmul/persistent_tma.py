"""Template "persistent_tma": operands by the bulk copy engine, one program a multiprocessor; sm_90 and later."""

from __future__ import annotations

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    order_constraint,
    over,
    plain_constraint,
    split_choices,
    split_constraint,
    tiles,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.precision import PARTS
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    turning = needs_turning(problem, "a") or needs_turning(problem, "b")
    unaligned = not (problem.aligned("a") and problem.aligned("b"))
    repack = (1,) if unaligned else (0, 1) if turning else (0,)
    return [
        Knob("block_m", (64, 128, 256), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("group_m", (4, 8, 16), "log2"),
        Knob("split_k", split_choices(problem, device, 64), "log2"),
        Knob("combine", ("parts", "add"), "category"),
        Knob("subtile", (1,) if problem.paired else (1, 2), "log2"),
        Knob("blocks_per_sm", (1, 2)),
        Knob("repack", repack, "category"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + (2 * n if problem.paired else n)) * k * number(knobs, "num_stages") * element_bytes(problem)
    # a tile passes through shared memory on its way out; a part of a sum does so in fp32
    bits = DTYPES[problem.out_dtype] if number(knobs, "split_k") == 1 else 32
    return ring + m * n // number(knobs, "subtile") * bits // 8


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def residency(knobs: Knobs) -> str | None:
        per_sm = number(knobs, "blocks_per_sm")
        if per_sm == 1:
            return None
        if tiles(problem, knobs) * number(knobs, "split_k") <= device.multiprocessors:
            return "the tiles do not fill the device once"
        registers = 32 * number(knobs, "num_warps") * per_sm * 160
        if registers > device.registers:
            return f"{per_sm} blocks of {knobs['num_warps']} warps need {registers} registers, {device.registers} there"
        total = per_sm * (_shared(problem, knobs) + 1024)
        limit = device.shared_memory_bytes
        return f"{per_sm} blocks need {total} bytes of shared memory, {limit} there" if total > limit else None

    return [
        plain_constraint(problem, device),
        tma_constraint(problem, device, ("a", "b")),
        split_constraint(problem, device),
        Constraint("residency", residency),
        order_constraint(problem),
        *_sums(problem),
        *needs_room(problem),
    ]


def _sums(problem: Problem) -> list[Constraint]:
    """How parts of a sum meet."""

    def combine(knobs: Knobs) -> str | None:
        if knobs["combine"] == "parts":
            return None
        if number(knobs, "split_k") == 1:
            return "there is nothing to add up"
        if problem.deterministic:
            return "adds parts in the order in which they arrive; the workload asks for a fixed one"
        return "whole numbers are summed in parts" if problem.a_dtype == "int8" else None

    def pairs(knobs: Knobs) -> str | None:
        split = problem.paired and number(knobs, "split_k") > 1
        return "a gated unit cannot be made of partial sums" if split else None

    return [
        Constraint("combine", combine),
        Constraint("pairs", pairs),
    ]


def needs_room(problem: Problem) -> list[Constraint]:
    """Limits on operands that are copied by TMA tile by tile, shared with other templates."""

    def operands(knobs: Knobs) -> str | None:
        wide = element_bytes(problem) > 2
        inner = number(knobs, "block_k") * element_bytes(problem)
        return f"a tile's rows of {inner} bytes are too long for 4-byte elements" if wide and inner > 256 else None

    def copies(knobs: Knobs) -> str | None:
        return "copies single matrices, not batches" if knobs["repack"] and problem.batched else None

    def parts(knobs: Knobs) -> str | None:
        # the parts of an operand stand in registers beside the accumulator
        each = number(knobs, "block_m") * number(knobs, "block_n") / (32 * number(knobs, "num_warps"))
        return (
            over(each, 64, "accumulators a thread beside the operands' parts") if knobs["precision"] in PARTS else None
        )

    return [
        Constraint("operands", operands),
        Constraint("copies", copies),
        Constraint("parts", parts),
    ]


PERSISTENT_TMA = MatmulTemplate(
    "persistent_tma", "kernelwright.kernels.matmul.persistent_tma_kernel", _knobs, _constraints, _shared
)
