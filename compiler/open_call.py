"""The custom operator kernelwright::open_call: a batched product, convolution or attention with a size that only a call
tells, such as a batch. Schedules come with it by the sizes that they were measured at; a call takes the nearest one
that is in reach and legal, and torch computes where there is none.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from kernelwright.compiler import attention_operands, conv2d_operands
from kernelwright.compiler.current_device import at_device
from kernelwright.compiler.kernel_call import Call, Form, check_operands, laid_out, written_forms
from kernelwright.compiler.operands import batched_workload_of
from kernelwright.compiler.ops import REACH
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.types import Schedule, Workload

Operands = Mapping[str, torch.Tensor]
Told = Mapping[str, Any]
"""What the operator is told besides tensors. kind: "bmm", "conv2d" or "attention"; order: the result's dimensions as
they lie in memory, the outermost first. conv2d: geometry (aten.convolution's arguments behind the bias), result (its
sizes but the batch). attention: causal, scale."""

_log = logging.getLogger(__name__)


def sizes_of(operands: Operands, told: Told) -> tuple[int, ...]:
    """The sizes of the result, which may be symbolic."""
    if told["kind"] == "bmm":
        return (*operands["a"].shape[:2], operands["b"].shape[2])
    if told["kind"] == "conv2d":
        return (operands["x"].shape[0], *told["result"])
    return (*operands["q"].shape[:3], operands["v"].shape[3])


def empty_result(operands: Operands, told: Told, device: Any = None) -> torch.Tensor:
    """The result before it is computed."""
    sizes, order = sizes_of(operands, told), told["order"]
    first = next(iter(operands.values()))
    dense = first.new_empty([sizes[place] for place in order], device=device or first.device)
    return dense.permute([order.index(place) for place in range(len(order))])


def workload_of(operands: Operands, told: Told, result: torch.Tensor) -> Workload:
    """What to look up where all sizes are known; UsageError, with the reason, for what no kernel of ours computes."""
    if told["kind"] == "bmm":
        workload = batched_workload_of(operands["a"], operands["b"], None, (), result.dtype)
    elif told["kind"] == "conv2d":
        tensors = {"x": operands["x"], "w": operands["w"], "out": result}
        geometry = conv2d_operands.Geometry.of(told["geometry"])
        epilogue = ("bias",) if "bias" in operands else ()
        workload = conv2d_operands.workload_of(tensors, geometry, "forward", epilogue)
    else:
        call = attention_operands.Call(told["causal"], told["scale"])
        workload = attention_operands.workload_of({**operands, "out": result}, call)
    check_operands(workload, {name: Form.of(tensor) for name, tensor in operands.items()})
    return workload


def by_torch(operands: Operands, told: Told) -> torch.Tensor:
    """The same by torch's own operators."""
    out: torch.Tensor
    if told["kind"] == "bmm":
        out = torch.bmm(operands["a"], operands["b"])
    elif told["kind"] == "conv2d":
        out = torch.ops.aten.convolution(operands["x"], operands["w"], operands.get("bias"), *told["geometry"])
    else:
        q, k, v = (operands[name] for name in ("q", "k", "v"))
        shared = q.shape[1] != k.shape[1]
        options = {"is_causal": told["causal"], "scale": told["scale"], "enable_gqa": shared}
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    return laid_out(out, Form.of(empty_result(operands, told, "meta")))


def nearest(workload: Workload, table: Told) -> Schedule | None:
    """Of schedules by sizes the one that was measured nearest to these; None where none is in reach, or it is not
    legal here. table: the GPU's name as `device`, and `known`, pairs of sizes and schedules."""
    dims, schedule = min(table["known"], key=lambda pair: _distance(workload, pair[0]))
    found = Schedule.from_json(schedule)
    space = get_operator(workload.operator).space(workload, named_device(table["device"]))
    in_reach = _distance(workload, dims) <= math.log2(REACH)
    return found if in_reach and not space.why_illegal(found) else None


def _distance(workload: Workload, dims: Mapping[str, int]) -> float:
    """By how much sizes differ at most, as a power of two."""
    return max(abs(math.log2(size / dims[name])) if size != dims[name] else 0.0 for name, size in workload.dims.items())


@functools.lru_cache(maxsize=4096)
def _call(forms: tuple[Form, ...], names: str, told: str, table: str) -> Call | None:
    operands = {name: form.empty(torch.device("meta")) for name, form in zip(names.split(","), forms, strict=True)}
    result = empty_result(operands, json.loads(told))
    try:
        workload = workload_of(operands, json.loads(told), result)
        schedule = nearest(workload, json.loads(table))
    except UsageError as error:
        _log.info("torch computes what has no kernel: %s", error)
        return None
    if schedule is None:
        return None
    texts = [json.dumps(part.to_json(), sort_keys=True) for part in (workload, schedule)]
    return Call(names, texts[0], texts[1], written_forms([Form.of(result)]))


def open_call(operands: Sequence[torch.Tensor], names: str, told: str, table: str) -> torch.Tensor:
    """The result, by our kernel where one is near enough."""
    call = _call(tuple(map(Form.of, operands)), names, told, table)
    if call is not None:
        return call.run(operands)[0]
    return by_torch(dict(zip(names.split(","), operands, strict=True)), json.loads(told))


def _on_cpu(operands: list[torch.Tensor], names: str, told: str, table: str) -> torch.Tensor:
    # Triton, which takes a second to import, is only needed where it may interpret kernels.
    import triton

    if triton.knobs.runtime.interpret:
        return open_call(operands, names, told, table)
    return by_torch(dict(zip(names.split(","), operands, strict=True)), json.loads(told))


def _shape_only(operands: list[torch.Tensor], names: str, told: str, table: str) -> torch.Tensor:
    return empty_result(dict(zip(names.split(","), operands, strict=True)), json.loads(told))


def _defined() -> Any:
    library: Any = torch.library.Library("kernelwright", "FRAGMENT")
    library.define(
        "open_call(Tensor[] operands, str names, str told, str table) -> Tensor",
        tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
    )
    library.impl("open_call", at_device(open_call), "CUDA")
    library.impl("open_call", _on_cpu, "CPU")
    torch.library.register_fake("kernelwright::open_call", _shape_only, lib=library)
    return library


LIBRARY = _defined()
"""Keeps the operator registered as long as this module lives."""

OPEN_CALL = torch.ops.kernelwright.open_call.default
"""The operator, as it stands in graphs."""
