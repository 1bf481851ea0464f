"""The matmul operator: out[M, N] = epilogue(a[M, K] @ b[K, N])."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernelwright.errors import IllegalSchedule, NoWorkingSchedule
from kernelwright.kernels.matmul import inputs
from kernelwright.kernels.matmul.batched_small import BATCHED_SMALL
from kernelwright.kernels.matmul.block_scaled import BLOCK_SCALED
from kernelwright.kernels.matmul.gemv import GEMV
from kernelwright.kernels.matmul.grouped import GROUPED, GROUPED_POINTER
from kernelwright.kernels.matmul.microscaling import MICROSCALING
from kernelwright.kernels.matmul.persistent_tma import PERSISTENT_TMA
from kernelwright.kernels.matmul.pointer import POINTER
from kernelwright.kernels.matmul.skinny import SKINNY
from kernelwright.kernels.matmul.stream_k import STREAM_K
from kernelwright.kernels.matmul.stream_k_warp_specialized import STREAM_K_WARP_SPECIALIZED
from kernelwright.kernels.matmul.template import MatmulTemplate
from kernelwright.kernels.matmul.tile_tma import TILE_TMA
from kernelwright.kernels.matmul.vendor import vendor_call
from kernelwright.kernels.matmul.warp_specialized import WARP_SPECIALIZED
from kernelwright.kernels.matmul.weight_only import WEIGHT_ONLY
from kernelwright.kernels.matmul.workload import OPERANDS, Problem, problem_of
from kernelwright.kernels.operator import Inputs, Launch, Work, bytes_of
from kernelwright.kernels.precision import allowed, own_precision, tolerance
from kernelwright.kernels.space import UnionSpace
from kernelwright.kernels.triton_adapter import with_settled_keys
from kernelwright.types import DeviceSpec, Schedule, Workload

if TYPE_CHECKING:
    import torch

TEMPLATES: dict[str, MatmulTemplate] = {
    template.name: template
    for template in (
        POINTER,
        PERSISTENT_TMA,
        SKINNY,
        WARP_SPECIALIZED,
        STREAM_K,
        STREAM_K_WARP_SPECIALIZED,
        TILE_TMA,
        GROUPED,
        GROUPED_POINTER,
        WEIGHT_ONLY,
        GEMV,
        BATCHED_SMALL,
        BLOCK_SCALED,
        MICROSCALING,
    )
}


PORTABLE = ("pointer", "grouped_pointer", "microscaling")
"""Templates that run on every GPU, the most general first."""


def scale_bytes(p: Problem) -> float:
    """Bytes of the scales of quantised operands."""
    if p.scaling == "block128":
        return 4 * p.k / 128 * (p.m + p.n / 128)
    if p.scaling in ("mx", "nvfp4"):
        quantised = [side for side, dtype in ((p.m, p.a_dtype), (p.n, p.b_dtype)) if dtype not in ("fp16", "bf16")]
        return sum(quantised) * p.k / (32 if p.scaling == "mx" else 16)
    if p.scaling.startswith("group:"):
        return 2 * p.n * p.k / int(p.scaling.partition(":")[2])
    return 4.0 * (p.m + p.n) if p.scaling == "row" else 0.0


class MatmulOperator:
    """Implements `kernelwright.kernels.operator.Operator` for matrix products."""

    name = "matmul"
    templates: Mapping[str, MatmulTemplate] = TEMPLATES

    def validate(self, workload: Workload) -> None:
        """Raise InvalidWorkload or UnsupportedDtype, with what was wanted and what came."""
        problem_of(workload)

    def work(self, workload: Workload) -> Work:
        """2MNK flops a product; a, b, their group scales and the epilogue's operands read once, out written once."""
        p = problem_of(workload)
        a, b = p.m * p.k * bytes_of(p.a_dtype), p.k * p.n * bytes_of(p.b_dtype)
        if p.batched:
            # a matrix that a batch repeats is read once
            a, b = (size * (p.batch if layout.batch else 1) for size, layout in ((a, p.a), (b, p.b)))
        b *= p.groups or 1
        read = {"1": 0, "m": p.m, "n": p.n, "mn": p.batch * p.m * p.out_n}
        extra = sum(read[OPERANDS[step]] for step in p.epilogue if step in OPERANDS) * bytes_of(p.out_dtype)
        out = p.batch * p.m * p.out_n * bytes_of(p.out_dtype)
        return Work(2.0 * p.batch * p.m * p.n * p.k, a + b + scale_bytes(p) + extra + out)

    def compute_precisions(self, workload: Workload) -> tuple[str, ...]:
        """Names of DeviceSpec.peak_tflops that the error budget allows, fastest first."""
        p = problem_of(workload)
        return allowed(p.a_dtype, p.b_dtype, p.out_dtype, workload.error_budget)

    def space(self, workload: Workload, device: DeviceSpec) -> UnionSpace:
        """Every legal schedule of every template."""
        return UnionSpace([template.space(workload, device) for template in self.templates.values()])

    def default_schedule(self, workload: Workload, device: DeviceSpec) -> Schedule:
        """A middling schedule of the first portable template that can run the workload."""
        wanted = {
            "block_m": 64,
            "block_n": 64,
            "block_k": 32,
            "num_warps": 4,
            "num_stages": 3,
            "group_m": 8,
            "split_k": 1,
        }
        portable = [t for name, t in self.templates.items() if name in PORTABLE]
        spaces = (template.space(workload, device).members for template in portable)
        members = next((found for found in spaces if found), None) or self.space(workload, device).members
        if not members:
            raise NoWorkingSchedule(f"no schedule of any template is legal for {workload} on {device.name}")
        return max(members, key=lambda s: (sum(s.knobs.get(name) == value for name, value in wanted.items()), s.key))

    def tolerance(self, workload: Workload) -> float:
        """The largest relative error (Frobenius norm) with which a result counts as right."""
        p = problem_of(workload)
        own = own_precision(p.a_dtype, p.b_dtype)
        return tolerance(p.out_dtype, self.compute_precisions(workload)[0], workload.error_budget, own)

    def make_inputs(self, workload: Workload, seed: int, device: str) -> Inputs:
        """a, b, scales, offsets and the epilogue's operands, random, with the workload's strides; see `inputs.py`."""
        return inputs.make_inputs(problem_of(workload), seed, device)

    def empty_output(self, workload: Workload, device: str) -> torch.Tensor:
        """out [M, N] (or [B, M, N]) filled with NaN, with the workload's strides."""
        return inputs.empty_output(problem_of(workload), device)

    def reference(self, workload: Workload, operands: Inputs) -> torch.Tensor:
        """The right answer in fp64, itself checked by a product probe (ArithmeticError if the library lied)."""
        from kernelwright.kernels.matmul.reference import finished

        p = problem_of(workload)
        if p.groups:
            product = _grouped_product(workload, operands)
        else:
            product = _checked_product(workload, *(inputs.values(p, operands, name) for name in ("a", "b")))
        return finished(inputs.scaled(p, operands, product), operands, p.epilogue)

    def vendor(self, workload: Workload, operands: Inputs) -> tuple[str, Callable[[], Any]] | None:
        """torch's call for this workload (cuBLAS on a GPU), with the epilogue as torch runs it."""
        return vendor_call(workload, problem_of(workload), operands)

    def plan(self, workload: Workload, schedule: Schedule, operands: Inputs, out: torch.Tensor) -> list[Launch]:
        """The launches that compute `out`; IllegalSchedule for an unknown template."""
        if schedule.template not in self.templates:
            raise IllegalSchedule(f"template must be one of {', '.join(self.templates)}, got {schedule.template!r}")
        kernel_file = importlib.import_module(self.templates[schedule.template].kernel_module)
        launches: list[Launch] = kernel_file.plan(operands, out, dict(schedule.knobs), workload.epilogue)
        return with_settled_keys(launches)


def _checked_product(workload: Workload, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    from kernelwright.kernels.matmul.reference import product_check

    product = torch.matmul(a, b)
    error = product_check(a, b, product)
    if error > 1e-9:
        raise ArithmeticError(f"the fp64 reference of {workload} is off by {error:.1e}; it cannot judge kernels")
    return product


def _grouped_product(workload: Workload, operands: Inputs) -> torch.Tensor:
    """The products of the experts one after the other, each widened only when its turn comes."""
    import torch

    a, b, ends = operands["a"], operands["b"], operands["offsets"].tolist()
    bounds = enumerate(itertools.pairwise([0, *ends]))
    parts = [_checked_product(workload, a[s:e].double(), b[g].double()) for g, (s, e) in bounds]
    return torch.cat(parts)


MATMUL = MatmulOperator()
