"""Template "pointer": plain loads and stores; any strides, any size, any GPU."""

from __future__ import annotations

from kernelwright.kernels.matmul.template import (
    Knobs,
    MatmulTemplate,
    element_bytes,
    number,
    plain_constraint,
    split_choices,
    split_constraint,
)
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    return [
        Knob("block_m", (16, 32, 64, 128, 256), "log2"),
        Knob("block_n", (32, 64, 128, 256), "log2"),
        Knob("block_k", (16, 32, 64, 128), "log2"),
        Knob("num_warps", (4, 8), "log2"),
        Knob("num_stages", (2, 3, 4, 5)),
        Knob("group_m", (1, 8), "log2"),
        Knob("split_k", split_choices(problem, device, 16), "log2"),
        Knob("precision", precisions, "category"),
    ]


def _shared(problem: Problem, knobs: Knobs) -> int:
    columns = number(knobs, "block_n") * (2 if problem.paired else 1)
    tile = (number(knobs, "block_m") + columns) * number(knobs, "block_k")
    return tile * number(knobs, "num_stages") * element_bytes(problem)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    def order(knobs: Knobs) -> str | None:
        one_row = problem.m <= number(knobs, "block_m")
        return "group_m above 1 needs more than one row of tiles" if one_row and number(knobs, "group_m") > 1 else None

    def depth(knobs: Knobs) -> str | None:
        narrow = element_bytes(problem) == 1 and number(knobs, "block_k") < 32
        return "8-bit products need a block_k of 32" if narrow else None

    return [
        plain_constraint(problem, device),
        Constraint("depth", depth),
        split_constraint(problem, device),
        Constraint("order", order),
    ]


POINTER = MatmulTemplate("pointer", "kernelwright.kernels.matmul.pointer_kernel", _knobs, _constraints, _shared)
