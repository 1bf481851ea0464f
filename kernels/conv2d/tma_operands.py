"""What the bulk copy engine can read and write of a convolution's tensors, and which of them are copied for it."""

from __future__ import annotations

import math

from kernelwright.kernels.conv2d.template import workspace_of
from kernelwright.kernels.conv2d.workload import TMA_ALIGNMENT, Problem
from kernelwright.kernels.matmul.template import Knobs, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DTYPES, DeviceSpec

MOST_CLASSES = 4
"""Classes of a scattering result that have a descriptor each, so that the engine can write them."""


def repack_knob(problem: Problem) -> Knob:
    """Whether operands are copied to where the engine can read them: a fact of the problem, not a choice."""
    return Knob("repack", (int(bool(copied_operands(problem))),), "category")


def store_knob(problem: Problem) -> Knob:
    """How a result goes out that does not lie as the engine writes it, NCHW: element by element from the tiles, or by
    the engine into an NHWC workspace that is copied then."""
    staged = problem.layouts[problem.result].strides[1] != 1 and _whole(problem, problem.result, 1)
    return Knob("store", ("direct", "copied") if staged else ("direct",), "category")


def tma_constraint(problem: Problem, device: DeviceSpec) -> Constraint:
    """What the engine must be able to do with image and weight, copied where that helps."""
    words = _unfit(problem, device)
    return Constraint("tma", lambda knobs: words)


def copy_constraint(problem: Problem) -> Constraint:
    """The limit on workspaces: copies of operands and of the result, and partial sums."""

    def copies(knobs: Knobs) -> str | None:
        if problem.workspace_bytes is None:
            return None
        needed = copied_bytes(problem, knobs) + (workspace_of(problem, knobs) if "split_k" in knobs else 0)
        return over(needed, problem.workspace_bytes, "bytes of workspace (workspace_bytes)")

    return Constraint("copies", copies)


def copied_bytes(problem: Problem, knobs: Knobs) -> float:
    """Bytes of the copies that a schedule allocates."""
    names = copied_operands(problem) if knobs["repack"] else ()
    if knobs.get("store") == "copied":
        names = (*names, problem.result)
    return sum(math.prod(_room(problem, name)) * DTYPES[problem.dtypes[name]] / 8 for name in names)


def copied_operands(problem: Problem) -> tuple[str, ...]:
    """Operands that the engine, or the tensor cores behind it, cannot read as they lie."""
    image = problem.operands[0]
    repeated = problem.n > 1 and not problem.layouts[image].strides[0]
    ragged = any(problem.shapes[image][2 + axis] % problem.stride[axis] for axis in (0, 1) if splits(problem, axis))
    found = [image] if not problem.aligned(image) or repeated or ragged or _gaps(problem, image) else []
    weight, sizes = problem.layouts["w"], problem.shapes["w"]
    dense = weight.order == "nhwc" or (weight.order == "nchw" and sizes[2:] == (1, 1))
    return (*found, *(() if dense and not weight.offset and not turns_weight(problem) else ("w",)))


def turns_weight(problem: Problem) -> bool:
    """Whether the weight must be copied with the sum's channels innermost: the tensor cores read 16-bit elements in
    either order, others in this one only."""
    return problem.scatters and problem.element_bytes != 2


def splits(problem: Problem, axis: int) -> bool:
    """Whether the taps along an axis meet pixels of several remainders of the stride."""
    taps = (problem.r, problem.s)[axis]
    return not problem.scatters and taps > 1 and problem.dilation[axis] % problem.stride[axis] != 0


def written_by_engine(problem: Problem) -> bool:
    """Whether the engine can write the result where it lies, tile by tile and class by class."""
    classes = math.prod(problem.stride) if problem.scatters else 1
    return problem.aligned(problem.result) and _whole(problem, problem.result, 1) and classes <= MOST_CLASSES


def _unfit(problem: Problem, device: DeviceSpec) -> str | None:
    if device.vendor != "nvidia" or int(device.architecture.removeprefix("sm_")) < 90:
        return f"needs the bulk copy engine of sm_90 or later, the device is {device.architecture}"
    if not problem.n:
        return "needs at least one image"
    # a box of the weight begins at any tap, so that each must fill whole pieces
    place = 0 if turns_weight(problem) else 1
    each = problem.shapes["w"][place] // (problem.groups if place == 0 else 1)
    if each * problem.element_bytes % TMA_ALIGNMENT:
        return f"needs a weight with rows of whole {TMA_ALIGNMENT} bytes, {each} channels are none"
    for axis, size in enumerate(problem.shapes[problem.operands[0]][2:]):
        met = problem.scatters or splits(problem, axis) or -problem.padding[axis] % problem.stride[axis] < size
        if not met:
            return "no pixel of the image is met along an axis: all results lie in the padding"
    return None


def _gaps(problem: Problem, image: str) -> bool:
    """Whether pixels of a row that is read in strides do not follow each other."""
    layout, channels = problem.layouts[image], problem.shapes[image][1]
    return splits(problem, 1) and layout.strides[3] != channels


def _whole(problem: Problem, name: str, place: int) -> bool:
    return problem.shapes[name][place] * DTYPES[problem.dtypes[name]] // 8 % TMA_ALIGNMENT == 0


def _room(problem: Problem, name: str) -> tuple[int, ...]:
    """Sizes of a tensor's copy: channels in whole pieces, rows and columns in whole strides."""
    first, channels, *sizes = problem.shapes[name]
    if name == "w":
        return problem.shapes[name]
    each = TMA_ALIGNMENT * 8 // DTYPES[problem.dtypes[name]]
    if name == problem.operands[0]:
        steps = [step if splits(problem, axis) else 1 for axis, step in enumerate(problem.stride)]
        sizes = [math.ceil(size / step) * step for size, step in zip(sizes, steps, strict=True)]
    return (first, math.ceil(channels / each) * each, *sizes)
