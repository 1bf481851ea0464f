"""Attention forward by plain pointers: any strides, sizes, masks and lengths, any GPU.

Three loops over the keys: those at the edge of the window, those that every query of the tile sees, which need no
comparing, and those at the diagonal or the end. Head dimensions are covered by one or two powers of two.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.attention.softmax_kernel import (
    attention_parts,
    attention_reach,
    attention_scale,
    attention_strides,
    capped_scores,
    key_ranges,
    softmax_end,
    softmax_start,
    softmax_step,
    visible_keys,
)
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def head_tile(ptr, rows, stride_s, stride_d, limit, head_dim, FIRST: tl.constexpr, WIDTH: tl.constexpr,
              ROWS_MASKED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Elements FIRST .. FIRST + WIDTH of heads at `rows`: [rows, WIDTH]; zeros beyond limit and head_dim."""
    dims = FIRST + tl.arange(0, WIDTH)
    places = ptr + rows[:, None] * stride_s + dims[None, :] * stride_d
    if MASKED and ROWS_MASKED:
        tile = tl.load(places, mask=(rows < limit)[:, None] & (dims < head_dim)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(places, mask=(dims < head_dim)[None, :], other=0.0)
    elif ROWS_MASKED:
        tile = tl.load(places, mask=(rows < limit)[:, None], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def attend(
    q0, q1, acc0, acc1, m, norm, k_ptr, v_ptr, mask_ptr, start, end, places, rows, len_q, len_k,
    stride_ks, stride_kd, stride_vs, stride_vd, stride_mq, stride_mk, head_dim, v_dim, factor, cap, slope,
    BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    D_MASKED: tl.constexpr, V_MASKED: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, ALIBI: tl.constexpr, FOLD: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys start .. end into the running sums. EDGE: some of them may be hidden, or not there."""
    for block in range(start, end, BLOCK_N):
        cols = block + tl.arange(0, BLOCK_N)
        wide_cols = cols
        if WIDE:
            wide_cols = cols.to(tl.int64)
        k0 = head_tile(k_ptr, wide_cols, stride_ks, stride_kd, len_k, head_dim, 0, D0, EDGE, D_MASKED and D1 == 0)
        s = tl.zeros((q0.shape[0], BLOCK_N), tl.float32)
        s = product(q0, k0.T, s, PRECISION)
        if D1 > 0:
            k1 = head_tile(k_ptr, wide_cols, stride_ks, stride_kd, len_k, head_dim, D0, D1, EDGE, D_MASKED)
            s = product(q1, k1.T, s, PRECISION)
        if SOFTCAP:
            s = capped_scores(s, factor, cap)
        elif not FOLD:
            s = s * factor
        if MASK != "":
            spots = mask_ptr + rows[:, None] * stride_mq + wide_cols[None, :] * stride_mk
            there = (rows < len_q)[:, None] & (cols < len_k)[None, :]
            if MASK == "bool":
                s = tl.where(tl.load(spots, mask=there, other=0) != 0, s, -float("inf"))
            else:
                s += tl.load(spots, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
        if ALIBI:
            s -= slope * tl.abs(places[:, None] - cols[None, :]).to(tl.float32)
        if EDGE:
            s = visible_keys(s, places, cols, len_k, CAUSAL, WINDOW)
        if FOLD:
            p, alpha, m, norm = softmax_step(s, factor, m, norm, SHIFT, EDGE)
        else:
            p, alpha, m, norm = softmax_step(s, 1.0, m, norm, SHIFT, EDGE or MASK != "")
        v0 = head_tile(v_ptr, wide_cols, stride_vs, stride_vd, len_k, v_dim, 0, V0, EDGE, V_MASKED and V1 == 0)
        p = p.to(v0.dtype)
        acc0 = product(p, v0, acc0 * alpha[:, None], PRECISION)
        if V1 > 0:
            v1 = head_tile(v_ptr, wide_cols, stride_vs, stride_vd, len_k, v_dim, V0, V1, EDGE, V_MASKED)
            acc1 = product(p, v1, acc1 * alpha[:, None], PRECISION)
    return acc0, acc1, m, norm


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, slopes_ptr, sinks_ptr, q_scale, k_scale, v_scale, cu_q, cu_k,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
    stride_mb, stride_mh, stride_mq, stride_mk, stride_lb, stride_lh,
    len_q, len_k, heads, pairs, section, head_dim, v_dim, factor, cap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, D_MASKED: tl.constexpr, V_MASKED: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    TOP_LEFT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, FOLD: tl.constexpr,
    SHIFT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head. pairs: sequences times heads, of which `section` at a time go through their
    tiles together. factor, cap: in units of log2(e)."""
    tiles = tl.cdiv(len_q, BLOCK_M)
    # each section of heads goes from the last tile down, which has the most keys under a causal mask
    section_tiles = section * tiles
    which = tl.program_id(0) // section_tiles
    rest = tl.program_id(0) % section_tiles
    together = tl.minimum(section, pairs - which * section)
    tile = tiles - 1 - rest // together
    pair = which * section + rest % together
    batch = (pair // heads).to(tl.int64)
    head = pair % heads
    kv_head = (head // GROUP).to(tl.int64)
    head = head.to(tl.int64)
    if PACKED:
        start_q = tl.load(cu_q + batch)
        start_k = tl.load(cu_k + batch)
        len_q = tl.load(cu_q + batch + 1) - start_q
        len_k = tl.load(cu_k + batch + 1) - start_k
        q_ptr += start_q.to(tl.int64) * stride_qs
        k_ptr += start_k.to(tl.int64) * stride_ks
        v_ptr += start_k.to(tl.int64) * stride_vs
        out_ptr += start_q.to(tl.int64) * stride_os
        if LSE:
            lse_ptr += start_q
    if tile * BLOCK_M < len_q:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        shift = 0
        if not TOP_LEFT:
            shift = len_k - len_q
        places = rows + shift
        first = tile * BLOCK_M + shift
        last = tl.minimum(first + BLOCK_M, len_q + shift) - 1
        if WIDE:
            rows = rows.to(tl.int64)
        q_ptr += batch * stride_qb + head * stride_qh
        k_ptr += batch * stride_kb + kv_head * stride_kh
        v_ptr += batch * stride_vb + kv_head * stride_vh
        if MASK != "":
            mask_ptr += batch * stride_mb + head * stride_mh
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + head) * 1.4426950408889634
        if SCALED:
            factor *= tl.load(q_scale) * tl.load(k_scale)
        q0 = head_tile(q_ptr, rows, stride_qs, stride_qd, len_q, head_dim, 0, D0, True, D_MASKED and D1 == 0)
        q1 = q0
        if D1 > 0:
            q1 = head_tile(q_ptr, rows, stride_qs, stride_qd, len_q, head_dim, D0, D1, True, D_MASKED)
        m, norm = softmax_start(sinks_ptr, head, BLOCK_M, SHIFT, SINKS)
        acc0 = tl.zeros((BLOCK_M, V0), tl.float32)
        acc1 = acc0
        if V1 > 0:
            acc1 = tl.zeros((BLOCK_M, V1), tl.float32)
        lo, full_lo, full_hi, hi = key_ranges(first, last, len_k, BLOCK_N, CAUSAL, WINDOW)
        if WINDOW > 0:
            acc0, acc1, m, norm = attend(
                q0, q1, acc0, acc1, m, norm, k_ptr, v_ptr, mask_ptr, lo, tl.minimum(full_lo, hi), places, rows, len_q,
                len_k, stride_ks, stride_kd, stride_vs, stride_vd, stride_mq, stride_mk, head_dim, v_dim, factor, cap,
                slope, BLOCK_N, D0, D1, V0, V1, D_MASKED, V_MASKED, True, CAUSAL, WINDOW, SOFTCAP, MASK, ALIBI, FOLD,
                SHIFT, WIDE, PRECISION,
            )  # fmt: skip
        acc0, acc1, m, norm = attend(
            q0, q1, acc0, acc1, m, norm, k_ptr, v_ptr, mask_ptr, full_lo, full_hi, places, rows, len_q, len_k,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_mq, stride_mk, head_dim, v_dim, factor, cap, slope,
            BLOCK_N, D0, D1, V0, V1, D_MASKED, V_MASKED, False, CAUSAL, WINDOW, SOFTCAP, MASK, ALIBI, FOLD, SHIFT,
            WIDE, PRECISION,
        )  # fmt: skip
        acc0, acc1, m, norm = attend(
            q0, q1, acc0, acc1, m, norm, k_ptr, v_ptr, mask_ptr, full_hi, hi, places, rows, len_q, len_k,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_mq, stride_mk, head_dim, v_dim, factor, cap, slope,
            BLOCK_N, D0, D1, V0, V1, D_MASKED, V_MASKED, True, CAUSAL, WINDOW, SOFTCAP, MASK, ALIBI, FOLD, SHIFT,
            WIDE, PRECISION,
        )  # fmt: skip
        inverse, lse = softmax_end(m, norm, SHIFT)
        if LSE:
            tl.store(lse_ptr + batch * stride_lb + head * stride_lh + rows, lse, mask=rows < len_q)
        if SCALED:
            inverse *= tl.load(v_scale)
        out_ptr += batch * stride_ob + head * stride_oh
        store_heads(out_ptr, acc0 * inverse[:, None], rows, stride_os, stride_od, len_q, v_dim, 0, V0)
        if V1 > 0:
            store_heads(out_ptr, acc1 * inverse[:, None], rows, stride_os, stride_od, len_q, v_dim, V0, V1)


@triton.jit
def store_heads(ptr, x, rows, stride_s, stride_d, limit, head_dim, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Write x [rows, WIDTH] to elements FIRST .. of heads at `rows`."""
    dims = FIRST + tl.arange(0, WIDTH)
    spots = ptr + rows[:, None] * stride_s + dims[None, :] * stride_d
    tl.store(spots, x.to(ptr.dtype.element_ty), mask=(rows < limit)[:, None] & (dims < head_dim)[None, :])


def plan(inputs, out, knobs, attributes):
    """Launches that write the attention of inputs q, k and v to out, or to (out, lse)."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, lse = out if isinstance(out, tuple) else (out, None)
    if out.numel() == 0:
        return []
    packed = q.dim() == 3
    batch = inputs["cu_q"].shape[0] - 1 if packed else q.shape[0]
    heads, head_dim, v_dim = q.shape[1], q.shape[-1], v.shape[-1]
    len_q, len_k = (attributes["longest_q"], attributes["longest_k"]) if packed else (q.shape[2], k.shape[2])
    # 8-bit products are at least 32 deep
    narrow = q.element_size() == 1
    least, split = (32 if narrow else 16), knobs["head"] == "split"
    d0, d1 = attention_parts(head_dim, split, least)
    v0, v1 = attention_parts(v_dim, split, least)
    block_m, block_n = knobs["block_m"], knobs["block_n"]
    mask, kind = inputs.get("mask"), attributes.get("mask", "")
    if kind == "bool":
        mask = mask.view(torch.uint8)
    near = [q, k, v, out] + ([mask] if kind else [])
    wide = attention_reach(*near) + block_n * max(k.stride(-2), v.stride(-2), k.stride(0)) >= 2**31
    scale, cap = attention_scale(attributes, head_dim), float(attributes.get("softcap", 0.0))
    log2e = 1.4426950408889634
    # the scores' factor joins the subtraction of the maximum where nothing comes between; a capped score is scaled by
    # 2 / cap inside the tanh
    fold = scale > 0 and not (cap or kind or attributes.get("alibi"))
    factor = 2.0 * log2e * scale / cap if cap else scale * log2e
    causal = attributes.get("causal", "")
    grid = (triton.cdiv(len_q, block_m) * batch * heads,)
    args = (
        q, k, v, out, lse, mask, inputs.get("alibi"), inputs.get("sinks"),
        *(inputs.get(name) for name in ("q_scale", "k_scale", "v_scale", "cu_q", "cu_k")),
        *attention_strides(q), *attention_strides(k), *attention_strides(v), *attention_strides(out),
        *(mask.stride() if kind else (0, 0, 0, 0)), *lse_strides(lse), len_q, len_k, heads, batch * heads,
        min(knobs["section"], batch * heads), head_dim, v_dim, factor, cap * log2e, block_m, block_n, d0, d1, v0, v1,
        d0 + d1 > head_dim, v0 + v1 > v_dim, heads // k.shape[1 if packed else -3], bool(causal), causal == "top_left",
        attributes.get("window", 0), cap > 0, kind, bool(attributes.get("alibi")), bool(attributes.get("sinks")),
        lse is not None, "q_scale" in inputs, packed, fold, 8 if narrow else 0, wide,
        dot_precision(knobs["precision"], q),
    )  # fmt: skip
    return [(attention_forward, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]


def lse_strides(lse):
    """Strides of batch and head of [B, H, S] or packed [H, T]."""
    if lse is None:
        return (0, 0)
    return lse.stride()[:2] if lse.dim() == 3 else (0, lse.stride(0))
