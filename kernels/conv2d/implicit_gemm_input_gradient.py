"""Template "implicit_gemm_input_gradient": the gradient of the input, and transposed convolution, by the kernel of
implicit_gemm; pixels that meet the same taps are computed together, so that no product with zeros is made."""

from __future__ import annotations

from kernelwright.kernels.conv2d.implicit_gemm import gather_constraints, gather_knobs, gather_shared
from kernelwright.kernels.conv2d.template import ConvTemplate, directions
from kernelwright.kernels.conv2d.workload import Problem
from kernelwright.kernels.space import Constraint
from kernelwright.types import DeviceSpec


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    return [directions(problem, "input_gradient", "transposed"), *gather_constraints(problem, device)]


IMPLICIT_GEMM_INPUT_GRADIENT = ConvTemplate(
    "implicit_gemm_input_gradient",
    "kernelwright.kernels.conv2d.implicit_gemm_kernel",
    gather_knobs,
    _constraints,
    gather_shared,
)
