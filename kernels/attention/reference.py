"""The right answer of an attention in fp64, forward and backward, piece by piece so that long sequences fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kernelwright.kernels.attention.lengths import paged_lengths
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

PIECE = 2**25
"""The most scores, or elements of keys and values, that are worked on at once: 256 MiB of fp64."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some batch entries, query heads and queries with all of their keys.

    q [b, h, r, D], k [b, h, keys, D], v [b, h, keys, Dv]: in the type that is computed in. place: of the first query
    among the keys. mask, slopes, sinks: their parts, or None. where: indices into out [B, Hq, Sq, Dv] (packed: of the
    sequence's view).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    place: int
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    where: tuple[slice, slice, slice]


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Sequences of one length: q [b, Hq, Sq, D], k and v [b, Hkv, Skv, ..] as they are, and views of results."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor | None = None
    gradients: tuple[torch.Tensor, ...] = ()


def forward(p: Problem, inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp64: out [B, Hq, Sq, Dv] and lse [B, Hq, Sq], packed [T, Hq, Dv] and [Hq, T].

    dtype: compute in another floating-point type, whose results are no reference.
    """
    import torch

    q, dtype = inputs["q"], dtype or torch.float64
    out = torch.zeros(p.out.shape, dtype=dtype, device=q.device)
    shape = (p.heads, p.total_q) if p.packed else (p.batch, p.heads, p.q_length)
    lse = torch.full(shape, -math.inf, dtype=dtype, device=q.device)
    for batch in _batches(p, inputs, out, lse):
        for piece in _pieces(p, inputs, batch):
            weights, denominator, _ = _weights(p, piece)
            batch.out[piece.where] = (weights @ piece.v) * _scale_of(inputs, "v_scale")
            batch.lse[piece.where] = denominator
    return out, lse


def backward(p: Problem, inputs: Inputs, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) in fp64, and d_mask [the mask's sizes, 1 where it repeats] with mask_gradient. dtype: as in
    `forward`."""
    import torch

    out, lse = forward(p, inputs, dtype)
    gradients = [torch.zeros(inputs[n].shape, dtype=out.dtype, device=out.device) for n in ("q", "k", "v")]
    kept = [i for i, letter in enumerate("bhqk") if letter in p.mask_dims]
    if p.mask_gradient:
        shape = tuple(size if i in kept else 1 for i, size in enumerate(inputs["mask"].shape))
        gradients.append(torch.zeros(shape, dtype=out.dtype, device=out.device))
    for batch in _batches(p, inputs, out, lse, tuple(gradients[:3])):
        dq, dk, dv = batch.gradients
        for piece in _pieces(p, inputs, batch):
            assert batch.d_out is not None
            weights, _, slope = _weights(p, piece)
            d_out = batch.d_out[piece.where].to(out.dtype)
            delta = (d_out * batch.out[piece.where]).sum(-1, keepdim=True)
            d_scores = weights * (d_out @ piece.v.transpose(-1, -2) - delta)
            if p.mask_gradient:
                over = [i for i in range(4) if i not in kept]
                part = d_scores.sum(over, keepdim=True) if over else d_scores
                spots = tuple(s if i in kept else slice(None) for i, s in enumerate((*piece.where, slice(None))))
                gradients[3][spots] += part
            d_raw = d_scores * slope * p.scale
            dq[piece.where] += d_raw @ piece.k
            heads = torch.arange(p.heads, device=out.device)[piece.where[1]] // p.group
            dk[piece.where[0]].index_add_(1, heads, d_raw.transpose(-1, -2) @ piece.q)
            dv[piece.where[0]].index_add_(1, heads, weights.transpose(-1, -2) @ d_out)
    return tuple(gradients)


def _scale_of(inputs: Inputs, *names: str) -> float:
    """The product of those scales that there are."""
    return math.prod(inputs[name].item() for name in names if name in inputs)


def _batches(
    p: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, gradients: tuple[torch.Tensor, ...] = ()
) -> Iterator[_Batch]:
    """The whole batch where all sequences have one length, otherwise one sequence after the other."""
    q, k, v, d_out = inputs["q"], inputs["k"], inputs["v"], inputs.get("d_out")
    if p.packed:
        queries, keys = inputs["cu_q"].tolist(), inputs["cu_k"].tolist()
        for turn in range(p.batch):
            mine, theirs = slice(queries[turn], queries[turn + 1]), slice(keys[turn], keys[turn + 1])

            def view(tensor: torch.Tensor, part: slice) -> torch.Tensor:
                return tensor[part].transpose(0, 1).unsqueeze(0)

            parts = tuple(view(t, s) for t, s in zip(gradients, (mine, theirs, theirs), strict=False))
            yield _Batch(
                view(q, mine),
                view(k, theirs),
                view(v, theirs),
                None,
                view(out, mine),
                lse[:, mine].unsqueeze(0),
                None if d_out is None else view(d_out, mine),
                parts,
            )
    elif p.page:
        lengths = inputs["lengths"].tolist() if "lengths" in inputs else paged_lengths(p)
        for turn, length in enumerate(lengths):
            pages = inputs["block_table"][turn].long()
            keys_of, values_of = (
                t[pages].reshape(-1, *t.shape[2:])[:length].transpose(0, 1).unsqueeze(0) for t in (k, v)
            )
            one = slice(turn, turn + 1)
            mask = inputs["mask"][one, :, :, :length] if p.mask else None
            yield _Batch(q[one], keys_of, values_of, mask, out[one], lse[one])
    else:
        yield _Batch(q, k, v, inputs.get("mask"), out, lse, d_out, gradients)


def _pieces(p: Problem, inputs: Inputs, batch: _Batch) -> Iterator[_Piece]:
    count, heads, queries, _ = batch.q.shape
    keys = batch.k.shape[2]
    scale = _scale_of(inputs, "q_scale", "k_scale")
    place = 0 if p.causal == "top_left" else keys - queries
    steps = _steps(count, heads, queries, keys, batch.k.shape[3] + batch.v.shape[3])
    for b in range(0, count, steps[0]):
        for h in range(0, heads, steps[1]):
            for r in range(0, queries, steps[2]):
                where = (slice(b, b + steps[0]), slice(h, h + steps[1]), slice(r, r + steps[2]))
                q = batch.q[where].to(batch.out.dtype) * scale
                mine = [(h + turn) // p.group for turn in range(q.shape[1])]
                k, v = (t[where[0]][:, mine].to(q.dtype) for t in (batch.k, batch.v))
                slopes, sinks = (inputs[n][where[1]].to(q.dtype) if n in inputs else None for n in ("alibi", "sinks"))
                mask = None if batch.mask is None else batch.mask[where]
                yield _Piece(q, k, v, place + r, mask, slopes, sinks, where)


def _steps(count: int, heads: int, queries: int, keys: int, width: int) -> tuple[int, int, int]:
    """How many batch entries, heads and queries make a piece. width: of a key and a value together, which every query
    head has its own copy of here."""
    row = max(keys, 1)
    head = row * max(queries, width)
    if heads * head <= PIECE:
        return max(1, PIECE // max(heads * head, 1)), max(heads, 1), max(queries, 1)
    if head <= PIECE:
        return 1, PIECE // head, max(queries, 1)
    return 1, 1, max(1, PIECE // row)


def _weights(p: Problem, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """(softmax weights [b, h, r, keys], logarithm of the denominator [b, h, r], derivative of the soft cap)."""
    import torch

    scores = piece.q @ piece.k.transpose(-1, -2) * p.scale
    slope: torch.Tensor | float = 1.0
    if p.softcap:
        capped = torch.tanh(scores / p.softcap)
        slope, scores = 1.0 - capped.square(), capped * p.softcap
    if piece.mask is not None:
        hidden = p.mask == "bool"
        scores = scores.masked_fill(~piece.mask, -math.inf) if hidden else scores + piece.mask.to(scores.dtype)
    rows = piece.place + torch.arange(scores.shape[2], device=scores.device)[:, None]
    columns = torch.arange(scores.shape[3], device=scores.device)[None, :]
    if piece.slopes is not None:
        scores = scores - piece.slopes[:, None, None] * (rows - columns).abs()
    if p.causal:
        scores = scores.masked_fill(columns > rows, -math.inf)
    if p.window:
        scores = scores.masked_fill(columns <= rows - p.window, -math.inf)
    terms = scores
    if piece.sinks is not None:
        extra = piece.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        terms = torch.cat([scores, extra], -1)
    if terms.shape[-1]:
        denominator = torch.logsumexp(terms, -1)
    else:
        denominator = torch.full(scores.shape[:3], -math.inf, dtype=scores.dtype, device=scores.device)
    # a query that sees nothing has no weights, rather than the NaN of -inf less -inf
    weights = torch.exp(scores - denominator.masked_fill(denominator == -math.inf, 0.0)[..., None])
    return weights, denominator, slope
