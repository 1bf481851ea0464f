"""Template "warp_specialized": a loading warp and two multiplying warpgroups, written in Gluon; Hopper only."""

from __future__ import annotations

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    order_constraint,
    plain_constraint,
    tiles,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    repack = not (problem.aligned("a") and problem.aligned("b"))
    return [
        Knob("mode", ("cooperative", "pingpong"), "category"),
        Knob("block_m", (64, 128), "log2"),
        Knob("block_n", (64, 128) if problem.paired else (64, 128, 256), "log2"),
        # a row of a tile is one swizzled line of 128 bytes
        Knob("block_k", (1024 // DTYPES[problem.a_dtype],), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (3, 4, 5, 6, 7, 8)),
        Knob("group_m", (4, 8, 16), "log2"),
        Knob("split_k", (1,), "log2"),
        Knob("subtile", (1,) if problem.paired else (1, 2, 4), "log2"),
        Knob("repack", (int(repack),), "category"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + (2 * n if problem.paired else n)) * k * number(knobs, "num_stages") * element_bytes(problem)
    rows = 2 * m if knobs["mode"] == "pingpong" else m
    columns = n // number(knobs, "subtile")
    return ring + rows * columns * DTYPES[problem.out_dtype] // 8 + 256


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    out_line = 1024 // DTYPES[problem.out_dtype]

    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if problem.a_dtype in ("fp32", "int8"):
            return "multiplies 16-bit and fp8 operands"
        return "needs operands along K" if needs_turning(problem, "a") or needs_turning(problem, "b") else None

    def shape(knobs: Knobs) -> str | None:
        rows, columns = number(knobs, "block_m"), number(knobs, "block_n")
        if knobs["mode"] == "cooperative" and rows < 128:
            return "each of two warpgroups needs 64 rows"
        each = rows * columns * (2 if problem.paired else 1) // (128 if knobs["mode"] == "pingpong" else 256)
        if each > 128:
            return f"a thread would hold {each} accumulators, 128 fit"
        part = columns // number(knobs, "subtile")
        if part < out_line:
            return f"a part of {part} columns is less than a line of 128 bytes"
        inner = columns * element_bytes(problem)
        return "b's tile is less than a line of 128 bytes" if problem.b.order == "row" and inner < 128 else None

    def turns(knobs: Knobs) -> str | None:
        alone = knobs["mode"] == "pingpong" and tiles(problem, knobs) <= device.multiprocessors // 2
        return "there is no second tile to take turns with" if alone else None

    return [
        plain_constraint(problem, device, batched=False),
        Constraint("hopper", hopper),
        Constraint("shape", shape),
        order_constraint(problem),
        Constraint("turns", turns),
        tma_constraint(problem, device, ("a", "b")),
    ]


WARP_SPECIALIZED = MatmulTemplate(
    "warp_specialized", "kernelwright.kernels.matmul.warp_specialized_kernel", _knobs, _constraints, _shared
)
