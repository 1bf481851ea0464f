"""Gradients of attention by warpgroups of 64 keys (Hopper): which tiles a program has, and a warpgroup's products."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# triton 3.6 has the second name of each pair, 3.8 the first
fb_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def tma_add(descriptor, coord, src, _semantic=None):
    """The copy engine adds a tile in shared memory to the descriptor's tensor; triton has it as a function from 3.8."""
    places = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, places, src.handle)


fb_add = getattr(tma, "async_atomic_add", None) or builtin(tma_add)


@gluon.jit
def fb_tile(tiles, pairs, section, SPLITS: gl.constexpr):
    """(tile of keys, sequence and key head, part of the queries) of this program. Sections of `section` heads go from
    the first tile on, which under a causal mask has the most to do."""
    part = gl.program_id(0) % SPLITS
    place = gl.program_id(0) // SPLITS
    which = place // (section * tiles)
    rest = place % (section * tiles)
    wide = gl.minimum(section, pairs - which * section)
    return rest // wide, which * section + rest % wide, part


@gluon.jit
def fb_blocks(
    tile, part, len_q, len_k, shift,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """(first, end of the masked ones, end of those that see every key, end) block of queries of a tile of 128 keys and
    one of SPLITS parts of its queries, first <= .. <= end. Keys that do not exist count as hidden."""
    low = tile * 128 - shift
    high = gl.minimum(tile * 128 + 128, len_k) - 1 - shift
    end = gl.cdiv(len_q, BLOCK_M)
    first = 0
    masked_end = 0
    whole_end = end
    if CAUSAL:
        first = gl.maximum(low, 0) // BLOCK_M
        masked_end = gl.cdiv(gl.maximum(high, 0), BLOCK_M)
    if WINDOW > 0:
        end = gl.minimum(end, gl.cdiv(gl.maximum(high + WINDOW, 0), BLOCK_M))
        whole_end = gl.maximum(low + WINDOW, 0) // BLOCK_M
    if tile * 128 + 128 > len_k:
        whole_end = 0
    first = gl.minimum(first, end)
    count = end - first
    end = first + count * (part + 1) // SPLITS
    first = first + count * part // SPLITS
    masked_end = gl.minimum(gl.maximum(masked_end, first), end)
    whole_end = gl.minimum(gl.maximum(whole_end, masked_end), end)
    return first, masked_end, whole_end, end


@gluon.jit
def fb_facts(ring, stage, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """What each query of a block has, [BLOCK_M] of fp32."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.index(stage)._reinterpret(gl.float32, [BLOCK_M], LINE).load(gl.SliceLayout(0, LAYOUT))


@gluon.jit
def fb_start_dq(
    WHICH: gl.constexpr, turn, ds_tiles, kc_tiles, ds_full, BLOCK_M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Start the products of the gradients of scores of a turn with this warpgroup's half of the keys' columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    slot = turn & 1
    mbarrier.wait(ds_full.index(slot), (turn >> 1) & 1)
    dq = gl.zeros([BLOCK_M, D // 2], gl.float32, LAYOUT)
    ds_tile = ds_tiles.index(slot).permute((1, 0))
    dq = warpgroup_mma(ds_tile, kc_tiles.index(WHICH).reshape((128, D // 2)), dq, use_acc=False, is_async=True)
    return dq


@gluon.jit
def fb_add_dq(WHICH: gl.constexpr, dq, sums, dq_tiles, batch, head, row, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Have the copy engine add this warpgroup's columns of dq to the sums."""
    # the tile is free when the thread that started the last copy has seen it read
    tma.store_wait(0)
    fb_barrier()
    dq_tiles.index(WHICH).reshape((BLOCK_M, D // 2)).store(dq)
    fence_async_shared()
    fb_barrier()
    fb_add(sums, [batch, head, row, WHICH * (D // 2)], dq_tiles.index(WHICH))


@gluon.jit
def fb_hide(
    s, masked, query, key, len_k, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Scores, those that are hidden -inf. masked: whether there may be any in this tile; query, key: the tile's first,
    on one axis."""
    LAYOUT: gl.constexpr = s.type.layout
    if masked:
        keys = key + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        queries = query + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
        seen = (keys < len_k)[:, None]
        if CAUSAL:
            seen = seen & (keys[:, None] <= queries[None, :])
        if WINDOW > 0:
            seen = seen & (keys[:, None] > queries[None, :] - WINDOW)
        s = gl.where(seen, s, -float("inf"))
    return s


@gluon.jit
def fb_scores(s, logs, factor, cap, SOFTCAP: gl.constexpr):
    """(logarithms of weights, what the soft cap multiplies gradients by or anything) of a tile of products."""
    slope = s
    if SOFTCAP:
        ratio = 1.0 - 2.0 / (gl.exp2(s * factor) + 1.0)
        slope = 1.0 - ratio * ratio
        s = ratio * cap - logs[None, :]
    else:
        s = s * factor - logs[None, :]
    return s, slope


@gluon.jit
def fb_loop(
    WHICH: gl.constexpr, dk, dv, before_head, before_row, step, q_ring, g_ring, k_tile, kc_tiles, v_tile, ds_tiles,
    dq_tiles, sums, logs_ring, deltas_ring, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, batch, head, first,
    masked_end, whole_end, end, key, len_k, shift, factor, cap,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, MASKS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Blocks first .. end of the queries of one head, of which masked_end .. whole_end see every key. before_head,
    before_row: the block whose dq is still to be made; step: blocks since the kernel began."""
    D: gl.constexpr = q_ring.shape[4]
    DV: gl.constexpr = g_ring.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    INTO_DK: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    INTO_DV: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    for block in range(first, end):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        row = block * BLOCK_M
        q_tile = q_ring.index(stage).reshape((BLOCK_M, D))
        g_tile = g_ring.index(stage).reshape((BLOCK_M, DV))
        zeros = gl.zeros([64, BLOCK_M], gl.float32, SCORES)
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(g_full.index(stage), phase)
        dp = warpgroup_mma(v_tile, g_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        logs = fb_facts(logs_ring, stage, BLOCK_M, SCORES)
        s = warpgroup_mma_wait(1, deps=(s,))
        s, slope = fb_scores(s, logs, factor, cap, SOFTCAP)
        if MASKS:
            masked = (block < masked_end) | (block >= whole_end)
            s = fb_hide(s, masked, row + shift, key, len_k, BLOCK_M, CAUSAL, WINDOW)
        weights = gl.exp2(s)
        p = weights.to(q_ring.dtype)
        sum_v = warpgroup_mma(gl.convert_layout(p, INTO_DV), g_tile, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = weights * (dp - fb_facts(deltas_ring, stage, BLOCK_M, SCORES)[None, :])
        if SOFTCAP:
            ds = ds * slope
        narrow = ds.to(q_ring.dtype)
        turn = step + 1
        mbarrier.wait(ds_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        ds_tiles.index(turn & 1).slice(WHICH * 64, 64).store(narrow)
        fence_async_shared()
        fb_barrier()
        mbarrier.arrive(ds_full.index(turn & 1), count=1)
        dq = fb_start_dq(WHICH, step, ds_tiles, kc_tiles, ds_full, BLOCK_M, D)
        sum_k = warpgroup_mma(gl.convert_layout(narrow, INTO_DK), q_tile, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=(sum_v, dq))
        mbarrier.arrive(g_empty.index(stage), count=1)
        mbarrier.arrive(ds_empty.index(step & 1), count=1)
        fb_add_dq(WHICH, dq, sums, dq_tiles, batch, before_head, before_row, BLOCK_M, D)
        dk = warpgroup_mma_wait(0, deps=(sum_k,))
        mbarrier.arrive(q_empty.index(stage), count=1)
        before_head = head
        before_row = row
        step += 1
    return dk, dv, before_head, before_row, step


@gluon.jit
def fb_write(x, pointer, batch, head, row, len_k, width, strides_b, strides_h, strides_s, strides_d):
    """Write x [64, columns] of fp32 to the rows from `row` on."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    dims = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    spots = pointer + batch.to(gl.int64) * strides_b + head.to(gl.int64) * strides_h
    spots = spots + rows.to(gl.int64)[:, None] * strides_s + dims.to(gl.int64)[None, :] * strides_d
    gl.store(spots, x.to(pointer.dtype.element_ty), mask=(rows < len_k)[:, None] & (dims < width)[None, :])
