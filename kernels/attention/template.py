"""What attention templates share: a description that needs no triton, and constraints that several of them have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from kernelwright.kernels.attention.workload import Problem, problem_of
from kernelwright.kernels.matmul.template import Knobs, over
from kernelwright.kernels.precision import allowed, on_device, own_precision, typical_error
from kernelwright.kernels.source import source_fingerprint
from kernelwright.kernels.space import Constraint, Knob, KnobSpace
from kernelwright.types import DTYPES, DeviceSpec, Schedule, Workload

SCORES_SHARE = 1.5
"""How much the error of scores adds to that of a result, in errors of one product."""


@dataclasses.dataclass(frozen=True)
class AttentionTemplate:
    """One kernel generator. knobs and constraints are made for a problem on a device; shared gives bytes of a block."""

    name: str
    kernel_module: str
    knobs: Callable[[Problem, DeviceSpec, tuple[str, ...]], Sequence[Knob]]
    constraints: Callable[[Problem, DeviceSpec], Sequence[Constraint]]
    shared: Callable[[Problem, Knobs], int]

    @property
    def fingerprint(self) -> str:
        """Digest of the kernel's source text, helpers included."""
        return source_fingerprint(self.kernel_module)

    def space(self, workload: Workload, device: DeviceSpec) -> KnobSpace:
        """The legal schedules; empty where this template cannot run the workload."""
        return _space(self, workload, device)

    def shared_bytes(self, workload: Workload, schedule: Schedule) -> int:
        """Estimated shared memory of a block in bytes."""
        return self.shared(problem_of(workload), schedule.knobs)


@functools.lru_cache(maxsize=512)
def _space(template: AttentionTemplate, workload: Workload, device: DeviceSpec) -> KnobSpace:
    problem = problem_of(workload)
    precisions = on_device(compute_precisions(problem, workload.error_budget), device)
    fits = Constraint(
        "shared_memory",
        lambda knobs: over(template.shared(problem, knobs), device.shared_memory_bytes, "bytes of shared memory"),
    )
    constraints = [*template.constraints(problem, device), fits]
    return KnobSpace(template.name, template.knobs(problem, device, precisions), constraints)


def score_size(problem: Problem) -> float:
    """The standard deviation of scores of normal operands, where it is above 1: their error grows with it."""
    return max(1.0, abs(problem.scale) * math.sqrt(problem.head_dim))


def compute_precisions(problem: Problem, error_budget: float | None) -> tuple[str, ...]:
    """Compute precisions that the error budget allows, fastest first.

    The error of a score becomes one of its weight, and the highest scores, which weigh most, have the largest: tf32
    was measured to make 1.4e-3 of its 7.8e-4 a product.
    """
    q, out = problem.dtype, problem.out_dtype
    own = own_precision(q, q)
    grows = math.hypot(1.0, SCORES_SHARE * score_size(problem))
    return tuple(
        p
        for p in allowed(q, q, out, error_budget)
        if p == own or error_budget is None or grows * typical_error(p, out, own) <= error_budget
    )


def element_bytes(problem: Problem) -> int:
    """Bytes of an element of q, k and v."""
    return DTYPES[problem.dtype] // 8


def power_above(size: int, least: int = 16) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def head_parts(size: int, split: bool, least: int = 16) -> tuple[int, int]:
    """A head dimension as powers of two: one that covers it, or the largest in it and one that covers the rest.

    (80, split) gives (64, 16); the second is 0 where there is no rest.
    """
    whole = power_above(size, least)
    first = whole // 2
    if not split or whole == size or first < least:
        return whole, 0
    return first, power_above(size - first, least)


def can_split(size: int, least: int = 16) -> bool:
    """Whether two powers of two cover a head dimension with less than one does."""
    return sum(head_parts(size, True, least)) < power_above(size, least)


def least_part(problem: Problem) -> int:
    """The least depth of a product on tensor cores: 16 elements, 32 of 8 bits."""
    return 32 if element_bytes(problem) == 1 else 16


def sections(problem: Problem) -> Knob:
    """How many heads go through their tiles together, the longest rows first: few share their keys in the L2 cache,
    many even out. Without a causal mask all rows are as long."""
    pairs = max(problem.batch * problem.heads, 1)
    fitting = tuple(s for s in (1, 4, 16, 64) if s <= pairs)
    return Knob("section", fitting if problem.causal else (1,), "log2")


def forward_only(problem: Problem) -> Constraint:
    """For templates that compute forwards."""

    def check(knobs: Knobs) -> str | None:
        return "computes forwards" if problem.backward else None

    return Constraint("direction", check)


def multiplies(problem: Problem, device: DeviceSpec) -> Constraint:
    """Matrix units multiply fp8 from sm_89 and gfx950 on (gfx942 has other fp8 types)."""

    def check(knobs: Knobs) -> str | None:
        if element_bytes(problem) > 1:
            return None
        nvidia = device.vendor == "nvidia"
        enough = int(device.architecture.removeprefix("sm_")) >= 89 if nvidia else device.architecture == "gfx950"
        return None if enough else f"{device.architecture} cannot multiply {problem.dtype}"

    return Constraint("operands", check)


def bulk_copy(problem: Problem, device: DeviceSpec, tensors: Sequence[str]) -> Constraint:
    """The bulk copy engine needs an NVIDIA GPU from sm_90 on, 16-byte aligned rows and sizes of at least 1."""

    def check(knobs: Knobs) -> str | None:
        if device.vendor != "nvidia" or int(device.architecture.removeprefix("sm_")) < 90:
            return f"needs the bulk copy engine of sm_90 or later, the device is {device.architecture}"
        if any(0 in getattr(problem, name).shape for name in tensors):
            return "needs sizes of at least 1"
        unaligned = [name for name in tensors if not problem.aligned(name)]
        if unaligned:
            return f"{', '.join(unaligned)} must have a unit stride in the last dimension and all others of 16 bytes"
        return None

    return Constraint("tma", check)
