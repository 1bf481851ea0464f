"""The custom operators kernelwright::attention and kernelwright::attention_backward, the one the gradient of the other.

Schedules are chosen at the first call of each form (see `attention_choice`), or come with the call as text. Whatever a
kernel cannot take at run time goes through torch: slower, never wrong.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from kernelwright.compiler.attention_choice import chooser_of, is_plain, reads_any_address
from kernelwright.compiler.attention_form import Form, Options, empty_like, form_of
from kernelwright.compiler.current_device import at_device
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention import reference
from kernelwright.kernels.attention.workload import problem_of
from kernelwright.kernels.operator import launch_all
from kernelwright.types import Schedule, Workload

TENSORS = ("q", "k", "v", "mask", "sinks", "alibi", "cu_q", "cu_k", "block_table", "lengths")
"""Operands of the forward, by their names in a workload; all after v may be missing."""

_OPERANDS = "Tensor q, Tensor k, Tensor v" + "".join(f", Tensor? {name}" for name in TENSORS[3:])

_OPTIONS = "str causal, SymInt window, float softcap, float? scale, SymInt longest_q, SymInt longest_k"

_log = logging.getLogger(__name__)

Result = torch.Tensor | tuple[torch.Tensor, ...]


class _Call:
    """What one form of call runs: resolved once, then used at every call."""

    def __init__(self, workload: Workload, schedule: Schedule | None) -> None:
        self.workload = workload
        self.problem = problem_of(workload)
        self.schedule = schedule

    def launch(self, inputs: dict[str, torch.Tensor], out: Result) -> bool:
        """Fill `out`; False where there is no kernel, or it failed, now or before, which is logged once."""
        if self.schedule is None:
            return False
        spread = dict(inputs)
        if "mask" in inputs:
            p = self.problem
            spread["mask"] = inputs["mask"].expand(p.batch, p.heads, p.q_length, p.kv_length)
        try:
            launch_all(get_operator("attention").plan(self.workload, self.schedule, spread, out))
        except Exception as error:
            _log.warning("%s failed on %s and torch computes it instead: %s", self.schedule, self.workload, error)
            self.schedule = None
        return self.schedule is not None


def attention(*operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the operator's arguments: TENSORS, options, lse, schedule, backward_schedule. lse is empty unless
    it is wanted, which it must be for gradients."""
    tensors, options, (lse, schedule, _) = _sorted(operands, lse_at=0)
    out, logs = empty_results(tensors["q"], tensors["v"], lse)
    call = _forward_call(form_of(tensors, options), schedule, _where(tensors["q"]))
    if not _is_empty(call) and call.launch(tensors, (out, logs) if lse else out):
        return out, logs
    if not lse and is_plain(call.problem):
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        p = call.problem
        return _laid_out(
            functional.scaled_dot_product_attention(
                q, k, v, is_causal=bool(p.causal), scale=p.scale, enable_gqa=p.group > 1
            ),
            out,
        ), logs
    found, denominators = reference.forward(call.problem, _spread(call, tensors), _computed_in(tensors["q"]))
    return out.copy_(found), logs.copy_(denominators) if lse else logs


def attention_backward(
    d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *operands: Any
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, d_mask, d_sinks); the last two are empty unless they are wanted."""
    tensors, options, (mask_gradient, sinks_gradient, schedule) = _sorted(operands, lse_at=None)
    d_out = _like(d_out, out)
    form = form_of(tensors | {"out": out}, options, mask_gradient=mask_gradient)
    call = _backward_call(form, schedule, _where(out))
    gradients = empty_gradients(tensors, mask_gradient, sinks_gradient)
    results = gradients[:4] if mask_gradient else gradients[:3]
    given = tensors | {"out": out, "lse": lse, "d_out": d_out}
    if _is_empty(call) or not call.launch(given, results):
        exact = reference.backward(call.problem, _spread(call, given), _computed_in(out))
        for gradient, found in zip(results, exact, strict=True):
            gradient.copy_(found.sum_to_size(gradient.shape))
    if sinks_gradient:
        gradients[4].copy_(_of_sinks(tensors["sinks"], d_out, out, lse))
    return gradients


def _of_sinks(sinks: torch.Tensor, d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The gradient of the sinks: a sink's weight has no value of its own, and takes from all others."""
    delta = (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if out.dim() == 3:
        delta = delta.transpose(0, 1)
        return -(torch.exp(sinks[:, None] - lse) * delta).sum(1)
    return -(torch.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))


def empty_results(q: torch.Tensor, v: torch.Tensor, lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) before they are computed."""
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    logs = q.new_empty(shape if lse else (0,), dtype=_computed_in(q))
    return empty_like(q, v.shape[-1]), logs


def empty_gradients(tensors: Mapping[str, torch.Tensor], mask: bool, sinks: bool) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, d_mask, d_sinks) before they are computed."""
    own = [empty_like(x, x.shape[-1]) for x in (tensors["q"], tensors["k"], tensors["v"])]
    nothing = tensors["q"].new_empty((0,))
    given = tensors["mask"].new_empty(tensors["mask"].shape) if mask else nothing
    return (*own, given, torch.empty_like(tensors["sinks"]) if sinks else nothing.clone())


def _sorted(operands: tuple[Any, ...], lse_at: int | None) -> tuple[dict[str, torch.Tensor], Options, tuple[Any, ...]]:
    """The tensors that are there, the options, and the arguments behind them. lse_at: which of these says that the
    logarithms are wanted, None where they are."""
    count = len(TENSORS)
    tensors = {name: x for name, x in zip(TENSORS, operands[:count], strict=True) if x is not None}
    causal, window, softcap, scale, longest_q, longest_k, *rest = operands[count:]
    lse = True if lse_at is None else rest[lse_at]
    return tensors, Options(causal, window, softcap, scale, longest_q, longest_k, lse), tuple(rest)


def _where(tensor: torch.Tensor) -> int | None:
    """The GPU that a tensor lies on; None for a CPU."""
    return tensor.get_device() if tensor.is_cuda else None


@functools.lru_cache(maxsize=4096)
def _forward_call(form: Form, schedule: str, index: int | None) -> _Call:
    workload = form.workload()
    found = _given(schedule, form, index)
    if found is None and index is not None and not (schedule == "" and _is_torchs(workload, index)):
        found = chooser_of(index).schedule(workload)
    return _Call(workload, found)


@functools.lru_cache(maxsize=4096)
def _backward_call(form: Form, schedule: str, index: int | None) -> _Call:
    """Ours even where torch would be as fast, as torch's needs what torch's forward leaves."""
    workload = form.workload(backward=True)
    found = _given(schedule, form, index)
    return _Call(workload, found if found or index is None else chooser_of(index).schedule(workload))


def _is_torchs(workload: Workload, index: int) -> bool:
    return not workload.attributes.get("lse") and chooser_of(index).torch_is_faster([workload])


def _given(schedule: str, form: Form, index: int | None) -> Schedule | None:
    """The schedule that came with the call, unless it cannot take these addresses, or nothing runs kernels here."""
    if not schedule or (index is None and not _interpreting()):
        return None
    found = Schedule.from_json(json.loads(schedule))
    aligned = all(missed == 0 for name, *_, missed in form.tensors if name in ("q", "k", "v"))
    return found if aligned or reads_any_address(found) else None


def _interpreting() -> bool:
    # Triton, which takes a second to import, is only needed where it may interpret kernels.
    import triton

    return bool(triton.knobs.runtime.interpret)


def _is_empty(call: _Call) -> bool:
    return 0 in call.problem.out.shape or not call.problem.kv_length


def _spread(call: _Call, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if "mask" not in tensors:
        return tensors
    p = call.problem
    return tensors | {"mask": tensors["mask"].expand(p.batch, p.heads, p.q_length, p.kv_length)}


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _laid_out(found: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A result where a graph expects it."""
    return found if found.stride() == out.stride() else out.copy_(found)


def _like(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """d_out with the strides of out and an aligned address, which is how a backward gets it."""
    if d_out.stride() == out.stride() and d_out.data_ptr() % 16 == 0:
        return d_out
    return torch.empty_like(out).copy_(d_out)


def _shape_only(*operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options, _ = _sorted(operands, lse_at=0)
    return empty_results(tensors["q"], tensors["v"], options.lse)


def _gradient_shapes(d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *operands: Any) -> Any:
    tensors, _, (mask_gradient, sinks_gradient, _) = _sorted(operands, lse_at=None)
    return empty_gradients(tensors, mask_gradient, sinks_gradient)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = output
    count = len(TENSORS)
    ctx.save_for_backward(out, lse, *inputs[:count])
    ctx.options, ctx.backward_schedule = inputs[count:-3], inputs[-1]
    ctx.mark_non_differentiable(lse)


def _gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, *operands = ctx.saved_tensors
    _check_differentiable(lse, ctx.needs_input_grad, operands)
    mask, sinks = (bool(ctx.needs_input_grad[TENSORS.index(name)]) for name in ("mask", "sinks"))
    found = ATTENTION_BACKWARD(d_out, out, lse, *operands, *ctx.options, mask, sinks, ctx.backward_schedule)
    dq, dk, dv, d_mask, d_sinks = found
    given = [dq, dk, dv, d_mask if mask else None, d_sinks if sinks else None]
    return (*given, *[None] * (len(ctx.needs_input_grad) - len(given)))


def _check_differentiable(lse: torch.Tensor, needed: Sequence[bool], operands: Sequence[Any]) -> None:
    if lse.dim() == 1:
        raise UsageError("gradients of kernelwright::attention need the logarithms; call it with lse=True")
    has = dict(zip(TENSORS, operands, strict=True))
    if needed[TENSORS.index("alibi")]:
        raise UsageError("ALiBi slopes have no gradient here; add them to an additive mask to learn them")
    if has["block_table"] is not None:
        raise UsageError("a paged cache has no gradient; gather the pages first")


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise UsageError("kernelwright::attention has first derivatives only; use torch's own attention for second ones")


def _defined() -> Any:
    library: Any = torch.library.Library("kernelwright", "FRAGMENT")
    tags = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)
    library.define(
        f"attention({_OPERANDS}, {_OPTIONS}, bool lse, str schedule, str backward_schedule) -> (Tensor, Tensor)",
        tags=tags,
    )
    library.define(
        f"attention_backward(Tensor d_out, Tensor out, Tensor lse, {_OPERANDS}, {_OPTIONS}, bool mask_gradient, "
        "bool sinks_gradient, str schedule) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        tags=tags,
    )
    for name, function, shapes in (
        ("attention", attention, _shape_only),
        ("attention_backward", attention_backward, _gradient_shapes),
    ):
        library.impl(name, at_device(function), "CUDA")
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"kernelwright::{name}", shapes, lib=library)
    torch.library.register_autograd("kernelwright::attention", _gradients, setup_context=_remember, lib=library)
    torch.library.register_autograd("kernelwright::attention_backward", _no_second_derivative, lib=library)
    return library


LIBRARY = _defined()
"""Keeps the operators registered as long as this module lives."""

ATTENTION = torch.ops.kernelwright.attention.default
ATTENTION_BACKWARD = torch.ops.kernelwright.attention_backward.default
"""The operators, as they stand in graphs."""
