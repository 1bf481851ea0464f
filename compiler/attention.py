"""Attention as a function with gradients, for eager code and for torch.compile:
`attention(q, k, v, causal=True, window=4096, softcap=30.0)`.

q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], all fp16, bf16 or fp32, with any strides; query head h reads
key head h // (Hq / Hkv). Packed sequences: q [T, Hq, D], k and v [Tk, Hkv, ..] with cu_q and cu_k int32 [B + 1], and
longest_q and longest_k, the longest lengths, which are looked up (that waits for the GPU) where they are not given. A
paged cache, without gradients: k and v [pages, page, Hkv, ..] with block_table and lengths, int32.

causal    True or "bottom_right" (the last query sees every key), or "top_left" (the first query sees the first key)
window    of the keys up to a query's own place, the last so many; 0 for all
softcap   c: a score s becomes c * tanh(s / c); 0 for none
scale     of the scores; 1 / sqrt(D) by default
mask      bool (True is visible) or additive, of a shape that spreads to [B, Hq, Sq, Skv]
sinks     [Hq] a score a head that counts in the denominator alone
alibi     [Hq] slopes
schedule, backward_schedule   Schedule.to_json as text, instead of the choice by records and cost model

A query that sees no key gives zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernelwright.compiler import attention_ops
from kernelwright.compiler.attention_choice import chooser_of
from kernelwright.compiler.attention_form import Options, form_of
from kernelwright.errors import InvalidWorkload


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    longest_q: int = 0,
    longest_k: int = 0,
    block_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    schedule: str = "",
    backward_schedule: str = "",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q @ k^T, masked) @ v with gradients of q, k, v, an additive mask and sinks; or (that, lse), where
    lse is the natural logarithm of the denominator in fp32. The module's docstring tells of the arguments.

    Raises InvalidWorkload or UnsupportedDtype, with what was wanted.
    """
    if (cu_q is None) != (cu_k is None) or (block_table is None) != (lengths is None):
        raise InvalidWorkload("packed sequences need both cu_q and cu_k, a paged cache both block_table and lengths")
    if cu_q is not None and cu_k is not None:
        longest_q, longest_k = longest_q or _longest(cu_q), longest_k or _longest(cu_k)
    tensors = (q, k, v, _four_dimensions(mask, q), sinks, alibi, cu_q, cu_k, block_table, lengths)
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    one_length = cu_q is None and block_table is None and q.shape[2] == k.shape[2]
    options = (_corner(causal, one_length), window, softcap, _scale(scale, q), longest_q, longest_k)
    lse = return_lse or gradients
    if not return_lse and _is_torchs(tensors, Options(*options, lse), schedule + backward_schedule):
        shared = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=scale, enable_gqa=shared)
    out, logarithms = attention_ops.ATTENTION(*tensors, *options, lse, schedule, backward_schedule)
    return (out, logarithms) if return_lse else out


def _corner(causal: bool | str, one_length: bool) -> str:
    """The attribute causal; for as many queries as keys both corners mean the same, and one name finds one record."""
    return "bottom_right" if causal is True or (causal and one_length) else causal or ""


def _scale(scale: float | None, q: torch.Tensor) -> float | None:
    """None for the factor that is the default."""
    return None if scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) < 1e-9 else scale


def _longest(bounds: torch.Tensor) -> int:
    return int(bounds.diff().max().item()) if bounds.numel() > 1 else 0


def _four_dimensions(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask as [B or 1, Hq or 1, Sq or 1, Skv or 1], numbers in the type of q."""
    if mask is None:
        return None
    if mask.dim() > 4:
        raise InvalidWorkload(f"a mask must have at most four dimensions, got {list(mask.shape)}")
    for _ in range(4 - mask.dim()):
        mask = mask.unsqueeze(0)
    return mask if mask.dtype is torch.bool else mask.to(q.dtype)


def _is_torchs(tensors: tuple[torch.Tensor | None, ...], options: Options, schedules: str) -> bool:
    """Whether torch's own attention (and its backward, where logarithms are wanted for that) is at least not known to
    be slower. While a graph is traced nothing is asked: a choice that it could not take back would hold for all sizes.
    """
    q = tensors[0]
    if schedules or q is None or not q.is_cuda or torch.compiler.is_compiling():
        return False
    form = form_of({name: x for name, x in zip(attention_ops.TENSORS, tensors, strict=True) if x is not None}, options)
    workloads = [form.workload(), form.workload(backward=True)] if options.lse else [form.workload()]
    return chooser_of(q.get_device()).torch_is_faster(workloads)
