"""The vendor library's side of a matmul: the strongest call that torch offers for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.fastest_call import Call, fastest
from kernelwright.kernels.matmul.inputs import torch_dtype, values
from kernelwright.kernels.matmul.reference import finished, operand_name
from kernelwright.kernels.matmul.workload import OPERANDS, TMA_ALIGNMENT, Problem
from kernelwright.kernels.operator import Inputs
from kernelwright.kernels.precision import allowed
from kernelwright.types import Workload

if TYPE_CHECKING:
    import torch

FUSED_BY_VENDOR = {"relu": False, "gelu_tanh": True}
"""Activations that cuBLASLt does in its own epilogue after a bias: use_gelu of torch._addmm_activation."""

INT_MM_ROWS = 32
"""torch._int_mm wants more than 16 rows."""


def vendor_call(workload: Workload, problem: Problem, inputs: Inputs) -> Call | None:
    """(name, call) that computes the workload through torch; None for outputs that torch's product cannot write."""
    import torch

    inputs = _as_the_result(problem, inputs)
    if problem.groups:
        return _with_rest(problem, inputs, _grouped(inputs), 0)
    if problem.scaling:
        return _with_rest(problem, inputs, _quantised(problem, inputs), 0)
    if problem.out_dtype != problem.a_dtype:
        return None
    if "tf32" in allowed(problem.a_dtype, problem.b_dtype, problem.out_dtype, workload.error_budget):
        # what is the faster way with it, too
        name, call = _with_tf32(lambda: _strongest(problem, inputs))
        return f"{name} (tf32)", lambda: _with_tf32(call)
    torch.backends.cuda.matmul.allow_tf32 = False
    return _strongest(problem, inputs)


def _as_the_result(problem: Problem, inputs: Inputs) -> Inputs:
    """The operands, vectors of the epilogue in the result's type."""
    steps = [place for place, step in enumerate(problem.epilogue) if OPERANDS.get(step) in ("m", "n")]
    names = [operand_name(problem.epilogue, place) for place in steps]
    return {**inputs, **{name: inputs[name].to(torch_dtype(problem.out_dtype)) for name in names}}


def _with_tf32(call: Callable[[], Any]) -> Any:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _with_rest(problem: Problem, inputs: Inputs, product: Call, done: int) -> Call:
    """The product, then the epilogue's steps from number `done` on, by torch."""
    name, call = product
    rest = problem.epilogue[done:]
    if not rest:
        return product
    # a step's operand is looked up by its place in the rest
    places = range(done, len(problem.epilogue))
    needed = {
        operand_name(rest, place - done): inputs[operand_name(problem.epilogue, place)]
        for place in places
        if problem.epilogue[place] in OPERANDS
    }
    return "+".join((name, *rest)), lambda: finished(call(), needed, rest)


def _strongest(problem: Problem, inputs: Inputs) -> Call:
    """The product as it is or, where that reads or writes unaligned rows, of operands that the call pads with zeros, as
    torch.compile does where that is faster; on a GPU the faster one of both."""
    name, call = _plain(problem, inputs)
    if problem.batched or all(problem.aligned(tensor) for tensor in ("a", "b", "out")):
        return name, call
    unpadded = (f"unpadded {name}", call)
    return fastest([unpadded, _padded(problem, inputs)]) if inputs["a"].is_cuda else unpadded


def _padded(problem: Problem, inputs: Inputs) -> Call:
    import torch

    a, b = inputs["a"], inputs["b"]
    step = TMA_ALIGNMENT // a.element_size()
    m, n, k = (-size % step for size in (problem.m, problem.n, problem.k))

    def product() -> torch.Tensor:
        return torch.mm(_with_zeros(a, m, k), _with_zeros(b, k, n))[: problem.m, : problem.n]

    return _with_rest(problem, inputs, ("padded torch.mm", product), 0)


def _with_zeros(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A copy with so many rows and columns of zeros behind, in the same order."""
    import torch

    if matrix.stride(0) == 1:
        return torch.nn.functional.pad(matrix.t(), (0, rows, 0, columns)).t()
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def _plain(problem: Problem, inputs: Inputs) -> Call:
    import torch

    a, b, steps = inputs["a"], inputs["b"], problem.epilogue
    first = steps[0] if steps else ""
    if problem.batched:
        if first == "residual":
            added = inputs["residual"]
            return _with_rest(problem, inputs, ("torch.baddbmm", lambda: torch.baddbmm(added, a, b)), 1)
        return _with_rest(problem, inputs, ("torch.bmm", lambda: torch.bmm(a, b)), 0)
    if first == "bias" and len(steps) > 1 and steps[1] in FUSED_BY_VENDOR:
        bias, use_gelu = inputs["bias"], FUSED_BY_VENDOR[steps[1]]
        call = ("torch._addmm_activation", lambda: torch._addmm_activation(bias, a, b, use_gelu=use_gelu))
        return _with_rest(problem, inputs, call, 2)
    if first in ("bias", "residual"):
        term = inputs[first]
        return _with_rest(problem, inputs, ("torch.addmm", lambda: torch.addmm(term, a, b)), 1)
    return _with_rest(problem, inputs, ("torch.mm", lambda: torch.mm(a, b)), 0)


def _grouped(inputs: Inputs) -> Call:
    import torch

    a, b, offsets = inputs["a"], inputs["b"], inputs["offsets"]
    if a.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        try:
            torch._grouped_mm(a, b, offs=offsets)
        except RuntimeError:
            # strides or sizes that it does not take
            pass
        else:
            return "torch._grouped_mm", lambda: torch._grouped_mm(a, b, offs=offsets)
    bounds = itertools.pairwise([0, *offsets.tolist()])
    parts = [(a[start:end], b[i]) for i, (start, end) in enumerate(bounds) if end > start]
    return "a loop of torch.mm", lambda: torch.cat([torch.mm(rows, weight) for rows, weight in parts])


def _quantised(problem: Problem, inputs: Inputs) -> Call:
    import torch

    out_dtype = torch_dtype(problem.out_dtype)
    if problem.a_dtype == "int8":
        return _int8(inputs, out_dtype)
    if problem.scaling in ("tensor", "row", "block128"):
        a, b = inputs["a"], inputs["b"]
        a_scale, b_scale = inputs["a_scale"], inputs["b_scale"]
        if problem.scaling == "row":
            a_scale, b_scale = a_scale[:, None], b_scale[None, :]

        def call() -> torch.Tensor:
            return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, use_fast_accum=True)

        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError):
            # a scaling, layout or size that it does not take: compare with the product in 16 bits
            return _widened(problem, inputs)
        return f"torch._scaled_mm ({problem.scaling})", call
    return _widened(problem, inputs)


def _int8(inputs: Inputs, out_dtype: torch.dtype) -> Call:
    import torch

    a, b = inputs["a"], inputs["b"]
    a_scale, b_scale = inputs["a_scale"], inputs["b_scale"]
    a_scale = a_scale[:, None] if a_scale.dim() else a_scale
    rows = a.shape[0]
    if rows < INT_MM_ROWS:
        a = torch.cat([a, a.new_zeros(INT_MM_ROWS - rows, a.shape[1])])
    return "torch._int_mm+scales", lambda: (torch._int_mm(a, b)[:rows] * a_scale * b_scale).to(out_dtype)


def _widened(problem: Problem, inputs: Inputs) -> Call:
    """The product of operands that were turned into 16-bit ones beforehand: what a user without such a kernel runs."""
    import torch

    dtype = torch_dtype(problem.out_dtype if problem.out_dtype in ("fp16", "bf16") else "bf16")
    a, b = values(problem, inputs, "a").to(dtype), values(problem, inputs, "b").T.contiguous().to(dtype).T
    return "torch.mm (16 bits)", lambda: torch.mm(a, b)
