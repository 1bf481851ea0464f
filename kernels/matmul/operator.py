"""The matmul operator: out[M, N] = epilogue(a[M, K] @ b[K, N])."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kernelwright.errors import IllegalSchedule, NoWorkingSchedule
from kernelwright.kernels.matmul.persistent_tma import PERSISTENT_TMA
from kernelwright.kernels.matmul.pointer import POINTER
from kernelwright.kernels.matmul.skinny import SKINNY
from kernelwright.kernels.matmul.template import MatmulTemplate
from kernelwright.kernels.matmul.vendor import vendor_call
from kernelwright.kernels.matmul.workload import Layout, problem_of
from kernelwright.kernels.operator import Inputs, Launch, Work, bytes_of
from kernelwright.kernels.precision import allowed, tolerance
from kernelwright.kernels.space import UnionSpace
from kernelwright.types import DeviceSpec, Schedule, Workload

if TYPE_CHECKING:
    import torch

TEMPLATES: dict[str, MatmulTemplate] = {t.name: t for t in (POINTER, PERSISTENT_TMA, SKINNY)}


class MatmulOperator:
    """Implements `kernelwright.kernels.operator.Operator` for matrix products."""

    name = "matmul"
    templates: Mapping[str, MatmulTemplate] = TEMPLATES

    def validate(self, workload: Workload) -> None:
        """Raise InvalidWorkload or UnsupportedDtype, with what was wanted and what came."""
        problem_of(workload)

    def work(self, workload: Workload) -> Work:
        """2MNK flops; a, b, bias read once and out written once."""
        p = problem_of(workload)
        moved = p.m * p.k * bytes_of(p.a_dtype) + p.k * p.n * bytes_of(p.b_dtype) + p.m * p.n * bytes_of(p.out_dtype)
        return Work(2.0 * p.m * p.n * p.k, moved + (p.n * bytes_of(p.out_dtype) if p.has_bias else 0))

    def compute_precisions(self, workload: Workload) -> tuple[str, ...]:
        """Names of DeviceSpec.peak_tflops that the error budget allows, fastest first."""
        p = problem_of(workload)
        return allowed(p.a_dtype, p.b_dtype, p.out_dtype, workload.error_budget)

    def space(self, workload: Workload, device: DeviceSpec) -> UnionSpace:
        """Every legal schedule of every template."""
        return UnionSpace([template.space(workload, device) for template in self.templates.values()])

    def default_schedule(self, workload: Workload, device: DeviceSpec) -> Schedule:
        """A middling schedule of the pointer template, which runs everywhere."""
        wanted = {
            "block_m": 64,
            "block_n": 64,
            "block_k": 32,
            "num_warps": 4,
            "num_stages": 3,
            "group_m": 8,
            "split_k": 1,
        }
        members = self.templates["pointer"].space(workload, device).members
        if not members:
            raise NoWorkingSchedule(f"no schedule of the pointer template is legal for {workload} on {device.name}")
        return max(members, key=lambda s: (sum(s.knobs[name] == value for name, value in wanted.items()), s.key))

    def tolerance(self, workload: Workload) -> float:
        """The largest relative error (Frobenius norm) with which a result counts as right."""
        p = problem_of(workload)
        return tolerance(p.out_dtype, self.compute_precisions(workload)[0], workload.error_budget)

    def make_inputs(self, workload: Workload, seed: int, device: str) -> Inputs:
        """a [M, K], b [K, N] and bias [N] (when the epilogue has one), random normal, with the workload's strides."""
        import torch

        p = problem_of(workload)
        generator = torch.Generator(device=device if device != "meta" else "cpu").manual_seed(seed)

        def normal(rows: int, columns: int, layout: Layout, dtype: str) -> torch.Tensor:
            out = _strided(rows, columns, layout, dtype, device)
            return out if device == "meta" else out.normal_(generator=generator)

        inputs = {"a": normal(p.m, p.k, p.a, p.a_dtype), "b": normal(p.k, p.n, p.b, p.b_dtype)}
        if p.has_bias:
            inputs["bias"] = normal(1, p.n, Layout("row", p.n), p.out_dtype)[0]
        return inputs

    def empty_output(self, workload: Workload, device: str) -> torch.Tensor:
        """out [M, N] filled with NaN, with the workload's strides."""
        p = problem_of(workload)
        return _strided(p.m, p.n, p.out, p.out_dtype, device)

    def reference(self, workload: Workload, inputs: Inputs) -> torch.Tensor:
        """The right answer in fp64, itself checked by a product probe (ArithmeticError if the library lied)."""
        import torch

        from kernelwright.kernels.matmul.reference import finished, product_check

        a, b = inputs["a"], inputs["b"]
        product = torch.mm(a.double(), b.double())
        error = product_check(a, b, product)
        if error > 1e-9:
            raise ArithmeticError(f"the fp64 reference of {workload} is off by {error:.1e}; it cannot judge kernels")
        return finished(product, inputs.get("bias"), problem_of(workload).activation)

    def vendor(self, workload: Workload, inputs: Inputs) -> tuple[str, Callable[[], Any]] | None:
        """torch's call for this workload (cuBLAS on a GPU), with the epilogue as torch runs it."""
        return vendor_call(workload, problem_of(workload), inputs)

    def plan(self, workload: Workload, schedule: Schedule, inputs: Inputs, out: torch.Tensor) -> list[Launch]:
        """The launches that compute `out`; IllegalSchedule for an unknown template."""
        if schedule.template not in self.templates:
            raise IllegalSchedule(f"template must be one of {', '.join(self.templates)}, got {schedule.template!r}")
        kernel_file = importlib.import_module(self.templates[schedule.template].kernel_module)
        launches: list[Launch] = kernel_file.plan(inputs, out, dict(schedule.knobs), workload.epilogue)
        return launches


def _strided(rows: int, columns: int, layout: Layout, dtype: str, device: str) -> torch.Tensor:
    import torch

    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    lines = rows if layout.order == "row" else columns
    # NaN in the gaps between rows: a kernel that reads them cannot pass
    storage = torch.full((max(lines, 1) * layout.leading,), float("nan"), dtype=types[dtype], device=device)
    return storage.as_strided((rows, columns), layout.strides())


MATMUL = MatmulOperator()
