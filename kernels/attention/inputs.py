"""Random operands of an attention workload, with its types and strides; gaps and what must not be read hold NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernelwright.kernels.attention.layout import Layout, dense_strides
from kernelwright.kernels.attention.lengths import paged_lengths, sequences
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

HIDDEN = 0.15
"""The share of keys that a random mask hides from a query; the first query of a mask with rows sees none at all."""


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of that name."""
    import torch

    return {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp8e4m3": torch.float8_e4m3fn,
        "fp8e5m2": torch.float8_e5m2,
    }[name]


def make_inputs(p: Problem, seed: int, device: str) -> Inputs:
    """Every operand of the problem: random normal numbers, masks, slopes, sinks, lengths and page tables."""
    import torch

    generator = torch.Generator(device=device if device != "meta" else "cpu").manual_seed(seed)
    inputs: Inputs = {name: _random(getattr(p, name), p.dtype, generator, device) for name in ("q", "k")}
    if p.kv_shared:
        inputs["v"] = inputs["k"][..., : p.v_dim]
    else:
        inputs["v"] = _random(p.v, p.dtype, generator, device)
    if p.mask:
        inputs["mask"] = _mask(p, generator, device)
    if p.alibi:
        powers = torch.arange(1, p.heads + 1, dtype=torch.float32, device=device)
        inputs["alibi"] = torch.exp2(-8.0 * powers / max(p.heads, 1))
    if p.sinks:
        inputs["sinks"] = _normal((p.heads,), torch.float32, generator, device)
    if p.packed:
        inputs |= _bounds(p, device)
    if p.page:
        inputs |= _paging(p, inputs, generator, device)
    for name in ("q_scale", "k_scale", "v_scale") if p.scaling else ():
        inputs[name] = _normal((), torch.float32, generator, device).abs_().add_(0.5)
    return inputs | _of_backward(p, inputs, generator, device) if p.backward else inputs


def empty_output(p: Problem, device: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What a kernel writes to, filled with NaN: out, or (out, lse), or (dq, dk, dv), or these and d_mask."""
    import torch

    if not p.backward:
        out = poisoned(p.out, p.out_dtype, device)
        return (out, torch.full(lse_shape(p), math.nan, device=device)) if p.lse else out
    results = [poisoned(gradient_layout(getattr(p, name)), p.dtype, device) for name in ("q", "k", "v")]
    if p.mask_gradient:
        shape = tuple(size if letter in p.mask_dims else 1 for letter, size in zip("bhqk", _mask_sizes(p), strict=True))
        results.append(torch.full(shape, math.nan, dtype=torch_dtype(p.dtype), device=device))
    return tuple(results)


def gradient_layout(layout: Layout) -> Layout:
    """Where the gradient of a tensor lies, without gaps: dense "bhsd" where the tensor does, "bshd" otherwise."""
    shape = layout.shape
    if len(shape) == 3 or (layout.dense and layout.strides == dense_strides(shape)):
        return Layout(shape, dense_strides(shape))
    return Layout(shape, dense_strides(shape, (0, 2, 1, 3)))


def lse_shape(p: Problem) -> tuple[int, ...]:
    """Of the logarithm of the softmax's denominator."""
    return (p.heads, p.total_q) if p.packed else (p.batch, p.heads, p.q_length)


def poisoned(layout: Layout, dtype: str, device: str) -> torch.Tensor:
    """A tensor of that layout in memory full of NaN, some of it behind the last element."""
    import torch

    kind = torch_dtype(dtype)
    length = layout.offset + layout.span + (0 if layout.dense else 64)
    storage = torch.empty(length, dtype=kind, device=device)
    # every 8-bit type of ours has a NaN in the byte 127
    storage = storage.view(torch.uint8).fill_(127).view(kind) if kind.itemsize == 1 else storage.fill_(math.nan)
    return storage.as_strided(layout.shape, layout.strides, layout.offset)


def _random(layout: Layout, dtype: str, generator: torch.Generator, device: str) -> torch.Tensor:
    tensor = poisoned(layout, dtype, device)
    if device == "meta" or tensor.numel() == 0:
        return tensor
    # one write for elements that several places share
    once = [slice(None) if stride else slice(0, 1) for stride in layout.strides]
    places = tensor[tuple(once)]
    if places.dtype.itemsize > 1:
        places.normal_(generator=generator)
    else:
        import torch

        places.copy_(torch.randn(places.shape, device=device, generator=generator).to(tensor.dtype))
    return tensor


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str) -> torch.Tensor:
    import torch

    empty = torch.empty(shape, dtype=dtype, device=device)
    return empty if device == "meta" else empty.normal_(generator=generator)


def _mask_sizes(p: Problem) -> tuple[int, int, int, int]:
    return (p.batch, p.heads, p.q_length, p.kv_length)


def _mask(p: Problem, generator: torch.Generator, device: str) -> torch.Tensor:
    """[B, Hq, Sq, Skv] as a view; dimensions that are not in mask_dims have stride 0."""
    import torch

    sizes = dict(zip("bhqk", _mask_sizes(p), strict=True))
    shape = tuple(sizes[letter] for letter in p.mask_dims)
    kind = torch.bool if p.mask == "bool" else torch_dtype(p.dtype)
    memory = torch.empty(shape, dtype=kind, device=device)
    if device != "meta":
        visible = torch.rand(shape, device=device, generator=generator) >= HIDDEN
        if "q" in p.mask_dims and p.q_length > 1:
            visible.select(p.mask_dims.index("q"), 0).fill_(False)
        if p.mask == "bool":
            memory.copy_(visible)
        else:
            memory.copy_(torch.randn(shape, device=device, generator=generator)).masked_fill_(~visible, -math.inf)
    present = [letter for letter in "bhqk" if letter in p.mask_dims]
    ordered = memory.permute([p.mask_dims.index(letter) for letter in present])
    for place, letter in enumerate("bhqk"):
        ordered = ordered if letter in present else ordered.unsqueeze(place)
    return ordered.expand(_mask_sizes(p))


def _bounds(p: Problem, device: str) -> Inputs:
    """cu_q and cu_k: where each packed sequence begins, and the last one ends."""
    import torch

    lengths = sequences(p)
    out: Inputs = {}
    for name, side in (("cu_q", 0), ("cu_k", 1)):
        bounds = [0]
        for pair in lengths:
            bounds.append(bounds[-1] + pair[side])
        out[name] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return out


def _paging(p: Problem, inputs: Inputs, generator: torch.Generator, device: str) -> Inputs:
    """block_table and lengths; what no sequence reaches in its pages becomes NaN, and so does a page of nobody."""
    import torch

    lengths = paged_lengths(p)
    out: Inputs = {"lengths": torch.tensor(lengths, dtype=torch.int32, device=device)}
    if device == "meta":
        return out | {"block_table": torch.empty((p.batch, p.pages), dtype=torch.int32, device=device)}
    order = torch.randperm(p.batch * p.pages + 1, device=device, generator=generator)
    table = order[: p.batch * p.pages].reshape(p.batch, p.pages).to(torch.int32)
    numbers = table.tolist()
    for name in ("k",) if p.kv_shared else ("k", "v"):
        _spoil(inputs[name], order[-1:].tolist()[0], 0)
        for sequence, length in enumerate(lengths):
            for turn in range(length // p.page, p.pages):
                _spoil(inputs[name], numbers[sequence][turn], max(length - turn * p.page, 0))
    return out | {"block_table": table}


def _spoil(pages: torch.Tensor, page: int, first: int) -> None:
    """NaN from token `first` of a page on."""
    import torch

    part = pages[page, first:]
    nan = torch.full(part.shape, math.nan, device=part.device)
    part.copy_(nan.to(part.dtype))


def _of_backward(p: Problem, inputs: Inputs, generator: torch.Generator, device: str) -> Inputs:
    """out and lse as an exact forward leaves them, and d_out."""
    import torch

    from kernelwright.kernels.attention.reference import forward

    d_out = _random(p.out, p.out_dtype, generator, device)
    out = poisoned(p.out, p.out_dtype, device)
    if device == "meta":
        return {"out": out, "lse": torch.empty(lse_shape(p), device=device), "d_out": d_out}
    exact, lse = forward(p, inputs)
    return {"out": out.copy_(exact), "lse": lse.float(), "d_out": d_out}
