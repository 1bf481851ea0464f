"""Template "backward": dq, dk, dv and a mask's gradient in passes without atomics, the same bits every time."""

from __future__ import annotations

from kernelwright.kernels.attention.template import AttentionTemplate, bulk_copy, element_bytes, power_above
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    # wide heads leave registers for few rows alone
    rows = (64, 128) if sum(_widths(problem)) * element_bytes(problem) <= 512 else (32, 64, 128)
    bulk = device.vendor == "nvidia" and int(device.architecture.removeprefix("sm_")) >= 90
    return [
        # the pass over dk and dv: block_n1 keys stay, block_m1 queries at a time stream by
        Knob("block_m1", (32, 64, 128), "log2"),
        Knob("block_n1", rows, "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (1, 2, 3)),
        # the pass over dq: block_m2 queries stay, block_n2 keys at a time stream by
        Knob("block_m2", rows, "log2"),
        Knob("block_n2", (32, 64, 128), "log2"),
        Knob("num_warps2", (4, 8), "log2"),
        Knob("num_stages2", (1, 2, 3)),
        Knob("loads", ("pointer", "bulk") if bulk else ("pointer",), "category"),
        Knob("precision", precisions, "category"),
    ]


def _widths(problem: Problem) -> tuple[int, int]:
    """Elements that a head of k and of v takes in a tile."""
    return power_above(problem.head_dim), power_above(problem.v_dim)


def _shared(problem: Problem, knobs: Knobs) -> int:
    width = sum(_widths(problem)) * element_bytes(problem)
    return max(
        width * (number(knobs, "block_n1") + number(knobs, "block_m1") * number(knobs, "num_stages")),
        width * (number(knobs, "block_m2") + number(knobs, "block_n2") * number(knobs, "num_stages2")),
    )


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    d_width, v_width = _widths(problem)

    def direction(knobs: Knobs) -> str | None:
        return None if problem.backward else "computes gradients"

    def keys_pass(knobs: Knobs) -> str | None:
        m, n, threads = number(knobs, "block_m1"), number(knobs, "block_n1"), 32 * number(knobs, "num_warps")
        return _held(n * (d_width + v_width) + 2 * m * n, threads)

    def queries_pass(knobs: Knobs) -> str | None:
        m, n, threads = number(knobs, "block_m2"), number(knobs, "block_n2"), 32 * number(knobs, "num_warps2")
        return _held(m * d_width + 2 * m * n, threads)

    def sizes(knobs: Knobs) -> str | None:
        for names, size, what in (
            (("block_m1", "block_m2"), problem.q_length, "queries"),
            (("block_n1", "block_n2"), problem.kv_length, "keys"),
        ):
            fitting = power_above(size, 64)
            for name in names:
                if number(knobs, name) > fitting:
                    return f"{name} {knobs[name]} for {size} {what}, {fitting} is enough"
        return None

    def stages(knobs: Knobs) -> str | None:
        # every member of the group of heads passes by in one loop after the other
        for block, count, size in (
            ("block_m1", "num_stages", problem.q_length),
            ("block_n2", "num_stages2", problem.kv_length),
        ):
            steps = -(-size // number(knobs, block))
            if number(knobs, count) > max(steps, 2):
                return f"{count} {knobs[count]} for {steps} blocks"
        return None

    return [
        Constraint("direction", direction),
        Constraint("sizes", sizes),
        Constraint("registers_keys", keys_pass),
        Constraint("registers_queries", queries_pass),
        Constraint("pipeline", stages),
        repeats_nothing(problem, device),
    ]


def _held(numbers: int, threads: int) -> str | None:
    """Why sums and scores of a block do not suit its threads, or None."""
    each = numbers / threads
    if each < 16:
        return f"a thread holds {each:g} scores and sums, fewer than 16: too many warps"
    return over(each, 256, "registers a thread for scores and sums")


def repeats_nothing(problem: Problem, device: DeviceSpec) -> Constraint:
    """The bulk copy engine takes aligned rows that do not repeat."""
    able = bulk_copy(problem, device, ("q", "k", "v", "out"))

    def check(knobs: Knobs) -> str | None:
        if knobs["loads"] != "bulk":
            return None
        for layout in (problem.q, problem.k, problem.v, problem.out):
            if any(stride == 0 and size > 1 for size, stride in zip(layout.shape, layout.strides, strict=True)):
                return "the bulk copy engine takes no stride of 0"
        return able.check(knobs)

    return Constraint("bulk", check)


BACKWARD = AttentionTemplate(
    "backward", "kernelwright.kernels.attention.backward_kernel", _knobs, _constraints, _shared
)
