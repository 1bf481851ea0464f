"""Template "decode_warp_specialized": absorbed latent attention of few queries, written in Gluon; Hopper only."""

from __future__ import annotations

from kernelwright.kernels.attention.template import (
    AttentionTemplate,
    bulk_copy,
    element_bytes,
    forward_only,
    power_above,
)
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

ROWS = 64
"""Query rows of a tile, the least height of a product by warpgroups."""

HALVES = (128, 256)
"""Columns of the values that each of two warpgroups keeps."""

RESTS = (16, 32, 64, 128)
"""Columns of the keys behind those that are values too."""

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    most = max(1, -(-problem.kv_length // 64))
    return [
        Knob("block_m", (ROWS,), "log2"),
        # two stages of 64 keys and the queries fill the shared memory; of 32 keys there is room for four
        Knob("block_n", (32, 64), "log2"),
        Knob("split_kv", tuple(s for s in _SPLITS if s <= most), "log2"),
        Knob("num_warps", (12,), "log2"),
        # the copy of a block starts while the scores of the one before are made, so that one stage is too few
        Knob("num_stages", (2, 3, 4)),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    keys = number(knobs, "block_n") * number(knobs, "num_stages")
    weights = ROWS * number(knobs, "block_n")
    return ((ROWS + keys) * problem.head_dim + weights) * element_bytes(problem) + 4 * ROWS + 128


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    rows = problem.q_length * problem.group

    def hopper(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90":
            return f"is written for sm_90, the device is {device.architecture}"
        return None if element_bytes(problem) == 2 else "multiplies 16-bit operands"

    def form(knobs: Knobs) -> str | None:
        if not problem.kv_shared or problem.v_dim not in [2 * half for half in HALVES]:
            return f"values must be the first {' or '.join(str(2 * half) for half in HALVES)} columns of the keys"
        if problem.head_dim - problem.v_dim not in RESTS:
            return f"keys must have {', '.join(map(str, RESTS))} columns more than values"
        if problem.kv_heads > 1 and problem.q_length > 1:
            return "takes several queries of one key head, or one query of several"
        if rows > 1024:
            return f"is for at most 1024 query rows of a key head, the problem has {rows}"
        return None

    def features(knobs: Knobs) -> str | None:
        had = {
            "a mask tensor": problem.mask,
            "slopes": problem.alibi,
            "sinks": problem.sinks,
            "soft caps": problem.softcap,
            "windows": problem.window,
            "causal masks from the top left": problem.causal == "top_left",
            "packed lengths": problem.packed,
        }
        unable = [name for name, there in had.items() if there]
        if unable:
            return f"does not do {', '.join(unable)}"
        return "needs a scale above 0" if problem.scale <= 0 else None

    return [
        forward_only(problem),
        Constraint("hopper", hopper),
        Constraint("form", form),
        Constraint("features", features),
        bulk_copy(problem, device, ("k",)),
        *_blocks(problem, device),
    ]


def _blocks(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """How keys are cut."""
    tiles = problem.batch * problem.kv_heads * -(-problem.q_length * problem.group // ROWS)

    def pages(knobs: Knobs) -> str | None:
        if problem.page and problem.page % number(knobs, "block_n"):
            return f"a block of {knobs['block_n']} keys does not lie in one page of {problem.page}"
        return None

    def parts(knobs: Knobs) -> str | None:
        split, block = number(knobs, "split_kv"), number(knobs, "block_n")
        if split > 1 and tiles * split > 4 * device.multiprocessors + split:
            return f"{tiles * split} programs are more than four waves on {device.multiprocessors} multiprocessors"
        share = problem.kv_length / split
        return f"a part has {share:g} keys, fewer than a block" if split > 1 and share < block else None

    def steps(knobs: Knobs) -> str | None:
        fitting, block = power_above(problem.kv_length, 32), number(knobs, "block_n")
        if block > fitting:
            return f"block_n {block} for {problem.kv_length} keys, {fitting} is enough"
        count = -(-problem.kv_length // (block * number(knobs, "split_kv")))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {count} blocks of keys" if stages > max(count, 2) else None

    return [Constraint("pages", pages), Constraint("parts", parts), Constraint("pipeline", steps)]


DECODE_WARP_SPECIALIZED = AttentionTemplate(
    "decode_warp_specialized",
    "kernelwright.kernels.attention.decode_warp_specialized_kernel",
    _knobs,
    _constraints,
    _shared,
)
