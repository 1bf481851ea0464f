"""The custom operator kernelwright::matmul, which stands in a compiled graph where one of our kernels runs.

It computes epilogue(a @ b + bias). Whatever a kernel cannot take at run time (an operand that is not aligned as it was
when the kernel was measured, a compiler that refuses it) goes through torch's own product: slower, never wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from typing import Any

import torch

from kernelwright.compiler import prebuild
from kernelwright.compiler.current_device import at_device
from kernelwright.compiler.operands import workload_of
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.reference import activations
from kernelwright.kernels.operator import launch_all
from kernelwright.types import Schedule, Workload

ALIGNMENT = 16
"""Bytes to which the bulk copy engine needs the operands' addresses aligned."""

REACH = 2**0.5
"""By how much a number of rows may differ from the one that a schedule was measured at, as a factor."""

Signature = tuple[torch.Size, tuple[int, ...], torch.Size, tuple[int, ...], torch.dtype, bool]
"""Sizes and strides of a and b, their element type, and whether there is a bias."""

_log = logging.getLogger(__name__)


class _Call:
    """What one place in a graph runs: resolved once, then used at every call."""

    def __init__(self, workload: Workload, schedule: Schedule) -> None:
        self.workload = workload
        self.schedule = schedule
        self.needs_alignment = schedule.template != "pointer" and not schedule.knobs.get("repack", 0)
        self.broken = False

    def launch(self, inputs: dict[str, torch.Tensor], out: torch.Tensor) -> bool:
        """Fill `out`; False when that failed, now or before, which is logged once."""
        if self.broken or (self.needs_alignment and not _aligned(inputs)):
            return False
        try:
            prebuild.wait_for(self.workload, self.schedule)
            launch_all(get_operator("matmul").plan(self.workload, self.schedule, inputs, out))
        except Exception as error:
            self.broken = True
            _log.warning("%s failed on %s and torch computes it instead: %s", self.schedule, self.workload, error)
        return not self.broken


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    schedule_json: str,
    out_dtype: str,
) -> torch.Tensor:
    """epilogue(a [M, K] @ b [K, N] + bias [N]) as a row-major [M, N], by our kernel where it can run.

    epilogue: steps joined by commas, such as "bias,gelu". schedule_json: Schedule.to_json as text, or for a
    number of rows that only a call tells {"device": its slug, "rows": schedules by the number they were measured at}.
    out_dtype: torch's name of the result's element type, "bfloat16"; text, because packages of AOTInductor that torch
    2.11 runs give an operator another type than the one that was written.
    """
    dtype: torch.dtype = getattr(torch, out_dtype)
    out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    signature = (a.shape, a.stride(), b.shape, b.stride(), a.dtype, bias is not None)
    call = _call(signature, epilogue, schedule_json, dtype)
    inputs = {"a": a, "b": b} if bias is None else {"a": a, "b": b, "bias": bias}
    if call is not None and call.launch(inputs, out):
        return out
    return by_torch(a, b, bias, epilogue, dtype)


def by_torch(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """The same by torch's own operators."""
    out = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    for step in epilogue.split(","):
        out = activations()[step](out) if step not in ("", "bias") else out
    return out.to(out_dtype)


@functools.lru_cache(maxsize=4096)
def _call(signature: Signature, epilogue: str, schedule_json: str, out_dtype: torch.dtype) -> _Call | None:
    a_size, a_stride, b_size, b_stride, dtype, has_bias = signature
    a = torch.empty_strided(a_size, a_stride, dtype=dtype, device="meta")
    b = torch.empty_strided(b_size, b_stride, dtype=dtype, device="meta")
    bias = torch.empty(b_size[1], dtype=dtype, device="meta") if has_bias else None
    said = json.loads(schedule_json)
    try:
        workload = workload_of(a, b, bias, tuple(filter(None, epilogue.split(","))), out_dtype)
        schedule = Schedule.from_json(said) if "template" in said else _schedule_for(workload, said)
    except UsageError:
        return None
    if schedule is None:
        return None
    return _Call(workload, schedule)


def _schedule_for(workload: Workload, said: dict[str, Any]) -> Schedule | None:
    """Of schedules by the number of rows that they were measured at, the nearest one; None where none is within REACH,
    or it is not legal for this number."""
    rows, by_rows = workload.dims["M"], said["rows"]
    nearest = min(by_rows, key=lambda measured: abs(math.log2(rows / int(measured))))
    schedule = Schedule.from_json(by_rows[nearest])
    space = get_operator("matmul").space(workload, named_device(said["device"]))
    in_reach = 1 / REACH <= rows / int(nearest) <= REACH
    return schedule if in_reach and not space.why_illegal(schedule) else None


def _aligned(inputs: dict[str, torch.Tensor]) -> bool:
    return inputs["a"].data_ptr() % ALIGNMENT == 0 and inputs["b"].data_ptr() % ALIGNMENT == 0


def _on_cpu(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    schedule_json: str,
    out_dtype: str,
) -> torch.Tensor:
    # Triton, which takes a second to import, is only needed where it may interpret kernels.
    import triton

    if triton.knobs.runtime.interpret:
        return matmul(a, b, bias, epilogue, schedule_json, out_dtype)
    return by_torch(a, b, bias, epilogue, getattr(torch, out_dtype))


def _shape_only(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    schedule_json: str,
    out_dtype: str,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=getattr(torch, out_dtype))


def _defined() -> Any:
    library: Any = torch.library.Library("kernelwright", "DEF")
    library.define(
        "matmul(Tensor a, Tensor b, Tensor? bias, str epilogue, str schedule_json, str out_dtype) -> Tensor",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
    )
    library.impl("matmul", at_device(matmul), "CUDA")
    library.impl("matmul", _on_cpu, "CPU")
    torch.library.register_fake("kernelwright::matmul", _shape_only, lib=library)
    return library


LIBRARY = _defined()
"""Keeps the operator registered as long as this module lives."""

MATMUL = torch.ops.kernelwright.matmul.default
"""The operator, as it stands in graphs."""
