"""Gradients of attention in passes without atomics, always the same bits: delta, the sum of d_out * out of each query;
then dk and dv, a tile of keys a program; then dq, a tile of queries a program.

The query heads of a key head are summed inside one program. A mask's gradient is a pass of its own.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.attention.gradients_kernel import row_facts, score_gradients
from kernelwright.kernels.attention.mask_gradient_kernel import mask_launch
from kernelwright.kernels.attention.rows_kernel import bulk_rows, head_rows, places_of, strides_of
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def sequence(cu, batch, longest):
    """(first row, rows) of a sequence: of packed ones by cu, the running sum of their lengths."""
    if cu is not None:
        first = tl.load(cu + batch)
        rows = tl.load(cu + batch + 1) - first
        first = first.to(tl.int64)
    else:
        first, rows = tl.cast(0, tl.int64), longest
    return first, rows


@triton.jit
def backward_delta(
    out, d_out, delta, cu_q, H, Sq, out_strides, d_out_strides, delta_strides,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta[batch, head, query], the sum of d_out * out over the head dimension."""
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    first, queries = sequence(cu_q, batch, Sq)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_DV).to(tl.int64)
    inside = (rows < queries)[:, None] & (dims < DV)[None, :]
    at = first + rows
    x = tl.load(
        out + batch * out_strides[0] + head * out_strides[1] + at[:, None] * out_strides[2] + dims * out_strides[3],
        mask=inside, other=0.0,
    )  # fmt: skip
    y = tl.load(
        d_out + batch * d_out_strides[0] + head * d_out_strides[1] + at[:, None] * d_out_strides[2]
        + dims * d_out_strides[3],
        mask=inside, other=0.0,
    )  # fmt: skip
    places = batch * delta_strides[0] + head * delta_strides[1] + at * delta_strides[2]
    tl.store(delta + places, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1), mask=rows < queries)


@triton.jit
def gather_keys(
    dk, dv, key, value, q, d_out, place, lse, delta, mask, slope, first, last, queries, keys_exist, key_positions,
    shift, scale, q_strides, d_out_strides, lse_stride, mask_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, HIDES: tl.constexpr,
    BULK: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, with what queries first .. last of one head add. Tiles stand keys by queries."""
    local = tl.arange(0, BLOCK_M)
    none = tl.zeros((key.shape[0], BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_M):
        rows = start + local
        exist = rows < queries
        query = head_rows(q, place, start, local, exist, q_strides, D, BLOCK_D, BULK, FAR)
        products = product(key, query.T, none, PRECISION)
        gradient = head_rows(d_out, place, start, local, exist, d_out_strides, DV, BLOCK_DV, BULK, FAR)
        d_weights = product(value, gradient.T, none, PRECISION)
        logs, deltas = row_facts(lse, delta, places_of(start, local, lse_stride, FAR), exist)
        weights, _, d_scaled = score_gradients(
            products, d_weights, logs[None, :], deltas[None, :], (rows + shift)[None, :], key_positions[:, None],
            keys_exist[:, None] & exist[None, :], slope, mask,
            rows.to(tl.int64)[None, :] * mask_strides[2] + key_positions.to(tl.int64)[:, None] * mask_strides[3],
            scale, CAUSAL, WINDOW, CAP, MASK, HIDES,
        )  # fmt: skip
        dv = product(weights.to(gradient.dtype), gradient, dv, PRECISION)
        dk = product(d_scaled.to(query.dtype), query, dk, PRECISION)
    return dk, dv


@triton.jit
def store_rows(out, places, exist, acc, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile of rows [rows, BLOCK_D]."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    at = out + places[:, None] + dims[None, :] * stride_d
    tl.store(at, acc.to(out.dtype.element_ty), mask=exist[:, None] & (dims < D)[None, :])


@triton.jit
def backward_keys(
    q, k, v, d_out, lse, delta, mask, alibi, cu_q, cu_k, dk, dv,
    Hkv, batch_heads, Sq, Skv, scale, q_strides, k_strides, v_strides, d_out_strides, lse_strides, mask_strides,
    dk_strides, dv_strides,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, BULK: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys of one key head. Tiles of one place follow each other over the heads, so that under a
    causal mask the longest come first."""
    tile = tl.program_id(0) // batch_heads
    batch = (tl.program_id(0) % batch_heads // Hkv).to(tl.int64)
    kv_head = (tl.program_id(0) % batch_heads % Hkv).to(tl.int64)
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
    dk_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    first, hidden_until, last = 0, 0, queries
    if CAUSAL:
        # queries before `first` see no key of the tile, those from hidden_until on see all
        first = tl.maximum(start - shift, 0) // BLOCK_M * BLOCK_M
        hidden_until = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - shift, 0), BLOCK_M) * BLOCK_M, queries)
    if WINDOW > 0:
        last = tl.minimum(queries, tl.maximum(start + BLOCK_N - 1 + WINDOW - shift, 0))
    if start >= keys:
        last = 0
        hidden_until = 0
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + head)
        place = (batch, head, first_query)
        facts = batch * lse_strides[0] + head * lse_strides[1] + first_query * lse_strides[2]
        mask_head = mask
        if mask is not None:
            mask_head = mask + batch * mask_strides[0] + head * mask_strides[1]
        # nothing is hidden from the rows between
        hidden, seen_from = hidden_until, tl.maximum(first, hidden_until)
        if MASK != "" or WINDOW > 0:
            hidden, seen_from = last, last
        if CAUSAL or MASK != "" or WINDOW > 0:
            dk_acc, dv_acc = gather_keys(
                dk_acc, dv_acc, key, value, q, d_out, place, lse + facts, delta + facts, mask_head, slope,
                first, hidden, queries, exist, start + local, shift, scale, q_strides, d_out_strides, lse_strides[2],
                mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, CAUSAL, WINDOW, CAP, MASK, True, BULK, FAR, PRECISION,
            )  # fmt: skip
        if MASK == "" and WINDOW == 0:
            dk_acc, dv_acc = gather_keys(
                dk_acc, dv_acc, key, value, q, d_out, place, lse + facts, delta + facts, mask_head, slope,
                seen_from, last, queries, exist, start + local, shift, scale, q_strides, d_out_strides, lse_strides[2],
                mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_M, CAUSAL, WINDOW, CAP, MASK, False, BULK, FAR, PRECISION,
            )  # fmt: skip
    dk += batch * dk_strides[0] + kv_head * dk_strides[1] + first_key * dk_strides[2]
    dv += batch * dv_strides[0] + kv_head * dv_strides[1] + first_key * dv_strides[2]
    store_rows(dk, places_of(start, local, dk_strides[2], True), exist, dk_acc * scale, dk_strides[3], D, BLOCK_D)
    store_rows(dv, places_of(start, local, dv_strides[2], True), exist, dv_acc, dv_strides[3], DV, BLOCK_DV)


@triton.jit
def gather_queries(
    dq, query, gradient, logs, deltas, k, v, place, mask, slope, first, last, keys, exist, rows, shift, scale,
    k_strides, v_strides, mask_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, HIDES: tl.constexpr,
    BULK: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries, with what keys first .. last add. Tiles stand queries by keys."""
    local = tl.arange(0, BLOCK_N)
    none = tl.zeros((query.shape[0], BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_N):
        positions = start + local
        there = positions < keys
        key = head_rows(k, place, start, local, there, k_strides, D, BLOCK_D, BULK, FAR)
        products = product(query, key.T, none, PRECISION)
        value = head_rows(v, place, start, local, there, v_strides, DV, BLOCK_DV, BULK, FAR)
        d_weights = product(gradient, value.T, none, PRECISION)
        _, _, d_scaled = score_gradients(
            products, d_weights, logs[:, None], deltas[:, None], (rows + shift)[:, None], positions[None, :],
            exist[:, None] & there[None, :], slope, mask,
            rows.to(tl.int64)[:, None] * mask_strides[2] + positions.to(tl.int64)[None, :] * mask_strides[3],
            scale, CAUSAL, WINDOW, CAP, MASK, HIDES,
        )  # fmt: skip
        dq = product(d_scaled.to(key.dtype), key, dq, PRECISION)
    return dq


@triton.jit
def backward_queries(
    q, k, v, d_out, lse, delta, mask, alibi, cu_q, cu_k, dq,
    H, batch_heads, Sq, Skv, scale, q_strides, k_strides, v_strides, d_out_strides, lse_strides, mask_strides,
    dq_strides,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, BULK: tl.constexpr, FAR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; the last tiles, which see most under a causal mask, come first."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // batch_heads
    batch = (tl.program_id(0) % batch_heads // H).to(tl.int64)
    head = (tl.program_id(0) % batch_heads % H).to(tl.int64)
    first_query, queries = sequence(cu_q, batch, Sq)
    first_key, keys = sequence(cu_k, batch, Skv)
    start = tile * BLOCK_M
    local = tl.arange(0, BLOCK_M)
    exist = start + local < queries
    shift = 0
    if BOTTOM_RIGHT:
        shift = keys - queries
    place = (batch, head, first_query)
    query = head_rows(q, place, start, local, exist, q_strides, D, BLOCK_D, BULK, FAR)
    gradient = head_rows(d_out, place, start, local, exist, d_out_strides, DV, BLOCK_DV, BULK, FAR)
    facts = batch * lse_strides[0] + head * lse_strides[1] + first_query * lse_strides[2]
    logs, deltas = row_facts(lse + facts, delta + facts, places_of(start, local, lse_strides[2], FAR), exist)
    place = (batch, head // GROUP, first_key)
    if mask is not None:
        mask += batch * mask_strides[0] + head * mask_strides[1]
    slope = None
    if alibi is not None:
        slope = tl.load(alibi + head)
    first, last = 0, keys
    # all queries of the tile see all keys before seen_until
    seen_until = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        last = tl.minimum(keys, tl.maximum(start + BLOCK_M + shift, 0))
        seen_until = tl.minimum(tl.maximum(start + shift + 1, 0), keys) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(start + shift - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if start >= queries:
        last = 0
        seen_until = 0
    dq_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if MASK == "" and WINDOW == 0:
        dq_acc = gather_queries(
            dq_acc, query, gradient, logs, deltas, k, v, place, mask, slope, first, seen_until, keys, exist,
            start + local, shift, scale, k_strides, v_strides, mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_N,
            CAUSAL, WINDOW, CAP, MASK, False, BULK, FAR, PRECISION,
        )  # fmt: skip
        first = seen_until
    dq_acc = gather_queries(
        dq_acc, query, gradient, logs, deltas, k, v, place, mask, slope, first, last, keys, exist, start + local,
        shift, scale, k_strides, v_strides, mask_strides, D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, CAUSAL, WINDOW, CAP,
        MASK, True, BULK, FAR, PRECISION,
    )  # fmt: skip
    dq += batch * dq_strides[0] + head * dq_strides[1] + first_query * dq_strides[2]
    store_rows(dq, places_of(start, local, dq_strides[2], True), exist, dq_acc * scale, dq_strides[3], D, BLOCK_D)


def statistic_strides(lse):
    """Strides of batch, head and query of [B, H, S] or packed [H, T]."""
    return lse.stride() if lse.dim() == 3 else (0, *lse.stride())


def delta_launch(out, d_out, delta, cu_q, sq):
    """The launch that fills delta, which lies like lse."""
    heads, width = out.shape[1], out.shape[-1]
    batches = cu_q.shape[0] - 1 if cu_q is not None else out.shape[0]
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, min(64, 4096 // block))
    args = (
        out, d_out, delta, cu_q, heads, sq, strides_of(out), strides_of(d_out), statistic_strides(delta),
        width, block, rows,
    )  # fmt: skip
    return backward_delta, (batches * heads, triton.cdiv(sq, rows)), args, {"num_warps": 4}


def sources(inputs, bulk, block_m, block_n):
    """q, k, v and d_out as a kernel gets them: tensors, or descriptors of tiles of block_m queries and block_n keys."""
    tensors = [inputs[name] for name in ("q", "k", "v", "d_out")]
    if not bulk:
        return tensors
    blocks = (block_m, block_n, block_n, block_m)
    widths_of = [max(16, triton.next_power_of_2(t.shape[-1])) for t in tensors]
    return [bulk_rows(*tile) for tile in zip(tensors, blocks, widths_of, strict=True)]


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
    delta = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    scale, causal = float(attributes.get("scale", head_dim**-0.5)), attributes.get("causal", "")
    far = max(max(strides_of(t)[2:]) for t in (q, k, v, d_out)) * max(128, block_d, block_dv) >= 2**31
    sizes = (heads // kv_heads, head_dim, block_d, v.shape[-1], block_dv)
    seen = (bool(causal), causal != "top_left", attributes.get("window", 0), float(attributes.get("softcap", 0)))
    bulk, precision = knobs["loads"] == "bulk", dot_precision(knobs["precision"], q)
    ways = (*seen, attributes.get("mask", ""), bulk, far, precision)
    mask_strides = mask.stride() if mask is not None else (0, 0, 0, 0)
    read = (*(strides_of(t) for t in (q, k, v, d_out)), statistic_strides(lse), mask_strides)
    launches = [delta_launch(inputs["out"], d_out, delta, cu_q, sq)] if lse.numel() > 0 else []
    if dk.numel() + dv.numel() > 0:
        m, n = knobs["block_m1"], knobs["block_n1"]
        args = (
            *sources(inputs, bulk, m, n), lse, delta, mask, alibi, cu_q, cu_k, dk, dv, kv_heads, batches * kv_heads,
            sq, skv, scale, *read, strides_of(dk), strides_of(dv), *sizes, m, n, *ways,
        )  # fmt: skip
        options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
        launches.append((backward_keys, (triton.cdiv(skv, n) * batches * kv_heads,), args, options))
    if dq.numel() > 0:
        m, n = knobs["block_m2"], knobs["block_n2"]
        args = (
            *sources(inputs, bulk, m, n), lse, delta, mask, alibi, cu_q, cu_k, dq, heads, batches * heads,
            sq, skv, scale, *read, strides_of(dq), *sizes, m, n, *ways,
        )  # fmt: skip
        options = {"num_warps": knobs["num_warps2"], "num_stages": knobs["num_stages2"]}
        launches.append((backward_queries, (triton.cdiv(sq, m) * batches * heads,), args, options))
    if d_masks and d_masks[0].numel() > 0:
        launches.append(mask_launch(inputs, d_masks[0], delta, read, sizes, scale, (*seen, far, precision)))
    return launches
