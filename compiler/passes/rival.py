"""What our kernel competes with in a graph, which is not always what it was measured against.

A library call with an epilogue was timed with torch running the steps one after the other, or, like a residual that an
addmm adds, in the call. Inductor runs them in one pass over the result, or in none of their own where pointwise steps
follow anyway. Where the operator was measured with fewer steps, too, that time and such a pass are the other half of
the truth, for the library's call and for a kernel of ours alike. And Inductor pads products with unaligned rows, which
older records compare with the library's unpadded call.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch.fx import Node

from kernelwright.compiler.operands import is_static
from kernelwright.compiler.passes.candidate import value_of
from kernelwright.compiler.passes.pointwise import CASTS, VIEWS
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import problem_of
from kernelwright.kernels.operator import roofline_us
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Workload

aten = torch.ops.aten

TENSOR_STEPS = ("residual", "multiply")

REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.mean.default, aten.amax.default, aten.var_mean.correction)

LIBRARY_SHARE = 0.75
"""Share of the roofline that the library reaches on large aligned products (H100 and H200)."""

MEMORY_SHARE = 0.8
"""Share of the memory's speed that a pointwise pass reaches (H100 and H200)."""

LAUNCH_US = 2.0
"""What a kernel takes besides."""

L2_SPEED = 2.0
"""How much faster than memory a pass over a result is that the L2 cache still holds."""


def rival_us(answer: Answer, end: Node, shorter: Sequence[Answer] = ()) -> float | None:
    """Microseconds of what would run instead, the steps up to `end` fused; None where nothing is known.

    shorter: what is known of the same operator with fewer steps (`shorter_forms`). Of the ways to work the time out the
    smallest one counts: the vendor's time less what Inductor saves of it, or its time with fewer steps and a pass for
    the rest.
    """
    if answer.vendor_us is None:
        return None
    apart, padded = steps_apart(answer), _padded_us(answer)
    needed_us = _fused_us(apart, end, answer.device)
    times = [answer.vendor_us - max(0.0, _apart_us(apart, end, answer.device) - needed_us)]
    for one in shorter:
        if one.vendor_us is not None:
            before = steps_apart(one)
            fused_us = _fused_us([*before, *_rest(one.workload, answer.workload)], end, answer.device)
            times.append(one.vendor_us - _apart_us(before, end, answer.device) + fused_us)
    if padded is not None:
        times.append(padded + needed_us)
    return min(times)


def shorter_forms(workload: Workload) -> list[Workload]:
    """The same operator without the steps behind it, and with those in front of the first that reads a tensor of the
    result's size."""
    steps = workload.epilogue
    first = next((place for place, step in enumerate(steps) if step in TENSOR_STEPS), len(steps))
    lengths = {place for place in (0, first) if place < len(steps)}
    return [dataclasses.replace(workload, epilogue=steps[:length]) for length in sorted(lengths)]


def behind_us(shorter: Workload, longer: Workload, end: Node, device: DeviceSpec) -> float:
    """Microseconds that Inductor takes for the steps up to `end` that one form of a place has and a shorter one has
    not."""
    return _fused_us(_rest(shorter, longer), end, device)


def _rest(shorter: Workload, longer: Workload) -> list[str]:
    """The steps of one form that another one lacks."""
    return list((Counter(longer.epilogue) - Counter(shorter.epilogue)).elements())


def _fused_us(steps: Sequence[str], end: Node, device: DeviceSpec) -> float:
    """Microseconds that Inductor takes for steps up to `end` in one pass, one of their own or that of what follows."""
    if not steps:
        return 0.0
    tensors = sum(step in TENSOR_STEPS for step in steps)
    if _goes_on(end):
        return _over_result_us(tensors, end, device)
    return LAUNCH_US + _over_result_us(tensors + 2, end, device)


def _apart_us(steps: list[str], end: Node, device: DeviceSpec) -> float:
    """Microseconds that torch takes for steps up to `end` one after the other."""
    return len(steps) * LAUNCH_US + _over_result_us(passes(steps), end, device)


def _padded_us(answer: Answer) -> float | None:
    """About what an unaligned 16-bit product takes whose operands are padded in the call; None for others, and where
    the record compared with that call."""
    workload = answer.workload
    if workload.operator != "matmul" or "padded" in answer.vendor:
        return None
    problem = problem_of(workload)
    plain = not (problem.batched or problem.groups or problem.scaling) and problem.a_dtype in ("fp16", "bf16")
    unaligned = [name for name in ("a", "b") if not problem.aligned(name)]
    if not plain or not (unaligned or not problem.aligned("out")):
        return None
    sizes = {"a": problem.m * problem.k, "b": problem.k * problem.n, "out": problem.m * problem.n}
    memory_us = 2 * sum(sizes.values()) / (answer.device.bandwidth_gbs * 1e3)
    peak_tflops = answer.device.peak_tflops.get(problem.a_dtype, math.inf)
    arithmetic_us = 2 * problem.m * problem.n * problem.k / (peak_tflops * 1e6)
    if arithmetic_us <= memory_us:
        # Inductor pads what the arithmetic bounds
        return None
    copied = sum(2 * 2 * sizes[name] for name in unaligned)
    try:
        least_us = roofline_us(get_operator("matmul"), workload, answer.device)
    except UsageError:
        return None
    return least_us / LIBRARY_SHARE + _pass_us(copied, answer.device)


def steps_apart(answer: Answer) -> list[str]:
    """The steps that torch ran by themselves behind the vendor's call."""
    _, *apart = answer.vendor.partition(" (")[0].split("+")
    return apart


def passes(steps: list[str]) -> int:
    """How often torch reads or writes a tensor of the result's size to run these steps one after the other; a scale and
    the bias behind it are one step."""
    count = 0
    for place, step in enumerate(steps):
        if step == "bias" and steps[:place][-1:] == ["scale_vec"]:
            continue
        count += 3 if step in TENSOR_STEPS else 2
    return count


def _over_result_us(times: int, end: Node, device: DeviceSpec) -> float:
    """Microseconds of reading or writing the value of `end` so often; none where only a call tells its size."""
    return times * _pass_us(value_of(end).nbytes, device) if times and is_static(value_of(end)) else 0.0


def _pass_us(size_bytes: int, device: DeviceSpec) -> float:
    in_cache = 2 * size_bytes <= device.l2_bytes
    return size_bytes / (MEMORY_SHARE * device.bandwidth_gbs * 1e3) / (L2_SPEED if in_cache else 1.0)


def _goes_on(end: Node) -> bool:
    """Whether whatever uses the value is a pass of Inductor's own, so that the steps before it cost nothing there."""
    return all(_goes_on(user) if user.target in VIEWS or user.target in CASTS else is_fused(user) for user in end.users)


def is_fused(node: Node) -> bool:
    """Whether a node is a pass of Inductor's own over its operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in REDUCTIONS
