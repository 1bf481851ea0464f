"""What matmul templates share: a description that needs no triton, and the constraints that several of them have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

from kernelwright.kernels.matmul.workload import TMA_ALIGNMENT, Problem, problem_of
from kernelwright.kernels.precision import allowed, on_device
from kernelwright.kernels.source import source_fingerprint
from kernelwright.kernels.space import Constraint, Knob, KnobSpace
from kernelwright.types import DTYPES, DeviceSpec, Scalar, Schedule, Workload

Knobs = Mapping[str, Scalar]

MOST_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class MatmulTemplate:
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
def _space(template: MatmulTemplate, workload: Workload, device: DeviceSpec) -> KnobSpace:
    problem = problem_of(workload)
    found = allowed(problem.a_dtype, problem.b_dtype, problem.out_dtype, workload.error_budget)
    precisions = on_device(found, device)
    fits = Constraint(
        "shared_memory",
        lambda knobs: over(template.shared(problem, knobs), device.shared_memory_bytes, "bytes of shared memory"),
    )
    constraints = [*template.constraints(problem, device), *_common(problem), fits]
    return KnobSpace(template.name, template.knobs(problem, device, precisions), constraints)


def over(needed: float, limit: float, what: str) -> str | None:
    """The words for a limit that is broken, or None."""
    return f"needs {needed:g} {what}, the device has {limit:g}" if needed > limit else None


def number(knobs: Knobs, name: str) -> int:
    """A knob that holds a whole number."""
    return int(knobs[name])


def element_bytes(problem: Problem) -> int:
    """Bytes of an element of a and b."""
    return DTYPES[problem.a_dtype] // 8


def tiles(problem: Problem, knobs: Knobs) -> int:
    """How many output tiles there are, over all matrices of a batch."""
    columns = math.ceil(problem.out_n / number(knobs, "block_n"))
    return problem.batch * math.ceil(problem.m / number(knobs, "block_m")) * columns


def split_choices(problem: Problem, device: DeviceSpec, smallest_tile: int) -> tuple[int, ...]:
    """Values of split_k worth offering: more than 1 only where the tiles cannot fill the device and K is long."""
    fewest = problem.batch * math.ceil(problem.m / smallest_tile) * math.ceil(problem.out_n / 256)
    if fewest > 2 * device.multiprocessors or problem.k < 512:
        return (1,)
    return tuple(s for s in (1, 2, 3, 4, 6, 8, 12, 16, 24, MOST_SPLITS) if s == 1 or problem.k // s >= 128)


def split_constraint(problem: Problem, device: DeviceSpec) -> Constraint:
    """Split-K must add work for idle multiprocessors and leave every part at least two steps."""

    def check(knobs: Knobs) -> str | None:
        split = number(knobs, "split_k")
        if split == 1:
            return None
        programs, steps = tiles(problem, knobs) * split, problem.k / (split * number(knobs, "block_k"))
        if programs > 4 * device.multiprocessors + split:
            return f"{programs} programs are more than four waves on {device.multiprocessors} multiprocessors"
        return f"each part has {steps:.1f} steps along K, fewer than 2" if steps < 2 else None

    return Constraint("split_k", check)


def workspace_of(problem: Problem, knobs: Knobs) -> float:
    """Bytes that a schedule allocates besides the operands: partial sums, and copies of operands that are repacked."""
    split = number(knobs, "split_k")
    parts = 1 if knobs.get("combine") == "add" else split
    partial = 4 * parts * problem.batch * problem.m * problem.n if split > 1 else 0
    if not knobs.get("repack"):
        return partial
    sides = {"a": problem.m, "b": problem.n}
    return partial + sum(
        problem.batch * side * (problem.k + 64) * element_bytes(problem)
        for tensor, side in sides.items()
        if not problem.aligned(tensor) or needs_turning(problem, tensor)
    )


def needs_turning(problem: Problem, tensor: str) -> bool:
    """Whether the tensor cores cannot read "a" or "b" in its order: operands of other than 16 bits must lie along K."""
    along_k = {"a": "row", "b": "col"}[tensor]
    return element_bytes(problem) != 2 and getattr(problem, tensor).order != along_k


def plain_constraint(problem: Problem, device: DeviceSpec, batched: bool = True) -> Constraint:
    """For templates that multiply single products (batches too when `batched`) of operands without group scales."""

    def check(knobs: Knobs) -> str | None:
        if problem.groups or (problem.batched and not batched):
            return "computes single products" + (" and batches" if batched else "")
        if problem.scaling not in ("", "tensor", "row"):
            return f"has no way to apply scaling {problem.scaling}"
        return multiplies(problem.a_dtype, device)

    return Constraint("plain", check)


def order_constraint(problem: Problem) -> Constraint:
    """For templates that take `group_m` rows of tiles together: no more of them than there are, or 4."""

    def check(knobs: Knobs) -> str | None:
        rows = -(-problem.m // number(knobs, "block_m"))
        wide = number(knobs, "group_m") > max(4, rows)
        return f"group_m {knobs['group_m']} for {rows} rows of tiles" if wide else None

    return Constraint("order", check)


def multiplies(dtype: str, device: DeviceSpec) -> str | None:
    """Why a device's matrix units cannot multiply a type; None when they can."""
    if not dtype.startswith("fp8"):
        return None
    enough = device.architecture in ("gfx950",) or (
        device.vendor == "nvidia" and int(device.architecture.removeprefix("sm_")) >= 89
    )
    return None if enough else f"{device.architecture} cannot multiply {dtype}"


def _common(problem: Problem) -> list[Constraint]:
    def accumulator(knobs: Knobs) -> str | None:
        tile = number(knobs, "block_m") * number(knobs, "block_n") * (2 if problem.paired else 1)
        each = tile / (32 * number(knobs, "num_warps"))
        if each < 4:
            return f"a thread holds {each:g} accumulators, fewer than 4: too many warps for the tile"
        return over(each, 128, "accumulator registers a thread") if each > 128 else None

    def oversize(knobs: Knobs) -> str | None:
        for side, size, least in (
            ("block_m", problem.m, 16),
            ("block_n", problem.out_n, 32),
            ("block_k", problem.k, 32),
        ):
            fitting = max(least, 2 ** math.ceil(math.log2(max(size, 1))))
            if number(knobs, side) > fitting:
                return f"{side} {knobs[side]} is more than the problem's {size} needs, {fitting}"
        return None

    def ring(knobs: Knobs) -> str | None:
        steps = math.ceil(max(problem.k, 1) / (number(knobs, "block_k") * number(knobs, "split_k")))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {steps} steps along K" if stages > max(steps + 1, 2) else None

    def tiny(knobs: Knobs) -> str | None:
        count, area = (
            tiles(problem, knobs) // max(problem.batch, 1),
            number(knobs, "block_m") * number(knobs, "block_n"),
        )
        return f"{count} tiles of {area} elements: larger tiles exist" if count > 4096 and area < 8192 else None

    def workspace(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        return over(workspace_of(problem, knobs), problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return [
        Constraint("workspace", workspace),
        Constraint("accumulator", accumulator),
        Constraint("oversize", oversize),
        Constraint("pipeline", ring),
        Constraint("tiny_tiles", tiny),
    ]


def tma_constraint(problem: Problem, device: DeviceSpec, tensors: Sequence[str]) -> Constraint:
    """The bulk copy engine needs an NVIDIA GPU from sm_90 on, non-empty operands and 16-byte aligned rows."""

    def check(knobs: Knobs) -> str | None:
        if device.vendor != "nvidia" or int(device.architecture.removeprefix("sm_")) < 90:
            return f"needs the bulk copy engine of sm_90 or later, the device is {device.architecture}"
        if not (problem.m and problem.out_n and problem.k and problem.batch):
            return "needs sizes of at least 1"
        if any(getattr(problem, name).order == "strided" for name in tensors):
            return "needs a unit stride in each operand"
        if problem.paired and problem.b.order == "row" and problem.out_n * element_bytes(problem) % TMA_ALIGNMENT:
            return "the right half of b's columns does not begin at a multiple of 16 bytes"
        unaligned = [name for name in tensors if not problem.aligned(name)]
        if unaligned and not knobs.get("repack"):
            return f"leading stride of {', '.join(unaligned)} is not a multiple of 16 bytes; repack=1 copies it"
        return None

    return Constraint("tma", check)
