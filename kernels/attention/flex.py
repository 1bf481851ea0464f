"""torch's flex_attention for what its plain attention has no arguments for: soft caps, windows, slopes and sinks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.attention.autograd import Call, backward_of
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch


def flex_calls(p: Problem, inputs: Inputs, operands: tuple[torch.Tensor, ...]) -> Iterator[Call]:
    """flex_attention, compiled on a GPU, with the block mask of causal and window made beforehand."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q = inputs["q"]
    run: Any = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
    sees = _visibility(p)
    sizes = (p.q_length, p.kv_length)
    block_mask = None if sees is None else create_block_mask(sees, None, None, *sizes, device=q.device)
    changes = _score_change(p, inputs)

    def forward(*tensors: torch.Tensor) -> Any:
        return run(
            *tensors,
            score_mod=changes,
            block_mask=block_mask,
            scale=p.scale,
            enable_gqa=p.group > 1,
            return_aux=AuxRequest(lse=True) if p.sinks else None,
        )

    def finished(*tensors: torch.Tensor) -> Any:
        if not p.sinks:
            return forward(*tensors)
        out, more = forward(*tensors)
        share = torch.sigmoid(more.lse - inputs["sinks"][None, :, None])
        return out * share[..., None].to(out.dtype)

    if p.backward:
        yield backward_of("flex_attention", finished, inputs)
    else:
        yield "flex_attention", lambda: finished(*operands)


def _visibility(p: Problem) -> Any:
    """The mask_mod of causal and window; None where every key is visible."""
    if not (p.causal or p.window):
        return None
    place = 0 if p.causal == "top_left" else p.kv_length - p.q_length
    causal, window = bool(p.causal), p.window or p.q_length + p.kv_length

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = j > i + place - window
        return near & (j <= i + place) if causal else near

    return sees


def _score_change(p: Problem, inputs: Inputs) -> Any:
    """The score_mod of soft cap, mask tensor and slopes; None where scores stay as they are."""
    if not (p.softcap or p.mask or p.alibi):
        return None
    import torch

    place = 0 if p.causal == "top_left" else p.kv_length - p.q_length
    cap, mask, slopes = p.softcap, inputs.get("mask"), inputs.get("alibi")

    def change(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap:
            score = cap * torch.tanh(score / cap)
        if mask is not None and mask.dtype == torch.bool:
            score = torch.where(mask[b, h, i, j], score, -float("inf"))
        elif mask is not None:
            score = score + mask[b, h, i, j]
        return score if slopes is None else score - slopes[h] * (i + place - j).abs()

    return change
