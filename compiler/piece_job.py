"""What the process does that times pieces of graphs: compiles a piece with Inductor, as it is and with kernels of ours
in it, compares the results, and times all of them in turns.

Runs in a process of its own, as tuning does: a kernel that faults or hangs takes only that down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from kernelwright.compiler.passes.forms import ONE, Option, put_in
from kernelwright.compiler.piece import Piece
from kernelwright.kernels import triton_adapter
from kernelwright.search.timing import FINAL, Effort, Timer, median, noise_band

WARM_UP = 3
"""Calls before anything is recorded: the first ones compile kernels."""

ALLOWED = {torch.float32: 2e-3, torch.float64: 1e-6}
"""Relative difference (Frobenius norm) between both ways, by type of result; both may use TF32."""

ALLOWED_16_BIT = 3e-2
"""The same for narrower results, and for whatever is computed from those that an operator of the piece gives."""

AS_IN_GRAPHS: Mapping[str, Any] = {"fx_graph_cache": False, "triton.cudagraphs": False}

AS_THEY_LIE: Mapping[str, Any] = {**AS_IN_GRAPHS, "layout_optimization": False}
"""A convolution by itself gets the layouts of its operands converted where those of a whole graph might not be."""


@dataclasses.dataclass(frozen=True)
class PieceJob:
    """Time a piece with each of the options in it, by their keys."""

    text: str
    options: Mapping[str, Option]
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class PieceReply:
    """Microseconds of a piece by Inductor alone, and by key of the option in it; why an option failed; the noise."""

    theirs_us: float
    ours_us: Mapping[str, float]
    failures: Mapping[str, str]
    noise: float


class Times(Protocol):
    """The part of a Timer that is needed here."""

    def samples(self, calls: Sequence[Callable[[], Any]], effort: Effort) -> list[list[float]]:
        """Readings in microseconds, one list a call."""
        ...


def start(device_index: int, l2_bytes: int) -> Callable[[PieceJob | None], PieceReply | None]:
    """Called once in the process: takes the GPU and returns the function that does the jobs; None warms it up."""
    triton_adapter.settle_compiler()
    torch.cuda.set_device(device_index)
    timer = Timer(l2_bytes)
    device = f"cuda:{device_index}"
    return lambda job: warm_up(device) if job is None else measure(job, timer, device)


def warm_up(device: str) -> None:
    """Compile something small, so that Inductor and its own processes are there when the first piece comes."""
    small = torch.fx.symbolic_trace(lambda x: (torch.relu(x) + 1,))
    _ready(small, [torch.zeros(16, 16, device=device)], AS_IN_GRAPHS)


def measure(job: PieceJob, timer: Times, device: str) -> PieceReply:
    """Do a job on a device."""
    piece = Piece(job.text)
    inputs = piece.inputs(device, job.seed)
    theirs = [_ready(piece.graph(device)[0], inputs, AS_IN_GRAPHS)]
    if "convolution" in str(piece):
        theirs.append(_ready(piece.graph(device)[0], inputs, AS_THEY_LIE))
    wanted, narrow = theirs[0](), _is_narrow(piece, device)
    ours: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for key, option in job.options.items():
        try:
            graph, anchors = piece.graph(device)
            put_in(graph.graph, anchors, option)
            graph.recompile()
            call = _ready(graph, inputs, AS_IN_GRAPHS)
            reason = _differs(call(), wanted, option.kind == ONE, narrow)
        except torch.OutOfMemoryError:
            # whoever holds the memory now, it says nothing about the kernel
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            failures[key] = reason.splitlines()[0]
        else:
            ours[key] = call
    readings = timer.samples([*theirs, theirs[0], *ours.values()], _effort(len(theirs) + 1 + len(ours)))
    control, again = readings[0], readings[len(theirs)]
    behind = readings[len(theirs) + 1 :]
    return PieceReply(
        round(min(map(median, readings[: len(theirs)])), 3),
        {key: round(median(samples), 3) for key, samples in zip(ours, behind, strict=True)},
        failures,
        noise_band(control, again),
    )


def _ready(graph: GraphModule, inputs: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> Callable[[], Any]:
    """A call of the graph as Inductor compiles it, warmed up."""
    # Inductor, which takes seconds to import, is only needed here
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = compile_fx(graph, list(inputs), config_patches=dict(settings))

    def call() -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    for _ in range(WARM_UP):
        call()
    return call


def _is_narrow(piece: Piece, device: str) -> bool:
    """Whether an operator of the piece gives numbers of less than 32 bits: a kernel that takes in the steps behind it
    rounds at another place."""
    values = [value for anchor in piece.graph(device)[1] for value in _tensors(anchor.meta["val"])]
    return any(value.dtype.itemsize < 4 for value in values)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in (value if isinstance(value, tuple | list) else (value,)) if isinstance(one, torch.Tensor)]


def _differs(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], same_order: bool, narrow: bool) -> str:
    """How results differ by more than their types allow, or "". same_order: they must lie alike, too. narrow: see
    `_is_narrow`."""
    for place, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        alike = (got.shape, got.dtype) == (want.shape, want.dtype)
        if not alike or (same_order and got.stride() != want.stride()):
            return f"result {place} comes in another form"
        one, other = (value.nan_to_num().double() for value in (got, want))
        error = float((one - other).norm() / other.norm().clamp_min(1e-30))
        if error > (ALLOWED_16_BIT if narrow else ALLOWED.get(want.dtype, ALLOWED_16_BIT)):
            return f"result {place} differs by {error:.2g}"
    return ""


def _effort(contenders: int) -> Effort:
    """That of the final round of a search, with fewer rounds when many take part."""
    return dataclasses.replace(FINAL, rounds=max(9, FINAL.rounds - 2 * max(0, contenders - 5)))
