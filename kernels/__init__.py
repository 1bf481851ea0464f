"""Operators: what can be run, with which templates, and how schedules of them are built and rendered."""

from kernelwright.errors import UnknownOperator
from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.matmul.operator import MATMUL
from kernelwright.kernels.operator import Operator

OPERATORS: dict[str, Operator] = {"matmul": MATMUL, "attention": ATTENTION, "conv2d": CONV2D}
"""Every operator by name."""


def get_operator(name: str) -> Operator:
    """The operator of that name; UnknownOperator lists the names there are."""
    if name not in OPERATORS:
        raise UnknownOperator(f"operator must be one of {', '.join(OPERATORS)}, got {name!r}")
    return OPERATORS[name]


__all__ = ["OPERATORS", "Operator", "get_operator"]
