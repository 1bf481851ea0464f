"""Template "backward_fused": dk, dv and dq in one pass, which adds dq up in fp32 in whatever order programs come."""

from __future__ import annotations

from kernelwright.kernels.attention.backward import repeats_nothing
from kernelwright.kernels.attention.template import AttentionTemplate, element_bytes, power_above
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    bulk = device.vendor == "nvidia" and int(device.architecture.removeprefix("sm_")) >= 90
    return [
        # block_n keys stay, block_m queries at a time stream by
        Knob("block_m", (32, 64, 128), "log2"),
        Knob("block_n", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (1, 2, 3)),
        key_sections(problem),
        Knob("loads", ("pointer", "bulk") if bulk else ("pointer",), "category"),
        Knob("precision", precisions, "category"),
    ]


def key_sections(problem: Problem) -> Knob:
    """How many key heads go through their tiles together: few share their queries and sums of dq in the L2 cache, many
    even out the tiles of a causal mask. Fewer than 4 leave whole multiprocessors waiting for the last long tiles, and
    without a causal mask all tiles are as long."""
    pairs = max(problem.batch * problem.kv_heads, 1)
    fitting = tuple(s for s in (4, 16) if s <= pairs) or (pairs,)
    return Knob("section", fitting if problem.causal else (1,), "log2")


def _shared(problem: Problem, knobs: Knobs) -> int:
    m, n = number(knobs, "block_m"), number(knobs, "block_n")
    width = power_above(problem.head_dim) + power_above(problem.v_dim)
    # keys and values stay, a ring of queries and gradients passes, and scores' gradients are turned for dq
    return (width * (n + m * number(knobs, "num_stages")) + m * n) * element_bytes(problem)


def any_order(problem: Problem) -> Constraint:
    """For templates that add up dq in no fixed order."""

    def check(knobs: Knobs) -> str | None:
        if not problem.backward:
            return "computes gradients"
        return "adds up dq in no fixed order" if problem.deterministic else None

    return Constraint("order", check)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    d_width, v_width = power_above(problem.head_dim), power_above(problem.v_dim)

    def registers(knobs: Knobs) -> str | None:
        m, n, threads = number(knobs, "block_m"), number(knobs, "block_n"), 32 * number(knobs, "num_warps")
        each = (n * (d_width + v_width) + max(2 * m * n, m * d_width)) / threads
        if each < 16:
            return f"a thread holds {each:g} scores and sums, fewer than 16: too many warps"
        return over(each, 256, "registers a thread for scores and sums")

    def sizes(knobs: Knobs) -> str | None:
        for name, size, what in (("block_m", problem.q_length, "queries"), ("block_n", problem.kv_length, "keys")):
            fitting = power_above(size, 64)
            if number(knobs, name) > fitting:
                return f"{name} {knobs[name]} for {size} {what}, {fitting} is enough"
        return None

    def stages(knobs: Knobs) -> str | None:
        steps, count = -(-problem.q_length // number(knobs, "block_m")), number(knobs, "num_stages")
        return f"num_stages {count} for {steps} blocks" if count > max(steps, 2) else None

    return [
        any_order(problem),
        Constraint("sizes", sizes),
        Constraint("registers", registers),
        Constraint("pipeline", stages),
        repeats_nothing(problem, device),
    ]


BACKWARD_FUSED = AttentionTemplate(
    "backward_fused", "kernelwright.kernels.attention.backward_fused_kernel", _knobs, _constraints, _shared
)
