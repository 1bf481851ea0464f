"""The attention operator: out = softmax(scale * q @ k^T, masked) @ v, and its gradients."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from kernelwright.errors import IllegalSchedule, NoWorkingSchedule
from kernelwright.kernels.attention import inputs
from kernelwright.kernels.attention.backward import BACKWARD
from kernelwright.kernels.attention.backward_fused import BACKWARD_FUSED
from kernelwright.kernels.attention.backward_warp_specialized import BACKWARD_WARP_SPECIALIZED
from kernelwright.kernels.attention.decode import DECODE
from kernelwright.kernels.attention.decode_warp_specialized import DECODE_WARP_SPECIALIZED
from kernelwright.kernels.attention.forward import FORWARD
from kernelwright.kernels.attention.forward_warp_specialized import FORWARD_WARP_SPECIALIZED
from kernelwright.kernels.attention.lengths import visible_pairs
from kernelwright.kernels.attention.template import AttentionTemplate, compute_precisions, score_size
from kernelwright.kernels.attention.vendor import vendor_call
from kernelwright.kernels.attention.workload import Problem, problem_of
from kernelwright.kernels.operator import Inputs, Launch, Result, Work, bytes_of
from kernelwright.kernels.precision import PRODUCT_ERROR, ROUNDING_ERROR, own_precision
from kernelwright.kernels.space import UnionSpace
from kernelwright.kernels.triton_adapter import with_settled_keys
from kernelwright.types import DeviceSpec, Scalar, Schedule, Workload

TEMPLATES: dict[str, AttentionTemplate] = {
    template.name: template
    for template in (
        FORWARD,
        FORWARD_WARP_SPECIALIZED,
        DECODE,
        DECODE_WARP_SPECIALIZED,
        BACKWARD,
        BACKWARD_FUSED,
        BACKWARD_WARP_SPECIALIZED,
    )
}

PORTABLE = ("forward", "decode", "backward")
"""Templates that run on every GPU, the most general first."""

FACTOR = 2.0
"""FlashAttention's own tests allow a kernel twice the error of an implementation that rounds each of its steps to the
operands' type."""

ROUNDINGS = {"forward": 3, "backward": 5}
"""Steps that such an implementation rounds: scores, weights and result; a backward also rounds both gradients of
scores and weights."""


class AttentionOperator:
    """Implements `kernelwright.kernels.operator.Operator` for attention."""

    name = "attention"
    templates: Mapping[str, AttentionTemplate] = TEMPLATES

    def validate(self, workload: Workload) -> None:
        """Raise InvalidWorkload or UnsupportedDtype, with what was wanted and what came."""
        problem_of(workload)

    def work(self, workload: Workload) -> Work:
        """Two products (five of a backward) over the visible pairs; every operand read once, every result written
        once."""
        p = problem_of(workload)
        each = 3 * p.head_dim + 2 * p.v_dim if p.backward else p.head_dim + p.v_dim
        return Work(2.0 * visible_pairs(p) * each, _bytes(p))

    def compute_precisions(self, workload: Workload) -> tuple[str, ...]:
        """Names of DeviceSpec.peak_tflops that the error budget allows, fastest first."""
        return compute_precisions(problem_of(workload), workload.error_budget)

    def space(self, workload: Workload, device: DeviceSpec) -> UnionSpace:
        """Every legal schedule of every template."""
        return UnionSpace([template.space(workload, device) for template in self.templates.values()])

    def default_schedule(self, workload: Workload, device: DeviceSpec) -> Schedule:
        """A middling schedule of the first portable template that can run the workload."""
        wanted = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2, "section": 1, "head": "pad"}
        wanted |= {"loads": "pointer"}
        portable = [t for name, t in self.templates.items() if name in PORTABLE]
        spaces = (template.space(workload, device).members for template in portable)
        members = next((found for found in spaces if found), None) or self.space(workload, device).members
        if not members:
            raise NoWorkingSchedule(f"no schedule of any template is legal for {workload} on {device.name}")
        return max(members, key=lambda s: (sum(s.knobs.get(name) == value for name, value in wanted.items()), s.key))

    def tolerance(self, workload: Workload) -> float:
        """The largest relative error (Frobenius norm) with which a result counts as right.

        FACTOR times that of an implementation in the operands' precision: independent roundings add up as squares, and
        the error of scores, which a softmax makes one of its weights, grows with their size (their standard deviation
        for normal operands, where it is above 1).
        """
        p = problem_of(workload)
        precision = self.compute_precisions(workload)[0]
        narrowed = ROUNDING_ERROR["bf16"] if precision == "bf16" and p.dtype == "fp32" else ROUNDING_ERROR[p.dtype]
        own = own_precision(p.dtype, p.dtype)
        roundings = ROUNDINGS["backward" if p.backward else "forward"]
        parts = (score_size(p) * PRODUCT_ERROR[precision if own == "ieee" else own], narrowed * math.sqrt(roundings))
        limit = FACTOR * math.hypot(*parts, ROUNDING_ERROR[p.out_dtype])
        return limit if workload.error_budget is None else min(limit, workload.error_budget)

    def make_inputs(self, workload: Workload, seed: int, device: str) -> Inputs:
        """q, k, v and what the attributes ask for, random, with the workload's strides; see `inputs.py`."""
        return inputs.make_inputs(problem_of(workload), seed, device)

    def empty_output(self, workload: Workload, device: str) -> Result:
        """out, (out, lse), or the gradients, filled with NaN."""
        return inputs.empty_output(problem_of(workload), device)

    def reference(self, workload: Workload, operands: Inputs) -> Result:
        """The right answer in fp64."""
        from kernelwright.kernels.attention import reference

        p = problem_of(workload)
        if p.backward:
            return reference.backward(p, operands)
        out, lse = reference.forward(p, operands)
        return (out, lse) if p.lse else out

    def vendor(self, workload: Workload, operands: Inputs) -> tuple[str, Callable[[], Any]] | None:
        """The fastest of torch's attention calls for this workload."""
        return vendor_call(problem_of(workload), operands)

    def plan(self, workload: Workload, schedule: Schedule, operands: Inputs, out: Result) -> list[Launch]:
        """The launches that compute `out`; IllegalSchedule for an unknown template."""
        if schedule.template not in self.templates:
            raise IllegalSchedule(f"template must be one of {', '.join(self.templates)}, got {schedule.template!r}")
        kernel_file = importlib.import_module(self.templates[schedule.template].kernel_module)
        launches: list[Launch] = kernel_file.plan(operands, out, dict(schedule.knobs), plan_attributes(workload))
        return with_settled_keys(launches)


def plan_attributes(workload: Workload) -> dict[str, Scalar]:
    """What a kernel file's `plan` is told besides tensors: the attributes, and the longest of sequences that vary."""
    longest = {"longest_q": workload.dims["Sq"], "longest_k": workload.dims["Skv"]}
    varies = "T" in workload.dims or "page" in workload.dims
    return dict(workload.attributes) | (longest if varies else {})


def _bytes(p: Problem) -> float:
    q, k, v, out = (getattr(p, name).distinct for name in ("q", "k", "v", "out"))
    if p.page:
        # the cache may have more pages than the sequences fill
        k, v = (p.batch * p.kv_heads * p.kv_length * width for width in (p.head_dim, p.v_dim))
    v = 0 if p.kv_shared else v
    each, written = bytes_of(p.dtype), bytes_of(p.out_dtype)
    sizes = dict(zip("bhqk", (p.batch, p.heads, p.q_length, p.kv_length), strict=True))
    mask = math.prod(sizes[letter] for letter in p.mask_dims) * (1 if p.mask == "bool" else each) if p.mask else 0
    rows = math.prod(inputs.lse_shape(p)) * 4
    if p.backward:
        # out and d_out are read as well, and gradients written
        gradients = math.prod(p.q.shape) + math.prod(p.k.shape) + math.prod(p.v.shape)
        mask *= 2 if p.mask_gradient else 1
        return float((q + k + v + gradients) * each + 2 * out * written + rows + mask)
    return float((q + k + v) * each + out * written + mask + (rows if p.lse else 0))


ATTENTION = AttentionOperator()
