"""Template "forward": plain loads and stores; any strides, sizes, masks and lengths, any GPU."""

from __future__ import annotations

from kernelwright.kernels.attention.template import (
    AttentionTemplate,
    can_split,
    element_bytes,
    forward_only,
    head_parts,
    least_part,
    multiplies,
    power_above,
    sections,
)
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    least = least_part(problem)
    splits = can_split(problem.head_dim, least) or can_split(problem.v_dim, least)
    return [
        # 16 rows for single queries, 128 to read keys less often
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (1, 2, 3, 4)),
        sections(problem),
        # a head dimension that is no power of two: padded to the next one, or two products
        Knob("head", ("pad", "split") if splits else ("pad",), "category"),
        Knob("precision", precisions, "category"),
    ]


def _widths(problem: Problem, knobs: Knobs) -> tuple[int, int]:
    """Elements that a head of k and of v takes with its padding."""
    split, least = knobs["head"] == "split", least_part(problem)
    return sum(head_parts(problem.head_dim, split, least)), sum(head_parts(problem.v_dim, split, least))


def _shared(problem: Problem, knobs: Knobs) -> int:
    k_width, v_width = _widths(problem, knobs)
    ring = number(knobs, "block_n") * (k_width + v_width) * max(number(knobs, "num_stages") - 1, 1)
    return (ring + number(knobs, "block_m") * k_width) * element_bytes(problem)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    longest = problem.q_length

    def rows(knobs: Knobs) -> str | None:
        fitting, block = power_above(longest), number(knobs, "block_m")
        return f"block_m {block} for {longest} queries, {fitting} is enough" if block > fitting else None

    def columns(knobs: Knobs) -> str | None:
        fitting, block = power_above(problem.kv_length, 32), number(knobs, "block_n")
        return f"block_n {block} for {problem.kv_length} keys, {fitting} is enough" if block > fitting else None

    def registers(knobs: Knobs) -> str | None:
        threads = 32 * number(knobs, "num_warps")
        block = number(knobs, "block_m")
        held = block * (_widths(problem, knobs)[1] + number(knobs, "block_n")) / threads
        if held < 4:
            return f"a thread holds {held:g} scores and sums, fewer than 4: too many warps"
        return over(held, 224, "registers a thread for scores and sums")

    def stages(knobs: Knobs) -> str | None:
        steps = -(-problem.kv_length // number(knobs, "block_n"))
        count = number(knobs, "num_stages")
        return f"{count} stages for {steps} blocks of keys" if count > max(steps, 1) and count > 2 else None

    def warpgroups(knobs: Knobs) -> str | None:
        if device.architecture != "sm_90" or number(knobs, "block_m") < 64 or number(knobs, "num_stages") == 1:
            return None
        # a product in flight reads a stage that cannot be loaded into yet
        more = number(knobs, "block_n") * sum(_widths(problem, knobs)) * element_bytes(problem)
        return over(_shared(problem, knobs) + more, device.shared_memory_bytes, "bytes of shared memory")

    def head(knobs: Knobs) -> str | None:
        wrong = knobs["head"] == "split" and device.architecture == "sm_90"
        return "heads in two parts were measured wrong on sm_90; pad them" if wrong else None

    def cache(knobs: Knobs) -> str | None:
        return "reads keys that lie in one piece, not in pages" if problem.page else None

    return [
        forward_only(problem),
        multiplies(problem, device),
        Constraint("head", head),
        Constraint("pages", cache),
        Constraint("rows", rows),
        Constraint("columns", columns),
        Constraint("registers", registers),
        Constraint("pipeline", stages),
        Constraint("warpgroups", warpgroups),
    ]


FORWARD = AttentionTemplate("forward", "kernelwright.kernels.attention.forward_kernel", _knobs, _constraints, _shared)
