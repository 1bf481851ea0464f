"""The custom operator kernelwright::call, which runs a schedule of any operator of ours inside a compiled graph.

Its workload is fixed when the graph is compiled. Whatever the kernel cannot take at run time (an operand that is not
aligned, strides that are not the workload's, a compiler that refuses it) goes through torch: slower, never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernelwright.compiler import prebuild, torch_calls
from kernelwright.compiler.current_device import at_device
from kernelwright.compiler.operands import written_dtype
from kernelwright.errors import InvalidWorkload
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.operator import PORTABLE as PORTABLE_ATTENTION
from kernelwright.kernels.conv2d.operator import PORTABLE as PORTABLE_CONV2D
from kernelwright.kernels.matmul.operator import PORTABLE as PORTABLE_MATMUL
from kernelwright.kernels.operator import launch_all
from kernelwright.types import Schedule, Workload

ALIGNMENT = 16
"""Bytes to which the bulk copy engine needs the addresses of operands aligned."""

UNALIGNED = {"matmul": PORTABLE_MATMUL, "conv2d": PORTABLE_CONV2D, "attention": PORTABLE_ATTENTION}
"""Templates by operator that read operands at any address."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Form:
    """Sizes, strides in elements and type of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """That of a tensor, which may be a fake one."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @classmethod
    def vector(cls, size: int) -> Form:
        """That of a vector in fp32."""
        return cls((size,), (1,), torch.float32)

    def fits(self, other: Form) -> bool:
        """Whether sizes and type are the same, and strides wherever a size is above 1."""
        if other.sizes != self.sizes or other.dtype != self.dtype:
            return False
        pairs = zip(self.sizes, self.strides, other.strides, strict=True)
        return all(size <= 1 or want == got for size, want, got in pairs)

    def seen_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with these strides, where it lies so but for dimensions of size 1; else as it is. Their strides
        say nothing, but a descriptor would refuse some of them, and for a stride of 1 Triton compiles another kernel
        than was measured."""
        fits = tensor.stride() != self.strides and self.fits(Form.of(tensor))
        return tensor.as_strided(self.sizes, self.strides) if fits else tensor

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


@functools.lru_cache(maxsize=4096)
def expected_forms(workload: Workload) -> Mapping[str, Form]:
    """What the operands of a workload look like, by name. Vectors may come in fp32 instead of the result's type."""
    # while a graph is compiled, every tensor would go through the tracing of fake ones
    with _disable_current_modes():
        inputs = get_operator(workload.operator).make_inputs(workload, 0, "meta")
    return {name: Form.of(tensor) for name, tensor in inputs.items()}


@functools.lru_cache(maxsize=4096)
def measured_results(workload: Workload) -> tuple[Form, ...]:
    """What the results of a workload look like where its kernels are measured."""
    with _disable_current_modes():
        found = get_operator(workload.operator).empty_output(workload, "meta")
    return tuple(Form.of(one) for one in (found if isinstance(found, tuple) else (found,)))


def check_operands(workload: Workload, operands: Mapping[str, Form]) -> None:
    """InvalidWorkload unless the workload has these operands, in these sizes and strides."""
    forms = expected_forms(workload)
    if set(forms) != set(operands):
        raise InvalidWorkload(f"operands must be {', '.join(sorted(forms))}, got {', '.join(sorted(operands))}")
    for name, form in forms.items():
        got = operands[name]
        if not (form.fits(got) or _is_precise_vector(form, got)):
            raise InvalidWorkload(f"{name} must be {_told(form)}, got {_told(got)}")


def _told(form: Form) -> str:
    return f"{list(form.sizes)} {str(form.dtype).removeprefix('torch.')} with strides {list(form.strides)}"


def _is_precise_vector(form: Form, other: Form) -> bool:
    """Scales and biases are widened to fp32 by every kernel, so that they may come that way."""
    return len(form.sizes) == 1 and dataclasses.replace(form, dtype=torch.float32).fits(other)


class Call:
    """What one place in a graph runs: resolved once, then used at every call."""

    def __init__(self, names: str, workload: str, schedule: str, results: str) -> None:
        self.names = tuple(names.split(","))
        self.workload = Workload.from_json(json.loads(workload))
        self.schedule = Schedule.from_json(json.loads(schedule))
        self.results = read_forms(results)
        self.forms = expected_forms(self.workload)
        self.operator = get_operator(self.workload.operator)
        self.needs_alignment = self.schedule.template not in UNALIGNED[self.workload.operator]
        self.broken = False

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, by our kernel where it can run."""
        inputs = dict(zip(self.names, operands, strict=True))
        if not self.broken:
            ready = self._ready(inputs)
            if ready is not None:
                outs = [form.empty(operands[0].device) for form in self.results]
                if self._launch(ready, outs):
                    return outs
        found = torch_calls.compute(self.workload, inputs)
        return [laid_out(result, form) for result, form in zip(found, self.results, strict=True)]

    def _ready(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The operands with exactly the strides that the kernel was measured with; None for what it cannot take."""
        ready = {}
        for name, tensor in inputs.items():
            form = self.forms[name]
            if self.needs_alignment and tensor.data_ptr() % ALIGNMENT:
                return None
            if tensor.shape == form.sizes and (len(form.sizes) == 1 or tensor.stride() == form.strides):
                ready[name] = tensor
            elif form.fits(Form.of(tensor)):
                ready[name] = form.seen_in(tensor)
            else:
                return None
        return ready

    def _launch(self, inputs: dict[str, torch.Tensor], outs: list[torch.Tensor]) -> bool:
        """Fill the results; False when that failed, which is logged once and not tried again."""
        try:
            prebuild.wait_for(self.workload, self.schedule)
            written = [form.seen_in(out) for form, out in zip(measured_results(self.workload), outs, strict=True)]
            out = written[0] if len(written) == 1 else tuple(written)
            launch_all(self.operator.plan(self.workload, self.schedule, inputs, out))
        except Exception as error:
            self.broken = True
            _log.warning("%s failed on %s and torch computes it instead: %s", self.schedule, self.workload, error)
        return not self.broken


def laid_out(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """The tensor as the graph expects it."""
    if Form.of(tensor) == form:
        return tensor
    return form.empty(tensor.device).copy_(tensor.view(form.sizes) if tensor.dim() != len(form.sizes) else tensor)


def written_forms(forms: Sequence[Form]) -> str:
    """Forms as text."""
    return json.dumps([[form.sizes, form.strides, written_dtype(form.dtype)] for form in forms])


def read_forms(text: str) -> list[Form]:
    """The forms that `written_forms` wrote."""
    return [Form(tuple(sizes), tuple(strides), getattr(torch, dtype)) for sizes, strides, dtype in json.loads(text)]


@functools.lru_cache(maxsize=4096)
def call_of(names: str, workload: str, schedule: str, results: str) -> Call:
    """The same Call for the same texts."""
    return Call(names, workload, schedule, results)


def call(operands: list[torch.Tensor], names: str, workload: str, schedule: str, results: str) -> list[torch.Tensor]:
    """The results of a schedule of a workload, by our kernel where it can run. names: of the operands, by commas."""
    return call_of(names, workload, schedule, results).run(operands)


def _on_cpu(operands: list[torch.Tensor], names: str, workload: str, schedule: str, results: str) -> list[torch.Tensor]:
    # Triton, which takes a second to import, is only needed where it may interpret kernels.
    import triton

    if triton.knobs.runtime.interpret:
        return call(operands, names, workload, schedule, results)
    place = call_of(names, workload, schedule, results)
    found = torch_calls.compute(place.workload, dict(zip(place.names, operands, strict=True)))
    return [laid_out(result, form) for result, form in zip(found, place.results, strict=True)]


def _shape_only(
    operands: list[torch.Tensor], names: str, workload: str, schedule: str, results: str
) -> list[torch.Tensor]:
    forms = read_forms(results)
    return [operands[0].new_empty_strided(form.sizes, form.strides, dtype=form.dtype) for form in forms]


def _defined() -> Any:
    library: Any = torch.library.Library("kernelwright", "FRAGMENT")
    library.define(
        "call(Tensor[] operands, str names, str workload, str schedule, str results) -> Tensor[]",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
    )
    library.impl("call", at_device(call), "CUDA")
    library.impl("call", _on_cpu, "CPU")
    torch.library.register_fake("kernelwright::call", _shape_only, lib=library)
    return library


LIBRARY = _defined()
"""Keeps the operator registered as long as this module lives."""

CALL = torch.ops.kernelwright.call.default
"""The operator, as it stands in graphs."""
