"""From the tensors of an attention to the Workload that the records are filed under."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch

from kernelwright.compiler.operands import DTYPE_NAMES, fp32_error_budget, sums_in_order
from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.attention.layout import dense_strides
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.types import Workload

ORDERS = {"bhsd": None, "bshd": (0, 2, 1, 3)}
"""Forms of a [B, H, S, D] view by name, with the order of its dimensions in memory."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What an attention is told besides tensors. causal: key j is visible to query i if j <= i, with lower_right if
    j <= i + Skv - Sq. scale None: 1/sqrt(D). lse: its logarithm of the softmax's denominator is wanted. backward: this
    is the gradient's call."""

    causal: bool
    scale: float | None = None
    lse: bool = False
    backward: bool = False
    lower_right: bool = False


def workload_of(tensors: Mapping[str, torch.Tensor], call: Call) -> Workload:
    """The workload of q, k, v, out (all [B, H, S, D]) and, where there is one, a mask that is spread to all scores.

    Fake tensors will do. Raises UnsupportedDtype or InvalidWorkload, with the reason, for what has no workload.
    """
    q, k, v, out = (tensors[name] for name in ("q", "k", "v", "out"))
    if any(tensor.dim() != 4 for tensor in (q, k, v, out)):
        raise InvalidWorkload(f"q, k and v must have four dimensions, got {q.dim()}")
    if any(0 in tensor.shape for tensor in (q, k, v)):
        raise InvalidWorkload(f"there must be something to attend to, got {list(q.shape)} and {list(k.shape)}")
    types = {tensor.dtype for tensor in (q, k, v, out)}
    if len(types) > 1 or q.dtype not in DTYPE_NAMES:
        got = ", ".join(sorted(map(str, types)))
        raise UnsupportedDtype(f"q, k, v and out must all be one of {', '.join(DTYPE_NAMES.values())}, got {got}")
    (batch, heads, q_length, head_dim), (_, kv_heads, kv_length, _) = q.shape, k.shape
    square = q_length == kv_length
    mask = tensors.get("mask")
    return attention_workload(
        batch,
        heads,
        q_length,
        kv_length,
        head_dim,
        DTYPE_NAMES[q.dtype],
        kv_heads=kv_heads,
        v_dim=v.shape[3],
        layout={name: layout_of(tensors[name]) for name in ("q", "k", "v", "out")},
        error_budget=fp32_error_budget(q.dtype),
        # both mean the same for as many queries as keys; one name for them finds one record
        causal=("bottom_right" if square or call.lower_right else "top_left") if call.causal else None,
        scale=None if call.scale is None or math.isclose(call.scale, head_dim**-0.5) else call.scale,
        mask=None if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        mask_dims=None if mask is None else mask_dims(mask),
        lse=call.lse,
        direction="backward" if call.backward else None,
        deterministic=bool(sums_in_order()),
    )


def layout_of(tensor: torch.Tensor) -> str:
    """The layout of a [B, H, S, D] tensor as text."""
    for name, order in ORDERS.items():
        pairs = zip(tensor.shape, tensor.stride(), dense_strides(tensor.shape, order), strict=True)
        if all(size <= 1 or got == want for size, got, want in pairs):
            return name
    return f"strided:{','.join(map(str, tensor.stride()))}"


def mask_dims(mask: torch.Tensor) -> str:
    """The letters of the dimensions that a mask [B, Hq, Sq, Skv] has, the outermost in memory first; all others repeat.

    InvalidWorkload for a mask that is one number.
    """
    strides = mask.stride()
    there = [place for place in range(4) if mask.shape[place] > 1 and strides[place]]
    if not there:
        raise InvalidWorkload("a mask must differ between keys, queries, heads or batch entries")
    return "".join("bhqk"[place] for place in sorted(there, key=lambda place: -strides[place]))
