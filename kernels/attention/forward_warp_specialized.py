"""Template "forward_warp_specialized": a loading warp and two multiplying warpgroups, written in Gluon; Hopper only."""

from __future__ import annotations

from kernelwright.kernels.attention.template import (
    AttentionTemplate,
    bulk_copy,
    can_split,
    element_bytes,
    forward_only,
    head_parts,
    power_above,
    sections,
)
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

ROWS = 128
"""Queries of a tile: 64, the least height of a product, for each of two warpgroups."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    splits = can_split(problem.head_dim) or can_split(problem.v_dim)
    return [
        Knob("block_m", (ROWS,), "log2"),
        # scores of 256 keys, their weights and a head's sums are more than a thread's registers
        Knob("block_n", (64, 128), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (1, 2, 3, 4)),
        sections(problem),
        # warpgroups take turns on the tensor cores, or run as they come
        Knob("pingpong", (0, 1), "category"),
        Knob("head", ("pad", "split") if splits else ("pad",), "category"),
        Knob("precision", precisions, "category"),
    ]


def _widths(problem: Problem, knobs: Knobs) -> tuple[int, int]:
    split = knobs["head"] == "split"
    return sum(head_parts(problem.head_dim, split)), sum(head_parts(problem.v_dim, split))


SHARED_BYTES = 232448
"""Shared memory of a block on sm_90."""


def _shared(problem: Problem, knobs: Knobs) -> int:
    k_width, v_width = _widths(problem, knobs)
    ring = number(knobs, "block_n") * (k_width + v_width) * number(knobs, "num_stages")
    one, two = ((ring + tiles * ROWS * k_width) * element_bytes(problem) for tiles in (1, 2))
    return two + 256 if two + 1024 <= SHARED_BYTES else one + 256


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if element_bytes(problem) != 2:
            return "multiplies 16-bit operands"
        return None

    def features(knobs: Knobs) -> str | None:
        had = {
            "a mask tensor": problem.mask,
            "slopes": problem.alibi,
            "sinks": problem.sinks,
            "packed lengths": problem.packed,
            "pages": problem.page,
        }
        unable = [name for name, there in had.items() if there]
        if unable:
            return f"does not do {', '.join(unable)}"
        return "needs a scale above 0" if problem.scale <= 0 else None

    def rows(knobs: Knobs) -> str | None:
        few = problem.q_length <= ROWS // 4
        return f"{problem.q_length} queries leave most of a tile of {ROWS} empty" if few else None

    def registers(knobs: Knobs) -> str | None:
        # scores in fp32 and weights in 16 bits, beside the sums
        held = 64 * (_widths(problem, knobs)[1] + 1.5 * number(knobs, "block_n")) / 128
        return over(held, 184, "registers a thread for scores, weights and sums")

    def columns(knobs: Knobs) -> str | None:
        fitting, block = power_above(problem.kv_length, 64), number(knobs, "block_n")
        return f"block_n {block} for {problem.kv_length} keys, {fitting} is enough" if block > fitting else None

    return [
        forward_only(problem),
        Constraint("hopper", hopper),
        Constraint("features", features),
        bulk_copy(problem, device, ("q", "k", "v")),
        Constraint("rows", rows),
        Constraint("columns", columns),
        Constraint("registers", registers),
    ]


FORWARD_WARP_SPECIALIZED = AttentionTemplate(
    "forward_warp_specialized",
    "kernelwright.kernels.attention.forward_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
