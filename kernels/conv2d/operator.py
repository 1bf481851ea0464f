"""The conv2d operator: out = epilogue(conv(x, w)), or the gradient of x or of w."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernelwright.errors import IllegalSchedule, NoWorkingSchedule
from kernelwright.kernels.conv2d import inputs, reference
from kernelwright.kernels.conv2d.depthwise import DEPTHWISE
from kernelwright.kernels.conv2d.depthwise_tile import DEPTHWISE_TILE
from kernelwright.kernels.conv2d.grouped_direct import GROUPED_DIRECT
from kernelwright.kernels.conv2d.implicit_gemm import IMPLICIT_GEMM
from kernelwright.kernels.conv2d.implicit_gemm_input_gradient import IMPLICIT_GEMM_INPUT_GRADIENT
from kernelwright.kernels.conv2d.implicit_gemm_parts import IMPLICIT_GEMM_PARTS
from kernelwright.kernels.conv2d.implicit_gemm_tma import IMPLICIT_GEMM_TMA
from kernelwright.kernels.conv2d.implicit_gemm_warp_specialized import IMPLICIT_GEMM_WARP_SPECIALIZED
from kernelwright.kernels.conv2d.implicit_gemm_weight_gradient import IMPLICIT_GEMM_WEIGHT_GRADIENT
from kernelwright.kernels.conv2d.patch_gradient import PATCH_GRADIENT
from kernelwright.kernels.conv2d.pointwise import POINTWISE
from kernelwright.kernels.conv2d.resident_weights import RESIDENT_WEIGHTS
from kernelwright.kernels.conv2d.stem import STEM
from kernelwright.kernels.conv2d.template import ConvTemplate
from kernelwright.kernels.conv2d.vendor import vendor_call
from kernelwright.kernels.conv2d.weight_gradient_warp_specialized import WEIGHT_GRADIENT_WARP_SPECIALIZED, rearranged
from kernelwright.kernels.conv2d.workload import OPERANDS, Problem, complete_attributes, problem_of
from kernelwright.kernels.operator import Inputs, Launch, Work, bytes_of
from kernelwright.kernels.precision import allowed, own_precision, tolerance
from kernelwright.kernels.space import UnionSpace
from kernelwright.kernels.triton_adapter import with_settled_keys
from kernelwright.types import DeviceSpec, Schedule, Workload

if TYPE_CHECKING:
    import torch

TEMPLATES: dict[str, ConvTemplate] = {
    template.name: template
    for template in (
        IMPLICIT_GEMM,
        IMPLICIT_GEMM_INPUT_GRADIENT,
        IMPLICIT_GEMM_WEIGHT_GRADIENT,
        PATCH_GRADIENT,
        POINTWISE,
        IMPLICIT_GEMM_TMA,
        IMPLICIT_GEMM_WARP_SPECIALIZED,
        WEIGHT_GRADIENT_WARP_SPECIALIZED,
        DEPTHWISE,
        STEM,
        GROUPED_DIRECT,
        RESIDENT_WEIGHTS,
        DEPTHWISE_TILE,
        IMPLICIT_GEMM_PARTS,
    )
}

PORTABLE = ("implicit_gemm", "implicit_gemm_input_gradient", "implicit_gemm_weight_gradient")
"""Templates that run on every GPU; for each direction there is one."""

DEPTHWISE_ONLY = ("depthwise_tile", "depthwise")
"""Templates for channels that go by themselves, the better first: products of matrices take 10 times as long there."""

MIDDLING = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "num_warps": 4,
    "num_stages": 3,
    "group_m": 8,
    "split_k": 1,
}

LARGEST_ERROR = 1e-9
"""The most by which the fp64 reference may differ from sums written out tap by tap."""


class Conv2dOperator:
    """Implements `kernelwright.kernels.operator.Operator` for convolutions and their gradients."""

    name = "conv2d"
    templates: Mapping[str, ConvTemplate] = TEMPLATES

    def validate(self, workload: Workload) -> None:
        """Raise InvalidWorkload or UnsupportedDtype, with what was wanted and what came."""
        problem_of(workload)

    def work(self, workload: Workload) -> Work:
        """2 flops for each tap of each pair of channels at each pixel, those that lie in the padding among them, as
        torch counts; each element of an operand that any tap reads once, the result once."""
        p = problem_of(workload)
        pixels = p.h * p.w if p.transposed else math.prod(p.out_size)
        flops = 2.0 * p.n * pixels * p.k * p.c // p.groups * p.r * p.s
        read = {name: math.prod(p.shapes[name]) for name in p.operands}
        if "x" in read and not p.transposed:
            rows, columns = (_pixels_read(p, axis) for axis in (0, 1))
            read["x"] = p.n * p.c * rows * columns
        for name in read:
            # an image that a batch repeats is read once
            read[name] //= p.n if p.n and not p.layouts[name].strides[0] and name != "w" else 1
        total = sum(size * bytes_of(p.dtypes[name]) for name, size in read.items())
        written = math.prod(p.shapes[p.result])
        extra = sum(p.k if OPERANDS[step] == "k" else written for step in p.epilogue if step in OPERANDS)
        return Work(flops, total + (written + extra) * bytes_of(p.dtypes[p.result]))

    def compute_precisions(self, workload: Workload) -> tuple[str, ...]:
        """Names of DeviceSpec.peak_tflops that the error budget allows, fastest first."""
        p = problem_of(workload)
        first, second = (p.dtypes[name] for name in p.operands)
        return allowed(first, second, p.dtypes[p.result], workload.error_budget)

    def space(self, workload: Workload, device: DeviceSpec) -> UnionSpace:
        """Every legal schedule of every template; not of those that others there leave far behind."""
        return UnionSpace([template.space(workload, device) for template in self._offered(workload, device)])

    def _offered(self, workload: Workload, device: DeviceSpec) -> list[ConvTemplate]:
        problem, names = problem_of(workload), list(self.templates)
        if problem.depthwise:
            direct = (name for name in DEPTHWISE_ONLY if self.templates[name].space(workload, device).members)
            names = list(itertools.islice(direct, 1)) or names
        elif rearranged(problem) and WEIGHT_GRADIENT_WARP_SPECIALIZED.space(workload, device).members:
            names.remove(IMPLICIT_GEMM_WEIGHT_GRADIENT.name)
        return [self.templates[name] for name in names]

    def default_schedule(self, workload: Workload, device: DeviceSpec) -> Schedule:
        """A middling schedule of the direction's portable template, or of one that is offered instead."""
        offered = [template for template in self._offered(workload, device) if template.name in PORTABLE]
        spaces = (template.space(workload, device).members for template in offered)
        members = next((found for found in spaces if found), None) or self.space(workload, device).members
        if not members:
            raise NoWorkingSchedule(f"no schedule of any template is legal for {workload} on {device.name}")
        return max(members, key=lambda s: (sum(s.knobs.get(name) == value for name, value in MIDDLING.items()), s.key))

    def tolerance(self, workload: Workload) -> float:
        """The largest relative error (Frobenius norm) with which a result counts as right."""
        p = problem_of(workload)
        own = own_precision(*(p.dtypes[name] for name in p.operands))
        return tolerance(p.dtypes[p.result], self.compute_precisions(workload)[0], workload.error_budget, own)

    def make_inputs(self, workload: Workload, seed: int, device: str) -> Inputs:
        """The operands, random, with the workload's strides and NaN in the gaps; see `inputs.py`."""
        return inputs.make_inputs(problem_of(workload), seed, device)

    def empty_output(self, workload: Workload, device: str) -> torch.Tensor:
        """The result, out [N, K, P, Q], x [N, C, H, W] or w [K, C/groups, R, S], filled with NaN (integers: the least
        value), with the workload's strides."""
        return inputs.empty_output(problem_of(workload), device)

    def reference(self, workload: Workload, operands: Inputs) -> torch.Tensor:
        """The right answer in fp64, itself compared with sums that are written out at random places (ArithmeticError if
        the library lied)."""
        p = problem_of(workload)
        first, second = (operands["d_out" if name == "out" else name] for name in p.operands)
        product = reference.convolve(p, first, second)
        error = reference.sampled_error(p, first, second, product)
        if not error <= LARGEST_ERROR:
            raise ArithmeticError(f"the fp64 reference of {workload} is off by {error:.1e}; it cannot judge kernels")
        return reference.finished(product, operands, p.epilogue)

    def vendor(self, workload: Workload, operands: Inputs) -> tuple[str, Callable[[], Any]] | None:
        """torch's fastest call for this workload (cuDNN on a GPU), with the epilogue as torch runs it."""
        return vendor_call(workload, problem_of(workload), operands)

    def plan(self, workload: Workload, schedule: Schedule, operands: Inputs, out: torch.Tensor) -> list[Launch]:
        """The launches that compute `out`; IllegalSchedule for an unknown template."""
        if schedule.template not in self.templates:
            raise IllegalSchedule(f"template must be one of {', '.join(self.templates)}, got {schedule.template!r}")
        kernel_file = importlib.import_module(self.templates[schedule.template].kernel_module)
        attributes = complete_attributes(workload)
        launches: list[Launch] = kernel_file.plan(operands, out, dict(schedule.knobs), attributes, workload.epilogue)
        return with_settled_keys(launches)


@functools.lru_cache(maxsize=4096)
def _pixels_read(p: Problem, axis: int) -> int:
    """How many rows (or columns) of the input any tap of any output reads."""
    size, taps = p.shapes["x"][2 + axis], (p.r, p.s)[axis]
    step, pad, apart, count = p.stride[axis], p.padding[axis], p.dilation[axis], p.out_size[axis]
    first = {tap * apart - pad for tap in range(taps)}
    if len({place % step for place in first}) == step:
        # every remainder of the stride is read; what is missing at the edges is little
        return size
    return len({at * step + place for at in range(count) for place in first if 0 <= at * step + place < size})


CONV2D = Conv2dOperator()
