"""Template "backward_warp_specialized": gradients by a loading warp and two multiplying warpgroups, in Gluon; Hopper
only."""

from __future__ import annotations

from kernelwright.kernels.attention.backward_fused import any_order, key_sections
from kernelwright.kernels.attention.template import AttentionTemplate, bulk_copy, element_bytes, power_above
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

KEYS = 128
"""Keys of a tile: 64, the least height of a product, for each of two warpgroups."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Parts of the queries."""

PART = 4
"""Blocks of queries that a part has at least."""


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (64, 128), "log2"),
        Knob("block_n", (KEYS,), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", (2, 3)),
        # few keys leave multiprocessors idle: parts of the queries, whose sums are added up afterwards
        Knob("split_k", SPLITS, "log2"),
        key_sections(problem),
        Knob("precision", precisions, "category"),
    ]


def _widths(problem: Problem) -> tuple[int, int]:
    return power_above(problem.head_dim, 64), power_above(problem.v_dim, 64)


def _shared(problem: Problem, knobs: Knobs) -> int:
    (d, v), m = _widths(problem), number(knobs, "block_m")
    # keys lie there twice: by rows for the scores, by halves of their columns for dq
    narrow = KEYS * (2 * d + v) + number(knobs, "num_stages") * m * (d + v) + 2 * KEYS * m
    return narrow * element_bytes(problem) + 4 * m * (d + 2 * number(knobs, "num_stages")) + 256


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if element_bytes(problem) != 2:
            return "multiplies 16-bit operands"
        return None

    def features(knobs: Knobs) -> str | None:
        had = {"a mask tensor": problem.mask, "slopes": problem.alibi, "packed lengths": problem.packed}
        unable = [name for name, there in had.items() if there]
        if unable:
            return f"does not do {', '.join(unable)}"
        return "needs a scale above 0" if problem.scale <= 0 else None

    def repeats(knobs: Knobs) -> str | None:
        for layout in (problem.q, problem.k, problem.v, problem.out):
            if any(stride == 0 and size > 1 for size, stride in zip(layout.shape, layout.strides, strict=True)):
                return "the bulk copy engine takes no stride of 0"
        return None

    def registers(knobs: Knobs) -> str | None:
        # sums of dk and dv; scores, their weights and gradients, of which one is there in 16 bits too
        m = number(knobs, "block_m")
        held = 64 * (sum(_widths(problem)) + 2.5 * m) / 128
        return over(held, 224, "registers a thread for scores, gradients and sums")

    def rows(knobs: Knobs) -> str | None:
        fitting, block = power_above(problem.q_length, 64), number(knobs, "block_m")
        return f"block_m {block} for {problem.q_length} queries, {fitting} is enough" if block > fitting else None

    return [
        any_order(problem),
        Constraint("hopper", hopper),
        Constraint("features", features),
        bulk_copy(problem, device, ("q", "k", "v", "out")),
        Constraint("repeats", repeats),
        Constraint("rows", rows),
        Constraint("registers", registers),
        _parts(problem, device),
    ]


def _parts(problem: Problem, device: DeviceSpec) -> Constraint:
    """Queries are divided so far that every multiprocessor has a tile, and no further."""
    tiles = problem.batch * problem.kv_heads * -(-problem.kv_length // KEYS)

    def check(knobs: Knobs) -> str | None:
        split, block = number(knobs, "split_k"), number(knobs, "block_m")
        fitting = [s for s in SPLITS if tiles * s <= device.multiprocessors and problem.q_length >= PART * s * block]
        most = max(fitting, default=1)
        if split > most:
            return (
                f"{split} parts, {most} are enough for {device.multiprocessors} multiprocessors or {PART} blocks each"
            )
        return f"{tiles * split} programs leave multiprocessors idle, {most} parts do not" if 2 * split < most else None

    return Constraint("parts", check)


BACKWARD_WARP_SPECIALIZED = AttentionTemplate(
    "backward_warp_specialized",
    "kernelwright.kernels.attention.backward_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
