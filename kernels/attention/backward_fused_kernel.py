"""Gradients of attention in one pass: a tile of keys a program, which keeps dk and dv and adds its part of dq.

Five products a block instead of the seven of two passes, for sums of dq whose order is not fixed. The query heads of a
key head are summed inside one program. A mask's gradient is a pass of its own.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.attention.backward_kernel import sequence, sources, statistic_strides, store_rows
from kernelwright.kernels.attention.gradient_sums_kernel import end_launch, start_launch, sums_space
from kernelwright.kernels.attention.gradients_kernel import score_gradients
from kernelwright.kernels.attention.mask_gradient_kernel import mask_launch
from kernelwright.kernels.attention.rows_kernel import head_rows, places_of, strides_of
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def gather_all(
    dk, dv, sums, key, value, q, d_out, place, logs, deltas, mask, slope, first, last, queries, keys_exist,
    key_positions, shift, scale, q_strides, d_out_strides, mask_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, HIDES: tl.constexpr,
    BULK: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, with what queries first .. last of one head add; their dq goes to `sums`. Tiles
    stand keys by queries."""
    local = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    none = tl.zeros((key.shape[0], BLOCK_M), tl.float32)
    zeros = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + local
        exist = rows < queries
        query = head_rows(q, place, start, local, exist, q_strides, D, BLOCK_D, BULK, FAR)
        products = product(key, query.T, none, PRECISION)
        gradient = head_rows(d_out, place, start, local, exist, d_out_strides, DV, BLOCK_DV, BULK, FAR)
        d_weights = product(value, gradient.T, none, PRECISION)
        weights, _, d_scaled = score_gradients(
            products, d_weights, tl.load(logs + rows, mask=exist, other=float("inf"))[None, :],
            tl.load(deltas + rows, mask=exist, other=0.0)[None, :], (rows + shift)[None, :], key_positions[:, None],
            keys_exist[:, None] & exist[None, :], slope, mask,
            rows.to(tl.int64)[None, :] * mask_strides[2] + key_positions.to(tl.int64)[:, None] * mask_strides[3],
            scale, CAUSAL, WINDOW, CAP, MASK, HIDES,
        )  # fmt: skip
        dv = product(weights.to(gradient.dtype), gradient, dv, PRECISION)
        d_narrow = d_scaled.to(query.dtype)
        dk = product(d_narrow, query, dk, PRECISION)
        part = product(tl.trans(d_narrow), key, zeros, PRECISION)
        spots = sums + rows.to(tl.int64)[:, None] * BLOCK_D + columns[None, :]
        tl.atomic_add(spots, part, mask=exist[:, None] & (columns < D)[None, :], sem="relaxed")
    return dk, dv


@triton.jit
def backward_all(
    q, k, v, d_out, logs, deltas, sums, mask, alibi, cu_q, cu_k, dk, dv,
    Hkv, pairs, section, Sq, Skv, scale, q_strides, k_strides, v_strides, d_out_strides, facts_strides, mask_strides,
    dk_strides, dv_strides,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, BULK: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head, and what they add to dq. pairs: sequences times key heads, `section`
    of which go through their tiles together, so that queries and sums stay in the L2 cache; under a causal mask the
    longest tiles come first."""
    tiles = tl.cdiv(Skv, BLOCK_N)
    which = tl.program_id(0) // (section * tiles)
    rest = tl.program_id(0) % (section * tiles)
    wide = tl.minimum(section, pairs - which * section)
    tile = rest // wide
    pair = which * section + rest % wide
    batch = (pair // Hkv).to(tl.int64)
    kv_head = (pair % Hkv).to(tl.int64)
    first_query, queries = sequence(cu_q, batch, Sq)
    first_key, keys = sequence(cu_k, batch, Skv)
    start = tile * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    exist = start + local < keys
    shift = 0
    if BOTTOM_RIGHT:
        shift = keys - queries
    place = (batch, kv_head, first_key)
    key = head_rows(k, place, start, local, exist, k_strides, D, BLOCK_D, BULK, FAR)
    value = head_rows(v, place, start, local, exist, v_strides, DV, BLOCK_DV, BULK, FAR)
    if BULK and cu_k is not None:
        # behind a packed sequence lies the next one, of which 0 * infinity would reach dq
        key = tl.where(exist[:, None], key, 0.0)
    dk_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    first, hidden_until, last = 0, 0, queries
    if CAUSAL:
        # queries before `first` see no key of the tile, those from hidden_until on see all
        first = tl.maximum(start - shift, 0) // BLOCK_M * BLOCK_M
        hidden_until = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M, queries)
    if WINDOW > 0:
        last = tl.minimum(queries, tl.maximum(start + BLOCK_N - 1 + WINDOW - shift, 0))
    if start + BLOCK_N > keys:
        # keys that do not exist must weigh nothing in dq
        hidden_until = queries
    if start >= keys:
        last = 0
        hidden_until = 0
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + head)
        place = (batch, head, first_query)
        facts = batch * facts_strides[0] + head * facts_strides[1] + first_query * facts_strides[2]
        mask_head = mask
        if mask is not None:
            mask_head = mask + batch * mask_strides[0] + head * mask_strides[1]
        # nothing is hidden from the rows between
        hidden, seen_from = hidden_until, tl.maximum(first, hidden_until)
        if MASK != "" or WINDOW > 0:
            hidden, seen_from = last, last
        dk_acc, dv_acc = gather_all(
            dk_acc, dv_acc, sums + facts * BLOCK_D, key, value, q, d_out, place, logs + facts, deltas + facts,
            mask_head, slope, first, hidden, queries, exist, start + local, shift, scale, q_strides, d_out_strides,
            mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, CAUSAL, WINDOW, CAP, MASK, True, BULK, FAR, PRECISION,
        )  # fmt: skip
        if MASK == "" and WINDOW == 0:
            dk_acc, dv_acc = gather_all(
                dk_acc, dv_acc, sums + facts * BLOCK_D, key, value, q, d_out, place, logs + facts, deltas + facts,
                mask_head, slope, seen_from, last, queries, exist, start + local, shift, scale, q_strides,
                d_out_strides, mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, CAUSAL, WINDOW, CAP, MASK, False, BULK,
                FAR, PRECISION,
            )  # fmt: skip
    dk += batch * dk_strides[0] + kv_head * dk_strides[1] + first_key * dk_strides[2]
    dv += batch * dv_strides[0] + kv_head * dv_strides[1] + first_key * dv_strides[2]
    store_rows(dk, places_of(start, local, dk_strides[2], True), exist, dk_acc * scale, dk_strides[3], D, BLOCK_D)
    store_rows(dv, places_of(start, local, dv_strides[2], True), exist, dv_acc, dv_strides[3], DV, BLOCK_DV)


def plan(inputs, outs, knobs, attributes):
    """Launches of a backward: from q, k, v, out, lse and d_out to outs (dq, dk, dv), and d_mask where it is wanted."""
    q, k, v, lse, d_out = (inputs[name] for name in ("q", "k", "v", "lse", "d_out"))
    dq, dk, dv, *d_masks = outs
    cu_q, cu_k, mask, alibi = (inputs.get(name) for name in ("cu_q", "cu_k", "mask", "alibi"))
    packed = q.dim() == 3
    batches = cu_q.shape[0] - 1 if packed else q.shape[0]
    sq, skv = (attributes["longest_q"], attributes["longest_k"]) if packed else (q.shape[2], k.shape[2])
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    block_d, block_dv = (max(16, triton.next_power_of_2(t.shape[-1])) for t in (q, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    space = sums_space(lse.shape, block_d, q.device)
    scale, causal = float(attributes.get("scale", head_dim**-0.5)), attributes.get("causal", "")
    far = max(max(strides_of(t)[2:]) for t in (q, k, v, d_out)) * max(128, block_d, block_dv) >= 2**31
    sizes = (heads // kv_heads, head_dim, block_d, v.shape[-1], block_dv)
    seen = (bool(causal), causal != "top_left", attributes.get("window", 0), float(attributes.get("softcap", 0)))
    bulk, precision = knobs["loads"] == "bulk", dot_precision(knobs["precision"], q)
    mask_strides = mask.stride() if mask is not None else (0, 0, 0, 0)
    around = tuple(strides_of(t) for t in (q, k, v, d_out))
    launches = [start_launch(inputs, space, sq, 0)] if lse.numel() > 0 else []
    pairs = batches * kv_heads
    if dk.numel() + dv.numel() > 0:
        m, n = knobs["block_m"], knobs["block_n"]
        args = (
            *sources(inputs, bulk, m, n), *space, mask, alibi, cu_q, cu_k, dk, dv, kv_heads, pairs,
            min(knobs["section"], pairs), sq, skv, scale, *around, statistic_strides(space[0]), mask_strides,
            strides_of(dk), strides_of(dv), *sizes, m, n, *seen, attributes.get("mask", ""), bulk, far, precision,
        )  # fmt: skip
        options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
        launches.append((backward_all, (triton.cdiv(skv, n) * pairs,), args, options))
    if dq.numel() > 0:
        launches.append(end_launch(inputs, space, dq, sq, scale))
    if d_masks and d_masks[0].numel() > 0:
        read = (*around, statistic_strides(lse), mask_strides)
        launches.append(mask_launch(inputs, d_masks[0], space[1], read, sizes, scale, (*seen, far, precision)))
    return launches
