"""The vendor library's side of an attention: the fastest of torch's own calls that can do it."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.attention.autograd import Call, backward_of
from kernelwright.kernels.attention.flex import flex_calls
from kernelwright.kernels.attention.lengths import sequences
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
"""torch's implementations of scaled_dot_product_attention, by what usually is the fastest on a Hopper GPU."""

FEW_QUERIES = 16
"""Up to so many queries a head, heads that share a key head are also tried as rows of one head."""

TRIES = 5
"""Timed calls of each candidate before one is chosen."""


def vendor_call(p: Problem, inputs: Inputs) -> Call | None:
    """(name, call) of the fastest call that torch has for the problem; None where none runs.

    On a GPU each candidate runs a few times and the fastest is taken; elsewhere nothing can be timed, and it is the
    first that runs. A call makes no logarithm of the denominator, and takes fp8 operands as bf16.
    """
    if 0 in p.out.shape or not p.kv_length:
        return None
    best: tuple[float, Call] | None = None
    for name, call in _candidates(p, inputs):
        time_ms = _try(call, inputs["q"].is_cuda)
        if time_ms is not None and (best is None or time_ms < best[0]):
            best = time_ms, (name, call)
        if best is not None and not inputs["q"].is_cuda:
            break
    return None if best is None else best[1]


def _try(call: Callable[[], Any], on_gpu: bool) -> float | None:
    """Milliseconds of the call (0 where there is no GPU); None when it does not run."""
    import torch

    try:
        call()
        if not on_gpu:
            return 0.0
        times = []
        for _ in range(TRIES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return float(statistics.median(times))
    except (RuntimeError, ValueError, NotImplementedError, TypeError):
        # sizes, types, masks or strides that the backend does not take
        return None


def _candidates(p: Problem, inputs: Inputs) -> Iterator[Call]:
    if p.packed:
        yield from _packed(p, inputs)
        return
    if p.page:
        yield "gather of pages + sdpa", lambda: _paged(p, inputs)
        return
    operands = plain_operands(p, inputs)
    if p.softcap or p.sinks or p.window or p.alibi:
        yield from flex_calls(p, inputs, operands)
    if not (p.softcap or p.sinks):
        yield from _sdpa(p, inputs, operands)


def plain_operands(p: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as torch's attention takes them: fp8 widened to out's type, with their scales."""
    import torch

    if not p.scaling:
        return inputs["q"], inputs["k"], inputs["v"]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[p.out_dtype]
    q, k, v = ((inputs[n].float() * inputs[f"{n}_scale"]).to(dtype) for n in ("q", "k", "v"))
    return q, k, v


def whole_mask(p: Problem, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor | None:
    """Everything that hides keys as one tensor for sdpa: bool, or additive in `dtype` for position biases."""
    import torch

    device = inputs["q"].device
    place = 0 if p.causal == "top_left" else p.kv_length - p.q_length
    rows = place + torch.arange(p.q_length, device=device)[:, None]
    columns = torch.arange(p.kv_length, device=device)[None, :]
    seen: torch.Tensor | None = None
    if p.causal:
        seen = columns <= rows
    if p.window:
        near = columns > rows - p.window
        seen = near if seen is None else seen & near
    if p.mask == "bool":
        seen = inputs["mask"] if seen is None else seen & inputs["mask"]
    added = inputs["mask"] if p.mask == "additive" else None
    if p.alibi:
        slopes = -inputs["alibi"][:, None, None] * (rows - columns).abs()
        added = slopes.to(dtype)[None] if added is None else added + slopes.to(dtype)
    if added is None or seen is None:
        return seen if added is None else added
    return added.masked_fill(~seen, -math.inf)


def _sdpa(p: Problem, inputs: Inputs, operands: tuple[torch.Tensor, ...]) -> Iterator[Call]:
    from torch.nn.attention.bias import causal_lower_right

    square = p.q_length == p.kv_length
    bare = not (p.mask or p.window or p.alibi)
    if bare and p.group > 1 and not p.backward and (p.q_length == 1 or (p.q_length <= FEW_QUERIES and not p.causal)):
        yield from _heads_as_rows(p, inputs, operands)
    if bare and not p.causal:
        yield from _backends(p, inputs, operands, None, False, "")
    elif bare and (square or p.causal == "top_left"):
        yield from _backends(p, inputs, operands, None, True, " causal")
    else:
        if bare and p.q_length == 1:
            # the last query sees every key
            yield from _backends(p, inputs, operands, None, False, "")
            return
        if bare and p.q_length < p.kv_length:
            yield from _backends(
                p, inputs, operands, causal_lower_right(p.q_length, p.kv_length), False, " causal_lower_right"
            )
        mask = whole_mask(p, inputs, operands[0].dtype)
        yield from _backends(p, inputs, operands, mask, False, " with a mask")


def _heads_as_rows(p: Problem, inputs: Inputs, operands: tuple[torch.Tensor, ...]) -> Iterator[Call]:
    """The query heads of a key head as so many queries more, for backends that would copy the keys for each of them."""
    q, k, v = operands
    rows = q.unflatten(1, (k.shape[1], p.group)).flatten(2, 3)
    for name, call in _backends(p, inputs, (rows, k, v), None, False, " heads as rows"):
        yield name, functools.partial(_as_heads, call, p)


def _as_heads(call: Callable[[], Any], p: Problem) -> torch.Tensor:
    out: torch.Tensor = call().unflatten(2, (p.group, p.q_length)).flatten(1, 2)
    return out


def _backends(
    p: Problem, inputs: Inputs, operands: tuple[torch.Tensor, ...], mask: Any, causal: bool, how: str
) -> Iterator[Call]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    for name in BACKENDS:
        backend = getattr(SDPBackend, name)

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Any = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                grouped = q.shape[1] != k.shape[1]
                return sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=p.scale, enable_gqa=grouped)

        title = f"sdpa {name.partition('_')[0].lower()}{how}"
        yield backward_of(title, forward, inputs) if p.backward else (title, functools.partial(forward, *operands))


def _paged(p: Problem, inputs: Inputs) -> torch.Tensor:
    """What a user without such a kernel runs: pages copied into one tensor, then attention with a mask of lengths."""
    import torch

    table = inputs["block_table"].long()
    k, v = (inputs[name][table].flatten(1, 2)[:, : p.kv_length].transpose(1, 2) for name in ("k", "v"))
    lengths = inputs["lengths"]
    columns = torch.arange(p.kv_length, device=k.device)
    seen = (columns < lengths[:, None])[:, None, None, :]
    if p.causal or p.window:
        shift = (lengths - p.q_length)[:, None] if p.causal != "top_left" else lengths.new_zeros(p.batch, 1)
        rows = (shift + torch.arange(p.q_length, device=k.device))[:, None, :, None]
        seen = seen & (columns <= rows) if p.causal else seen
        seen = seen & (columns > rows - p.window) if p.window else seen
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # pages hold NaN behind the last token, and 0 times NaN is NaN
    v = v.nan_to_num()
    return sdpa(inputs["q"], k.nan_to_num(), v, attn_mask=seen, scale=p.scale, enable_gqa=p.group > 1)


def _packed(p: Problem, inputs: Inputs) -> Iterator[Call]:
    if p.softcap or p.sinks or p.window or p.alibi or p.scaling:
        return
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if q.is_cuda and p.causal != "top_left":
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            pass
        else:
            yield from _varlen(p, inputs, varlen_attn)
    if not p.backward:
        yield "sdpa, a sequence at a time", lambda: [_one(p, *parts) for parts in _split(p, q, k, v)]


def _varlen(p: Problem, inputs: Inputs, varlen_attn: Any) -> Iterator[Call]:
    options: dict[str, Any] = {"window_size": (-1, 0)} if p.causal else {}
    options |= {"enable_gqa": True} if p.group > 1 else {}

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        bounds = (inputs["cu_q"], inputs["cu_k"], p.q_length, p.kv_length)
        return varlen_attn(q, k, v, *bounds, scale=p.scale, **options)

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    yield backward_of("varlen_attn", forward, inputs) if p.backward else ("varlen_attn", lambda: forward(q, k, v))


def _split(p: Problem, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k and v of each sequence as [1, H, S, D]."""
    lengths = [list(side) for side in zip(*sequences(p), strict=True)]
    parts = [t.split(lengths[0 if i == 0 else 1]) for i, t in enumerate(tensors)]
    return [tuple(t.transpose(0, 1).unsqueeze(0) for t in one) for one in zip(*parts, strict=True)]


def _one(p: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn.attention.bias import causal_lower_right

    square = q.shape[2] == k.shape[2]
    mask = causal_lower_right(q.shape[2], k.shape[2]) if p.causal == "bottom_right" and not square else None
    causal = bool(p.causal) and mask is None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, attn_mask=mask, is_causal=causal, scale=p.scale, enable_gqa=p.group > 1)
