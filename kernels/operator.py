"""What an operator and its templates must offer to be built, searched, timed and served.

Describing (validate, work, space, tolerance) needs neither torch nor triton, so that a service without a GPU stack can
answer and render; running (make_inputs, reference, vendor, plan) imports them when called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

from kernelwright.errors import UsageError
from kernelwright.kernels.precision import rate_tflops
from kernelwright.kernels.space import Space
from kernelwright.types import DTYPES, DeviceSpec, Schedule, Workload

if TYPE_CHECKING:
    import torch

Inputs = dict[str, "torch.Tensor"]

Result = Union["torch.Tensor", tuple["torch.Tensor", ...]]
"""What an operator computes: one tensor, or several, such as the three gradients of attention."""

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""One kernel launch: (jit function, grid, arguments, options such as num_warps); run it with `launch_all`."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The least that any implementation must do: flops (2 a multiply-add) and bytes (inputs once, output once)."""

    flops: float
    bytes: float


class Template(Protocol):
    """One kernel generator of an operator: a kernel file and the space of its knobs."""

    @property
    def name(self) -> str:
        """What schedules of it name as their template."""
        ...

    @property
    def kernel_module(self) -> str:
        """Dotted name of the file that holds the Triton code and `plan`; it needs only torch and triton."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the kernel's source text, helpers included: changes when the code does."""
        ...

    def space(self, workload: Workload, device: DeviceSpec) -> Space:
        """The legal schedules of this template; empty where it cannot run the workload."""
        ...

    def shared_bytes(self, workload: Workload, schedule: Schedule) -> int:
        """Estimate of a block's shared memory in bytes (the compiler has the last word)."""
        ...


class Operator(Protocol):
    """One operator, such as matmul."""

    name: str

    @property
    def templates(self) -> Mapping[str, Template]:
        """Its templates by name."""
        ...

    def validate(self, workload: Workload) -> None:
        """Raise InvalidWorkload or UnsupportedDtype, with what was wanted and what came."""
        ...

    def work(self, workload: Workload) -> Work:
        """The least work."""
        ...

    def compute_precisions(self, workload: Workload) -> tuple[str, ...]:
        """Names in DeviceSpec.peak_tflops that the error budget allows, fastest first."""
        ...

    def space(self, workload: Workload, device: DeviceSpec) -> Space:
        """Every legal schedule of every template."""
        ...

    def default_schedule(self, workload: Workload, device: DeviceSpec) -> Schedule:
        """A safe schedule that builds and runs wherever the operator does."""
        ...

    def tolerance(self, workload: Workload) -> float:
        """The largest relative error (Frobenius norm) with which a result counts as right."""
        ...

    def make_inputs(self, workload: Workload, seed: int, device: str) -> Inputs:
        """Random normal operands with the workload's dtypes and strides. The vendor call and ours get the same."""
        ...

    def empty_output(self, workload: Workload, device: str) -> Any:
        """A Result filled with NaN (integers: the least value), with the workload's strides."""
        ...

    def reference(self, workload: Workload, inputs: Inputs) -> Any:
        """The right Result in fp64."""
        ...

    def vendor(self, workload: Workload, inputs: Inputs) -> tuple[str, Callable[[], Any]] | None:
        """The strongest library call for this workload, with its name; None if no library does it."""
        ...

    def plan(self, workload: Workload, schedule: Schedule, inputs: Inputs, out: Any) -> list[Launch]:
        """The launches that compute the Result `out`; workspaces are allocated here. Works on meta tensors too."""
        ...


def launch_all(launches: list[Launch]) -> None:
    """Run launches in order on the current stream."""
    for kernel, grid, args, options in launches:
        kernel[grid](*args, **options)


def bytes_of(dtype: str) -> float:
    """Bytes of one element of a dtype named in DTYPES."""
    return DTYPES[dtype] / 8


def roofline_us(operator: Operator, workload: Workload, device: DeviceSpec) -> float:
    """Least possible time in microseconds by the device's datasheet rates: the larger of compute and memory time."""
    work = operator.work(workload)
    known = (rate_tflops(p, device.peak_tflops) for p in operator.compute_precisions(workload))
    rates = [rate for rate in known if rate is not None]
    if not rates:
        raise UsageError(
            f"{device.name} has no rate for {', '.join(operator.compute_precisions(workload))}; "
            f"it has {', '.join(device.peak_tflops)}"
        )
    return max(work.flops / (max(rates) * 1e6), work.bytes / (device.bandwidth_gbs * 1e3))
