"""What conv2d templates share: a description that needs no triton, and the constraints that several of them have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from kernelwright.kernels.conv2d.workload import Problem, problem_of
from kernelwright.kernels.matmul.template import Knobs, multiplies, number, over
from kernelwright.kernels.precision import PARTS, allowed, on_device
from kernelwright.kernels.source import source_fingerprint
from kernelwright.kernels.space import Constraint, Knob, KnobSpace
from kernelwright.types import DeviceSpec, Schedule, Workload

LONGEST_SUM = 2**16
"""Products that a tensor core may add up one by one: it cuts every partial sum, which pulls long ones to zero."""

SHORTEST_PART = 128
"""Products that a part of a sum should have at least."""


@dataclasses.dataclass(frozen=True)
class ConvTemplate:
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
def _space(template: ConvTemplate, workload: Workload, device: DeviceSpec) -> KnobSpace:
    problem = problem_of(workload)
    fits = Constraint(
        "shared_memory",
        lambda knobs: over(template.shared(problem, knobs), device.shared_memory_bytes, "bytes of shared memory"),
    )
    constraints = [*template.constraints(problem, device), fits]
    return KnobSpace(template.name, template.knobs(problem, device, precisions_of(workload, device)), constraints)


def precisions_of(workload: Workload, device: DeviceSpec) -> tuple[str, ...]:
    """Compute precisions that the error budget allows and the device has, fastest first."""
    problem = problem_of(workload)
    first, second = (problem.dtypes[name] for name in problem.operands)
    found = allowed(first, second, problem.dtypes[problem.result], workload.error_budget)
    return on_device(found, device)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A convolution as `batch` matrix products of m rows and n columns, with sums of at most k products."""

    m: int
    n: int
    k: int
    batch: int


@functools.lru_cache(maxsize=4096)
def gemm_of(problem: Problem) -> Gemm:
    """Rows are pixels of the result (of one class, where results scatter), columns its channels; for the gradient of a
    weight rows are output channels, columns the taps' input channels and sums run over pixels."""
    p = problem
    inner, outer = p.c // p.groups, p.k // p.groups
    height, width = p.out_size
    if p.result == "w":
        return Gemm(outer, p.r * p.s * inner, p.n * height * width, p.groups)
    if not p.scatters:
        return Gemm(p.n * height * width, outer, p.r * p.s * inner, p.groups)
    height, width = p.shapes[p.result][2:]
    m = p.n * math.ceil(height / p.stride[0]) * math.ceil(width / p.stride[1])
    taps = [
        math.ceil(taps / (step // math.gcd(step, apart)))
        for taps, step, apart in zip((p.r, p.s), p.stride, p.dilation, strict=True)
    ]
    columns, channels = (outer, inner) if p.transposed else (inner, outer)
    return Gemm(m, columns, taps[0] * taps[1] * channels, p.groups * p.stride[0] * p.stride[1])


def power_over(size: int) -> int:
    """The least power of two that is not smaller."""
    result: int = 2 ** math.ceil(math.log2(max(size, 1)))
    return result


def tiles(gemm: Gemm, knobs: Knobs) -> int:
    """How many output tiles there are, over all groups and classes."""
    return gemm.batch * math.ceil(gemm.m / number(knobs, "block_m")) * math.ceil(gemm.n / number(knobs, "block_n"))


def split_choices(gemm: Gemm, device: DeviceSpec, most: int) -> tuple[int, ...]:
    """Values of split_k worth offering: more than 1 only where large tiles cannot fill the device and sums are long, or
    longer than LONGEST_SUM."""
    fewest = gemm.batch * math.ceil(gemm.m / 128) * math.ceil(gemm.n / 128)
    if gemm.k <= LONGEST_SUM and (fewest > 2 * device.multiprocessors or gemm.k < 256):
        return (1,)
    choices = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
    return tuple(s for s in choices if s == 1 or (s <= most and gemm.k // s >= SHORTEST_PART))


def gemm_constraints(problem: Problem, device: DeviceSpec, splits: tuple[int, ...] = (1,)) -> list[Constraint]:
    """Limits of every template that multiplies tiles block_m x block_k and block_k x block_n on the matrix units, with
    the knobs num_warps, num_stages, split_k (of which `splits` are offered) and combine."""
    return [
        *register_constraints(problem, device),
        *_tile_constraints(gemm_of(problem)),
        *split_constraints(problem, device, splits),
    ]


def register_constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    """What the matrix units multiply, and how many accumulators and operands a thread holds."""

    def matrix_units(knobs: Knobs) -> str | None:
        narrow = problem.element_bytes == 1 and number(knobs, "block_k") < 32
        if narrow:
            return "8-bit products need a block_k of 32"
        return multiplies(problem.dtypes[problem.operands[0]], device)

    def accumulator(knobs: Knobs) -> str | None:
        each = number(knobs, "block_m") * number(knobs, "block_n") / (32 * number(knobs, "num_warps"))
        if each < 4:
            return f"a thread holds {each:g} accumulators, fewer than 4: too many warps for the tile"
        return over(each, 128, "accumulator registers a thread") if each > 128 else None

    def wide_operands(knobs: Knobs) -> str | None:
        if problem.element_bytes < 4:
            return None
        if number(knobs, "block_k") > 64:
            return "steps of more than 64 elements of 4 bytes leave too little shared memory for stages"
        # parts of operands, or operands themselves, stand in registers beside the accumulator
        each = number(knobs, "block_m") * number(knobs, "block_n") / (32 * number(knobs, "num_warps"))
        beside = knobs["precision"] in PARTS or knobs["precision"] == "ieee"
        return over(each, 64, "accumulators a thread beside the operands' parts") if beside else None

    return [
        Constraint("matrix_units", matrix_units),
        Constraint("accumulator", accumulator),
        Constraint("wide_operands", wide_operands),
    ]


def _tile_constraints(gemm: Gemm) -> list[Constraint]:
    def oversize(knobs: Knobs) -> str | None:
        for side, size, least in (("block_m", gemm.m, 32), ("block_n", gemm.n, 32), ("block_k", gemm.k, 32)):
            fitting = max(least, power_over(size))
            if number(knobs, side) > fitting:
                return f"{side} {knobs[side]} is more than the problem's {size} needs, {fitting}"
        return None

    def ring(knobs: Knobs) -> str | None:
        steps = math.ceil(max(gemm.k, 1) / (number(knobs, "block_k") * number(knobs, "split_k")))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps of the sum" if stages > max(steps + 1, 2) else None

    def tiny(knobs: Knobs) -> str | None:
        count, area = tiles(gemm, knobs), number(knobs, "block_m") * number(knobs, "block_n")
        largest = min(power_over(gemm.m), 128) * min(max(power_over(gemm.n), 32), 128)
        small = count > 4096 and area < min(8192, largest)
        return f"{count} tiles of {area} elements: larger tiles exist" if small else None

    return [Constraint("oversize", oversize), Constraint("pipeline", ring), Constraint("tiny_tiles", tiny)]


def split_constraints(problem: Problem, device: DeviceSpec, splits: tuple[int, ...] = (1,)) -> list[Constraint]:
    """Limits on split_k, of which `splits` are offered, and on how parts of a sum meet (combine: "parts" or "add")."""
    gemm = gemm_of(problem)

    def split_k(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        if split == 1:
            return None
        programs, steps = tiles(gemm, knobs) * split, gemm.k / (split * number(knobs, "block_k"))
        needed = math.ceil(gemm.k / LONGEST_SUM)
        if split > 2 * needed and programs > 4 * device.multiprocessors + split:
            return f"{programs} programs are more than four waves on {device.multiprocessors} multiprocessors"
        return f"each part has {steps:.1f} steps of the sum, fewer than 2" if steps < 2 else None

    def fill(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        programs, most = tiles(gemm, knobs) * split, splits[-1]
        idle = 4 * programs < device.multiprocessors and 4 * split <= most and gemm.k // (4 * split) >= SHORTEST_PART
        return f"{programs} programs leave most of {device.multiprocessors} multiprocessors idle" if idle else None

    def long_sums(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        each = math.ceil(gemm.k / split)
        if problem.element_bytes == 4 or each <= LONGEST_SUM or split >= splits[-1] > 1:
            return None
        return f"sums of {each} products lose too much on tensor cores; split them into parts of {LONGEST_SUM}"

    def combine(knobs: Knobs) -> str | None:
        if knobs["combine"] == "parts":
            return None
        if number(knobs, "split_k") == 1:
            return "there is nothing to add up"
        if problem.deterministic:
            return "adds parts in the order in which they arrive; the workload asks for a fixed one"
        return None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        return over(workspace_of(problem, knobs), problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        Constraint("split_k", split_k),
        Constraint("fill", fill),
        Constraint("long_sums", long_sums),
        Constraint("combine", combine),
        Constraint("workspace", workspace),
    ]


def workspace_of(problem: Problem, knobs: Knobs) -> float:
    """Bytes of partial sums that a schedule allocates."""
    split = number(knobs, "split_k")
    if split == 1:
        return 0
    return 4.0 * (1 if knobs["combine"] == "add" else split) * math.prod(problem.shapes[problem.result])


def directions(problem: Problem, *wanted: str) -> Constraint:
    """For templates that compute only some of "forward", "transposed", "input_gradient" and "weight_gradient"."""
    kind = "transposed" if problem.transposed else problem.direction
    words = None if kind in wanted else f"computes {', '.join(wanted)}, not {kind}"
    return Constraint("direction", lambda knobs: words)
