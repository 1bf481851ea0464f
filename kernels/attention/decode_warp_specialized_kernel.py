"""Decode of absorbed latent attention by specialised warps (Hopper): values are the first columns of the keys.

One warpgroup makes the scores of 64 query rows and their softmax, and leaves weights in shared memory; two more each
keep one half of the columns of the sums. So the scores of the next block are made beside the sums of this one, and
every key is loaded once. The first one also starts the copies: keys may be overwritten when the weights may.
"""

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.attention.combine_kernel import combine_launch
from kernelwright.kernels.attention.softmax_kernel import attention_scale
from kernelwright.kernels.attention.warpgroup_kernel import fa_barrier

# triton 3.6 has the second name of the pair, 3.8 the first
latent_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def latent_share(lengths, batch, len_k, split, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr):
    """(keys of the sequence, first block of this split, its blocks)."""
    if lengths is not None:
        len_k = gl.load(lengths + batch)
    blocks = gl.cdiv(len_k, BLOCK_N)
    share = gl.cdiv(blocks, SPLITS)
    first = split * share
    return len_k, first, gl.maximum(gl.minimum(share, blocks - first), 0)


@gluon.jit
def latent_place(key, batch, len_k, table, table_stride, PAGE: gl.constexpr):
    """Where a block of keys lies: (sequence or page, key in it). Tables have no entries for blocks behind the last."""
    place = batch
    if PAGE > 0:
        place = gl.load(table + batch * table_stride + key // PAGE, mask=key < len_k, other=0)
        key = key % PAGE
    return place, key


@gluon.jit
def latent_copy(
    k0, k1, k2, k0_ring, k1_ring, k2_ring, full, stage, place, head, key,
    BLOCK_N: gl.constexpr, HALF: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Start to load a block of keys: two halves of what are values too, and the rest."""
    mbarrier.expect(full.index(stage), 2 * BLOCK_N * (2 * HALF + REST))
    latent_load(k0, [place, head, key, 0], full.index(stage), k0_ring.index(stage))
    latent_load(k1, [place, head, key, HALF], full.index(stage), k1_ring.index(stage))
    latent_load(k2, [place, head, key, 2 * HALF], full.index(stage), k2_ring.index(stage))


@gluon.jit
def latent_queries(
    q, target, stride_h, stride_s, stride_d, row, column, ROWS: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Columns column .. column + WIDTH of 64 query rows into shared memory; zeros for rows that do not exist."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8 if WIDTH < 256 else 32),
                                                     WIDTH // 8 if WIDTH < 256 else 32], [4, 1], [1, 0])  # fmt: skip
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dims = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    places = (rows % GROUP).to(gl.int64) * stride_h + (rows // GROUP).to(gl.int64) * stride_s
    tile = gl.load(q + places[:, None] + dims[None, :] * stride_d, mask=(rows < ROWS)[:, None], other=0.0)
    target.store(tile)


@gluon.jit
def latent_blank(tile, left, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the rows of a block of values from `left` on, whose memory may hold anything."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8 if WIDTH < 256 else 32),
                                                     WIDTH // 8 if WIDTH < 256 else 32], [4, 1], [1, 0])  # fmt: skip
    x = tile.load(LAYOUT)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where((rows < left)[:, None], x, 0.0))


@gluon.jit
def latent_scores(
    q, k0, k1, k2, q0_tile, q1_tile, q2_tile, k0_ring, k1_ring, k2_ring, p_tile, shrink, k_full, p_full, p_empty,
    table, lengths, logs, len_k, kv_heads, tiles, table_stride, factor, log_factor, stride_qb, stride_qh, stride_qs,
    stride_qd, stride_lb, stride_lh, stride_ls, split_step,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, PAGE: gl.constexpr, SQ: gl.constexpr,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Weights of every block, what sums so far shrink by, and last what they are multiplied by. logs: where the
    logarithms of denominators go, times log_factor, or None."""
    HALF: gl.constexpr = k0_ring.shape[4]
    REST: gl.constexpr = k2_ring.shape[4]
    ROWS: gl.constexpr = SQ * GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    EACH: gl.constexpr = gl.SliceLayout(1, SCORES)
    pair = gl.program_id(0) // tiles
    row = gl.program_id(0) % tiles * 64
    batch = pair // kv_heads
    head = pair % kv_heads * GROUP
    len_k, first, count = latent_share(lengths, batch, len_k, gl.program_id(1), BLOCK_N, SPLITS)
    for i in gl.static_range(STAGES):
        if i < count:
            place, key = latent_place((first + i) * BLOCK_N, batch, len_k, table, table_stride, PAGE)
            latent_copy(
                k0, k1, k2, k0_ring, k1_ring, k2_ring, k_full, i, place, pair % kv_heads, key, BLOCK_N, HALF, REST
            )  # fmt: skip
    q += batch.to(gl.int64) * stride_qb + head.to(gl.int64) * stride_qh
    latent_queries(q, q0_tile, stride_qh, stride_qs, stride_qd, row, 0, ROWS, GROUP, HALF)
    latent_queries(q, q1_tile, stride_qh, stride_qs, stride_qd, row, HALF, ROWS, GROUP, HALF)
    latent_queries(q, q2_tile, stride_qh, stride_qs, stride_qd, row, 2 * HALF, ROWS, GROUP, REST)
    fence_async_shared()
    fa_barrier()
    rows = row + gl.arange(0, 64, EACH)
    m = gl.full([64], -float("inf"), gl.float32, EACH)
    norm = gl.zeros([64], gl.float32, EACH)
    for i in range(count):
        stage = i % STAGES
        key = (first + i) * BLOCK_N
        k0_tile = k0_ring.index(stage).reshape((BLOCK_N, HALF))
        k1_tile = k1_ring.index(stage).reshape((BLOCK_N, HALF))
        k2_tile = k2_ring.index(stage).reshape((BLOCK_N, REST))
        # the block that takes the place of the one before
        later = i - 1 + STAGES
        next_place, next_key = latent_place((first + later) * BLOCK_N, batch, len_k, table, table_stride, PAGE)
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        s = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
        s = warpgroup_mma(q0_tile, k0_tile.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q1_tile, k1_tile.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q2_tile, k2_tile.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if PAGE > 0:
            ends = key + BLOCK_N > len_k
            if ends:
                fa_barrier()
                latent_blank(k0_tile, len_k - key, BLOCK_N, HALF)
                latent_blank(k1_tile, len_k - key, BLOCK_N, HALF)
        cols = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        seen = (cols < len_k)[None, :]
        if CAUSAL:
            seen = seen & (cols[None, :] <= (rows // GROUP + len_k - SQ)[:, None])
        s = gl.where(seen, s, -float("inf"))
        top = gl.maximum(m, gl.max(s, 1) * factor)
        base = gl.where(top == -float("inf"), 0.0, top)
        p = gl.exp2(s * factor - base[:, None])
        alpha = gl.exp2(m - base)
        norm = norm * alpha + gl.sum(p, 1)
        m = top
        mbarrier.wait(p_empty.index(0), (i & 1) ^ 1)
        if (i > 0) & (later < count):
            latent_copy(
                k0, k1, k2, k0_ring, k1_ring, k2_ring, k_full, later % STAGES, next_place, pair % kv_heads, next_key,
                BLOCK_N, HALF, REST,
            )  # fmt: skip
        p_tile.store(p.to(p_tile.dtype))
        shrink.store(alpha)
        fence_async_shared()
        fa_barrier()
        mbarrier.arrive(p_full.index(0), count=1)
    dead = norm == 0.0
    mbarrier.wait(p_empty.index(0), (count & 1) ^ 1)
    shrink.store(gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, norm)))
    fa_barrier()
    mbarrier.arrive(p_full.index(0), count=1)
    if logs is not None:
        log = gl.where(dead, -float("inf"), (m + gl.log2(gl.where(dead, 1.0, norm))) * log_factor)
        spots = batch.to(gl.int64) * stride_lb + (head + rows % GROUP).to(gl.int64) * stride_lh
        spots = spots + (rows // GROUP).to(gl.int64) * stride_ls + gl.program_id(1).to(gl.int64) * split_step
        gl.store(logs + spots, log, mask=rows < ROWS)


@gluon.jit
def latent_sums(
    WHICH: gl.constexpr, out, v_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
    stride_ob, stride_oh, stride_os, stride_od, split_step,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, SQ: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Half of the columns of the sums of weighted values."""
    HALF: gl.constexpr = v_ring.shape[4]
    ROWS: gl.constexpr = SQ * GROUP
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    EACH: gl.constexpr = gl.SliceLayout(1, SUMS)
    pair = gl.program_id(0) // tiles
    batch = pair // kv_heads
    len_k, _, count = latent_share(lengths, batch, len_k, gl.program_id(1), BLOCK_N, SPLITS)
    acc = gl.zeros([64, HALF], gl.float32, SUMS)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(p_full.index(0), i & 1)
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        acc = acc * shrink.load(EACH)[:, None]
        total = warpgroup_mma(p_tile, v_ring.index(stage).reshape((BLOCK_N, HALF)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(p_empty.index(0), count=1)
    mbarrier.wait(p_full.index(0), count & 1)
    acc = acc * shrink.load(EACH)[:, None]
    rows = gl.program_id(0) % tiles * 64 + gl.arange(0, 64, EACH)
    dims = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))
    spots = (pair % kv_heads * GROUP + rows % GROUP).to(gl.int64) * stride_oh
    spots = spots + (rows // GROUP).to(gl.int64) * stride_os
    out += batch.to(gl.int64) * stride_ob + gl.program_id(1).to(gl.int64) * split_step
    gl.store(
        out + spots[:, None] + dims[None, :] * stride_od, acc.to(out.dtype.element_ty), mask=(rows < ROWS)[:, None]
    )


@gluon.jit
def latent_sums_0(
    out, v_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
    stride_ob, stride_oh, stride_os, stride_od, split_step,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, SQ: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    latent_sums(
        0, out, v_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
        stride_ob, stride_oh, stride_os, stride_od, split_step, BLOCK_N, STAGES, SPLITS, SQ, GROUP,
    )  # fmt: skip


@gluon.jit
def latent_sums_1(
    out, v_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
    stride_ob, stride_oh, stride_os, stride_od, split_step,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, SQ: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    latent_sums(
        1, out, v_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
        stride_ob, stride_oh, stride_os, stride_od, split_step, BLOCK_N, STAGES, SPLITS, SQ, GROUP,
    )  # fmt: skip


@gluon.jit
def attention_decode_latent(
    q, k0, k1, k2, out, logs, table, lengths, len_k, kv_heads, tiles, table_stride, factor, log_factor,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_ob, stride_oh, stride_os, stride_od, out_step,
    stride_lb, stride_lh, stride_ls, log_step,
    HALF: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    PAGE: gl.constexpr, SQ: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """64 query rows of one key head over one split of the keys. Row r is query r // GROUP of the group's head
    r % GROUP. out, logs: those of the whole, or of parts that lie out_step and log_step apart."""
    k0_ring = gl.allocate_shared_memory(k0.dtype, [STAGES, 1, 1, BLOCK_N, HALF], k0.layout)
    k1_ring = gl.allocate_shared_memory(k1.dtype, [STAGES, 1, 1, BLOCK_N, HALF], k1.layout)
    k2_ring = gl.allocate_shared_memory(k2.dtype, [STAGES, 1, 1, BLOCK_N, REST], k2.layout)
    q0_tile = gl.allocate_shared_memory(k0.dtype, [64, HALF], gl.NVMMASharedLayout(128, 16, 2))
    q1_tile = gl.allocate_shared_memory(k0.dtype, [64, HALF], gl.NVMMASharedLayout(128, 16, 2))
    q2_tile = gl.allocate_shared_memory(k0.dtype, [64, REST], gl.NVMMASharedLayout(min(128, 2 * REST), 16, 2))
    p_tile = gl.allocate_shared_memory(k0.dtype, [64, BLOCK_N], gl.NVMMASharedLayout(min(128, 2 * BLOCK_N), 16, 2))
    shrink = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    mbarrier.init(p_full.index(0), count=1)
    mbarrier.init(p_empty.index(0), count=2)
    gl.warp_specialize(
        [
            (
                latent_scores,
                (
                    q, k0, k1, k2, q0_tile, q1_tile, q2_tile, k0_ring, k1_ring, k2_ring, p_tile, shrink, k_full, p_full,
                    p_empty, table, lengths, logs, len_k, kv_heads, tiles, table_stride, factor, log_factor,
                    stride_qb, stride_qh, stride_qs, stride_qd, stride_lb, stride_lh, stride_ls, log_step,
                    BLOCK_N, STAGES, SPLITS, PAGE, SQ, GROUP, CAUSAL,
                ),
            ),
            (
                latent_sums_0,
                (
                    out, k0_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
                    stride_ob, stride_oh, stride_os, stride_od, out_step, BLOCK_N, STAGES, SPLITS, SQ, GROUP,
                ),
            ),
            (
                latent_sums_1,
                (
                    out, k1_ring, p_tile, shrink, k_full, p_full, p_empty, lengths, len_k, kv_heads, tiles,
                    stride_ob, stride_oh, stride_os, stride_od, out_step, BLOCK_N, STAGES, SPLITS, SQ, GROUP,
                ),
            ),
        ],
        [4, 4],
        [176, 176],
    )  # fmt: skip


def latent_descriptor(tensor, rows, width):
    """A descriptor of keys [B or pages, H, S, D] for boxes of `rows` keys by `width` columns; the stride of a dimension
    with one place says nothing, and may be one that the copy engine does not take."""
    bits = 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(min(128, width * bits // 8), bits, 4)
    strides = [step if size > 1 else 16 for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return GluonDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width], layout)


def part_strides(heads, group, sq, width):
    """Strides of batch, head and query in parts [rows, width] whose rows go by sequence, key head, query, head of the
    group; of several key heads each has one query."""
    return heads * sq * width, width, group * width


def plan(inputs, outs, knobs, attributes):
    """Launches of an absorbed decode: q [B, Hq, Sq, D] against k [B, 1, Skv, D], or pages of it with block_table and
    lengths, whose first Dv columns are the values. outs: out [B, Hq, Sq, Dv], or (out, lse)."""
    out, lse = outs if isinstance(outs, tuple) else (outs, None)
    q, k, table = inputs["q"], inputs["k"], inputs.get("block_table")
    if out.numel() == 0:
        return []
    page = 0 if table is None else k.shape[1]
    (batches, heads, sq, head_dim), dv = q.shape, out.shape[3]
    cache = k.transpose(1, 2) if page else k
    kv_heads, len_k = cache.shape[1], table.shape[1] * page if page else k.shape[2]
    group, half, block_n, splits = heads // kv_heads, dv // 2, knobs["block_n"], knobs["split_kv"]
    tiles = triton.cdiv(sq * group, 64)
    target, logs, log_factor = out, lse, 0.6931471805599453
    out_strides, out_step = out.stride(), 0
    log_strides, log_step = (lse.stride() if lse is not None else (0, 0, 0)), 0
    if splits > 1:
        rows = batches * heads * sq
        target = torch.empty((splits, rows, dv), dtype=torch.float32, device=q.device)
        logs = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
        out_strides, out_step = (*part_strides(heads, group, sq, dv), 1), rows * dv
        log_strides, log_step, log_factor = part_strides(heads, group, sq, 1), rows, 1.0
    args = (
        q, latent_descriptor(cache, block_n, half), latent_descriptor(cache, block_n, half),
        latent_descriptor(cache, block_n, head_dim - dv), target, logs, table, inputs.get("lengths"), len_k, kv_heads,
        tiles, table.stride(0) if page else 0, attention_scale(attributes, head_dim) * 1.4426950408889634, log_factor,
        *q.stride(), *out_strides, out_step, *log_strides, log_step, half, head_dim - dv, block_n, knobs["num_stages"],
        splits, page, sq, group, bool(attributes.get("causal")) and sq > 1,
    )  # fmt: skip
    launches = [(attention_decode_latent, (batches * kv_heads * tiles, splits), args, {"num_warps": 4})]
    if splits > 1:
        strides = lse.stride() if lse is not None else (0, 0, 0)
        launches.append(combine_launch(target, logs, out, lse, None, None, strides, kv_heads, group))
    return launches
