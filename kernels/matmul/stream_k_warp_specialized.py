"""Template "stream_k_warp_specialized": specialised warps in Gluon for tiles that do not fill whole waves; Hopper only.

Which schedules should win, for an H100 with 132 multiprocessors, M x N x K and tiles of block_m x block_n:

2048x1280x8192, 80 tiles of 128x256: 52 multiprocessors idle. Shared out, each has 77.6 of a tile's 128 steps, writes
one part of 128 KB and reads one or two. 128 tiles of 128x160 fill 97% with nothing to exchange, but read 20% more.
2048x4672x4544, 304 tiles of 128x256 = 2.3 waves: two whole and 21.5 steps each of the third. Or 528 tiles of 128x144 =
4.0 waves, of which 98% is needed.
1000x3072x768: 128 tiles of 128x192 are one wave, 96 of 128x256 are three quarters of one.
729x4304x1152: 102 tiles of 128x256, each 18 steps and a long epilogue: shared out, 14 steps each.
1000x1000x1000: 128 tiles of 128x64 fill a wave; 64 tiles of 128x128, shared out, read a third less.

The tensor cores read both operands from shared memory, a's rows once for each piece of b: for 64 rows and 16 numbers
along K 2 KB of a and 32 B a column, beside what TMA writes. In clocks of 128 B that is more than the multiplication
takes by 25% for 128x128 and 128x192, 35% for 128x160, 42% for 128x144, 13% for 256x128, and nothing for 128x256. Where
a comes to registers first (a_held), both pieces share it: 8% for 128x192, 15% for 128x160, 19% for 128x144.
"""

from __future__ import annotations

import functools
import itertools
import math

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    needs_turning,
    number,
    order_constraint,
    over,
    plain_constraint,
    tiles,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

ROWS, COLUMNS = (128, 256), (64, 128, 144, 160, 192, 256)

FULL = 0.9
"""A last wave that fills the device this far leaves too little to gain."""

MOST_WAVES = 8
"""Of more waves than this the last one is a small part of the time."""

SLOWER = 1.35
"""Schedules that should take this many times as long as the best of this template are left out."""

STAGES = (3, 4, 5, 6, 8)
"""Depths of the ring; the deepest that fits is taken."""

FEWEST_STEPS = 4
"""Steps along K of a program's share that are worth leaving and fetching a part."""


def pieces(columns: int) -> tuple[int, int]:
    """A tile's columns as a power of two and the rest."""
    wide: int = 1 << (columns.bit_length() - 1)
    return wide, columns - wide


def is_long(problem: Problem) -> bool:
    """Whether the epilogue has an activation of many instructions, which this kernel runs through faster."""
    return bool({"gelu", "gelu_tanh", "silu", "sigmoid", "tanh"} & set(problem.epilogue))


def subtile(problem: Problem, columns: int) -> int:
    """Parts in which a tile's wide piece goes out: of one line of 128 bytes, at most four."""
    return min(4, max(1, pieces(columns)[0] * DTYPES[problem.out_dtype] // 1024))


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    repack = not (problem.aligned("a") and problem.aligned("b"))
    return [
        # each of two warpgroups multiplies 64 rows at once
        Knob("block_m", ROWS, "log2"),
        Knob("block_n", COLUMNS, "log2"),
        # a row of a tile is one swizzled line of 128 bytes
        Knob("block_k", (1024 // DTYPES[problem.a_dtype],), "log2"),
        Knob("num_warps", (8,), "log2"),
        Knob("num_stages", STAGES),
        Knob("group_m", (4, 8), "log2"),
        Knob("split_k", (1,), "log2"),
        # 0: whole tiles only
        Knob("stream_waves", (0, 1, 2)),
        Knob("subtile", (1, 2, 4), "log2"),
        # whether both pieces of a tile take a from registers
        Knob("a_held", (1, 0), "category"),
        Knob("repack", (int(repack),), "category"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    ring = (m + n) * k * number(knobs, "num_stages") * element_bytes(problem)
    return ring + m * (pieces(n)[0] // number(knobs, "subtile")) * DTYPES[problem.out_dtype] // 8 + 512


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        if problem.a_dtype in ("fp32", "int8"):
            return "multiplies 16-bit and fp8 operands"
        if problem.paired:
            return "has no gated steps"
        return "needs operands along K" if needs_turning(problem, "a") or needs_turning(problem, "b") else None

    def shape(knobs: Knobs) -> str | None:
        wide, rest = pieces(number(knobs, "block_n"))
        if number(knobs, "block_m") < 256 and not rest and not number(knobs, "stream_waves") and not is_long(problem):
            return "warp_specialized computes whole tiles of this shape"
        line = 128 // element_bytes(problem)
        if problem.b.order == "row" and (wide < line or 0 < rest < line):
            return f"a piece of b's tile has fewer than {line} columns, a line of 128 bytes"
        return None

    def held(knobs: Knobs) -> str | None:
        if not number(knobs, "a_held"):
            return None
        if problem.a.order != "row" or element_bytes(problem) != 2:
            return "16-bit elements along K come to registers as they are needed there, others do not"
        if number(knobs, "block_m") > 128:
            return "two stages of a need too many registers beside the accumulators of 128 rows"
        return None if pieces(number(knobs, "block_n"))[1] else "one piece reads a once anyway"

    return [
        plain_constraint(problem, device, batched=False),
        Constraint("hopper", hopper),
        Constraint("shape", shape),
        *_best_of_shape(problem, device),
        Constraint("held", held),
        order_constraint(problem),
        *_sharing_constraints(problem, device),
        _promising(problem, device),
        tma_constraint(problem, device, ("a", "b")),
    ]


def _best_of_shape(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """What needs no trying: the parts in which a tile goes out, and how deep the ring is."""

    def parts(knobs: Knobs) -> str | None:
        wide, best = pieces(number(knobs, "block_n"))[0], subtile(problem, number(knobs, "block_n"))
        if number(knobs, "subtile") == best:
            return None
        return f"parts of {wide // best} columns take fewer instructions and less shared memory"

    def ring(knobs: Knobs) -> str | None:
        deeper = [s for s in STAGES if s > number(knobs, "num_stages")]
        fits = [s for s in deeper if _shared(problem, {**knobs, "num_stages": s}) <= device.shared_memory_bytes]
        return f"a ring of {fits[-1]} stages fits" if fits else None

    return [Constraint("parts", parts), Constraint("ring", ring)]


def clocks(problem: Problem, device: DeviceSpec, knobs: Knobs) -> float:
    """Clocks for the busiest multiprocessor, launch and epilogue left out: see the head of this file."""
    rows, columns = number(knobs, "block_m"), number(knobs, "block_n")
    line = 128 // element_bytes(problem)
    multiply = rows * columns / 32
    # 64 rows are read once for each piece, and the columns once for each 64 rows
    times = 1 if number(knobs, "a_held") else len([piece for piece in pieces(columns) if piece])
    read = rows // 64 * (64 * times + columns)
    written = rows + columns
    steps, count = math.ceil(problem.k / line), tiles(problem, knobs)
    one = max(multiply, read + written)
    if not number(knobs, "stream_waves"):
        return math.ceil(count / device.multiprocessors) * steps * one
    # a part is written and one or two are read, at 64 bytes a clock
    return count * steps / device.multiprocessors * one + 0.15 * rows * columns


def _promising(problem: Problem, device: DeviceSpec) -> Constraint:
    @functools.cache
    def least() -> float:
        shapes = itertools.product(ROWS, COLUMNS, (0, 1))
        named = ({"block_m": m, "block_n": n, "stream_waves": waves, "a_held": 0} for m, n, waves in shapes)
        return min(clocks(problem, device, knobs) for knobs in named)

    def check(knobs: Knobs) -> str | None:
        share = clocks(problem, device, knobs) / least()
        return f"should take {share:.2f} times as long as the best of this template" if share > SLOWER else None

    return Constraint("promising", check)


def _sharing_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def tail(knobs: Knobs) -> str | None:
        if not number(knobs, "stream_waves"):
            return None
        count = tiles(problem, knobs)
        waves = count / device.multiprocessors
        if waves / math.ceil(waves) > FULL:
            return f"{count} tiles fill {math.ceil(waves)} waves: there is nothing to share out"
        if waves > MOST_WAVES:
            return f"{waves:.1f} waves: the last one is a small part of the time"
        if number(knobs, "stream_waves") > 1 and waves < 1:
            return "there is no full wave to share out"
        left = count % device.multiprocessors + (number(knobs, "stream_waves") - 1) * device.multiprocessors
        share = left * math.ceil(problem.k / number(knobs, "block_k")) / device.multiprocessors
        return f"shares of {share:.1f} steps along K are too small" if share < FEWEST_STEPS else None

    def room(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None or not number(knobs, "stream_waves"):
            return None
        needed = 4 * device.multiprocessors * number(knobs, "block_m") * number(knobs, "block_n")
        return over(needed, problem.workspace_bytes, "bytes of workspace for parts (workspace_bytes)")

    return [Constraint("tail", tail), Constraint("room", room)]


STREAM_K_WARP_SPECIALIZED = MatmulTemplate(
    "stream_k_warp_specialized",
    "kernelwright.kernels.matmul.stream_k_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
