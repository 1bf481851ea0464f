"""Template "weight_only": 16-bit a, weights of 4 bits with scales for groups along K, split-K in one launch; from
sm_90 on."""

from __future__ import annotations

import math

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    number,
    split_choices,
    split_constraint,
    tma_constraint,
)
from kernelwright.kernels.matmul.workload import Problem, group_size
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128), "log2"),
        # few columns are for two warps, on the tensor cores' older instructions
        Knob("block_n", (32,) if problem.out_n <= 32 else (64, 128, 256), "log2"),
        # 32 only where a step must not hold more than one group, and where there is no more
        Knob("block_k", (32, 64, 128, 256) if _rounds(problem) or problem.k <= 32 else (64, 128, 256), "log2"),
        Knob("num_warps", (2,) if problem.out_n <= 32 else (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5, 6)),
        Knob("split_k", split_choices(problem, device, 16), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _rounds(problem: Problem) -> bool:
    """Whether weights times scales lose what the result would show: digits of int4 in bf16, unless out is bf16 too, and
    in fp16 the powers of two of mx, which reach far beyond its range."""
    if problem.a_dtype == "fp16":
        return problem.scaling == "mx"
    return problem.b_dtype == "int4" and problem.out_dtype != "bf16"


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n, k = (number(knobs, name) for name in ("block_m", "block_n", "block_k"))
    packed = (2 * n if problem.paired else n) * k // 2
    # a's tile once more, split into even and odd columns
    return (m * k * element_bytes(problem) + packed) * number(knobs, "num_stages") + m * k * element_bytes(problem)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def weights(knobs: Knobs) -> str | None:
        if problem.groups or problem.batched:
            return "computes single products"
        if problem.a_dtype not in ("fp16", "bf16") or problem.b_dtype not in ("int4", "fp4"):
            return f"multiplies 16-bit a by 4-bit b, got {problem.a_dtype} and {problem.b_dtype}"
        if not (problem.scaling.startswith("group:") or problem.scaling in ("mx", "nvfp4")):
            return f"has no way to apply scaling {problem.scaling or 'of no kind'}"
        return None

    def groups(knobs: Knobs) -> str | None:
        block, group = number(knobs, "block_k"), group_size(problem.scaling)
        if block % group:
            return f"block_k {block} is no multiple of the {group} that share a scale"
        if _rounds(problem) and block > group:
            return f"weights times scales do not fit {problem.a_dtype}; block_k must be {group}"
        return None

    def rows(knobs: Knobs) -> str | None:
        block = number(knobs, "block_m")
        most = min(128, 2 ** math.ceil(math.log2(max(problem.m, 16))))
        return f"block_m {block} reads the weight {math.ceil(problem.m / block)} times" if block < most / 2 else None

    def warps(knobs: Knobs) -> str | None:
        needed = 16 * number(knobs, "num_warps")
        return f"{knobs['num_warps']} warps need a block_n of {needed}" if number(knobs, "block_n") < needed else None

    return [
        Constraint("weights", weights),
        Constraint("groups", groups),
        Constraint("rows", rows),
        Constraint("warps", warps),
        tma_constraint(problem, device, ("a", "b")),
        split_constraint(problem, device),
    ]


WEIGHT_ONLY = MatmulTemplate(
    "weight_only", "kernelwright.kernels.matmul.weight_only_kernel", _knobs, _constraints, _shared
)
