"""The vendor library's side of a matmul: the strongest call that torch offers for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelwright.kernels.matmul.reference import activations
from kernelwright.kernels.matmul.workload import Problem
from kernelwright.kernels.operator import Inputs
from kernelwright.kernels.precision import allowed
from kernelwright.types import Workload

FUSED_BY_VENDOR = {"relu": False, "gelu_tanh": True}
"""Activations that cuBLASLt does in its own epilogue after a bias: use_gelu of torch._addmm_activation."""


def vendor_call(workload: Workload, problem: Problem, inputs: Inputs) -> tuple[str, Callable[[], Any]] | None:
    """(name, call) that computes the workload through torch; None for outputs of another dtype than the operands."""
    import torch

    if problem.out_dtype != problem.a_dtype:
        return None
    if "tf32" in allowed(problem.a_dtype, problem.b_dtype, problem.out_dtype, workload.error_budget):
        name, call = _plain(problem, inputs)
        return f"{name} (tf32)", lambda: _with_tf32(call)
    torch.backends.cuda.matmul.allow_tf32 = False
    return _plain(problem, inputs)


def _with_tf32(call: Callable[[], Any]) -> Any:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _plain(problem: Problem, inputs: Inputs) -> tuple[str, Callable[[], Any]]:
    import torch

    a, b = inputs["a"], inputs["b"]
    bias = inputs.get("bias")
    if bias is not None and problem.activation in FUSED_BY_VENDOR:
        use_gelu = FUSED_BY_VENDOR[problem.activation]
        return "torch._addmm_activation", lambda: torch._addmm_activation(bias, a, b, use_gelu=use_gelu)
    product: Callable[[], Any]
    if bias is not None:
        name, product = "torch.addmm", lambda: torch.addmm(bias, a, b)
    else:
        name, product = "torch.mm", lambda: torch.mm(a, b)
    if not problem.activation:
        return name, product
    activation = activations()[problem.activation]
    return f"{name}+{problem.activation}", lambda: activation(product())
