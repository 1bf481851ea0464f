"""Attention by warpgroups of 64 queries (Hopper): which tiles a program has, and a warpgroup's products and softmax."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# triton 3.6 has the second name of each pair, 3.8 the first
fa_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
fa_save = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def fa_turns(tiles, pairs):
    """How many tiles this program has."""
    programs = gl.num_programs(0)
    whole = tiles * pairs // programs
    mine = gl.program_id(0)
    place = whole * programs + mine + (whole & 1) * (programs - 1 - 2 * mine)
    return whole + (place < tiles * pairs).to(gl.int32)


@gluon.jit
def fa_tile(turn, tiles, pairs, section):
    """(tile of queries, sequence and head) of this program's turn. Each section of `section` heads goes from the last
    tile down, and every other turn runs through the programs backwards."""
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    place = turn * programs + mine + (turn & 1) * (programs - 1 - 2 * mine)
    which = place // (section * tiles)
    rest = place % (section * tiles)
    wide = gl.minimum(section, pairs - which * section)
    return tiles - 1 - rest // wide, which * section + rest % wide


@gluon.jit
def fa_blocks(
    tile, len_q, len_k, shift,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """(first, end of the masked ones, end of those that every query sees, last) block of keys of a tile, descending:
    first > .. >= last. There always is a first one, if need be without a visible key."""
    low = tile * BLOCK_M + shift
    high = gl.minimum((tile + 1) * BLOCK_M, len_q) - 1 + shift
    hi = len_k
    whole = len_k // BLOCK_N
    if CAUSAL:
        hi = gl.maximum(gl.minimum(len_k, high + 1), 0)
        whole = gl.minimum(whole, gl.maximum(low + 1, 0) // BLOCK_N)
    first = gl.maximum(gl.cdiv(hi, BLOCK_N) - 1, 0)
    last = 0
    inner = 0
    if WINDOW > 0:
        last = gl.minimum(gl.maximum(low - WINDOW + 1, 0) // BLOCK_N, first)
        inner = gl.cdiv(gl.maximum(high - WINDOW + 1, 0), BLOCK_N)
    masked_end = gl.maximum(gl.minimum(whole, first), last)
    whole_end = gl.maximum(gl.minimum(inner, masked_end), last)
    return first, masked_end, whole_end, last


@gluon.jit
def fa_scores(
    q0_tile, q1_tile, k0_ring, k1_ring, stage,
    BLOCK_N: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the products of this warpgroup's queries with a block of keys."""
    empty = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    k0_tile = k0_ring.index(stage).reshape((BLOCK_N, D0)).permute((1, 0))
    s = warpgroup_mma(q0_tile, k0_tile, empty, use_acc=False, is_async=True)
    if D1 > 0:
        k1_tile = k1_ring.index(stage).reshape((BLOCK_N, D1)).permute((1, 0))
        s = warpgroup_mma(q1_tile, k1_tile, s, is_async=True)
    return s


@gluon.jit
def fa_values(
    p, acc0, acc1, v0_ring, v1_ring, stage, BLOCK_N: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
):  # fmt: skip
    """Start the products of a block's weights with its values."""
    P0: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc0.type.layout, k_width=2)
    acc0 = warpgroup_mma(
        gl.convert_layout(p, P0), v0_ring.index(stage).reshape((BLOCK_N, V0)), acc0, is_async=True
    )  # fmt: skip
    if V1 > 0:
        P1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc1.type.layout, k_width=2)
        acc1 = warpgroup_mma(
            gl.convert_layout(p, P1), v1_ring.index(stage).reshape((BLOCK_N, V1)), acc1, is_async=True
        )  # fmt: skip
    return acc0, acc1


@gluon.jit
def fa_softmax(
    s, m, norm, places, key, len_k, factor, cap,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """(weights, what sums so far shrink by, maxima, sums of weights) of a block's scores. places: of the queries among
    the keys; key: the block's first."""
    if SOFTCAP:
        s = cap - 2.0 * cap / (gl.exp2(s * factor) + 1.0)
        factor = 1.0
    if MASKED:
        cols = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        seen = (cols < len_k)[None, :]
        if CAUSAL:
            seen = seen & (cols[None, :] <= places[:, None])
        if WINDOW > 0:
            seen = seen & (cols[None, :] > places[:, None] - WINDOW)
        s = gl.where(seen, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = top
    if MASKED:
        # a row may have seen no key yet
        base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s * factor - base[:, None])
    alpha = gl.exp2(m - base)
    return p, alpha, top, norm * alpha + gl.sum(p, 1)


@gluon.jit
def fa_loop(
    WHICH: gl.constexpr, p, acc0, acc1, m, norm, q0_tile, q1_tile, k0_ring, k1_ring, v0_ring, v1_ring,
    k_full, k_empty, v_full, v_empty, order, places, step, taken, start, count, len_k, factor, cap,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr,
    V1: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    PINGPONG: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """`count` blocks of keys downwards from the one that begins at `start`, each with the values of the block before.
    step: blocks since the kernel began; taken: turns on the tensor cores."""
    HALF: gl.constexpr = gl.SliceLayout(1, acc0.type.layout)
    PENDING: gl.constexpr = 2 if V1 > 0 else 1
    for i in range(count):
        stage = step % STAGES
        before = (step + STAGES - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        if PINGPONG:
            mbarrier.wait(order.index(WHICH), (taken & 1) ^ (1 - WHICH))
        s = fa_scores(q0_tile, q1_tile, k0_ring, k1_ring, stage, BLOCK_N, D0, D1, SCORES)
        mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
        sum0, sum1 = fa_values(p, acc0, acc1, v0_ring, v1_ring, before, BLOCK_N, V0, V1)
        if PINGPONG:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
            taken += 1
        s = warpgroup_mma_wait(PENDING, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, alpha, m, norm = fa_softmax(
            s, m, norm, places, start - i * BLOCK_N, len_k, factor, cap, MASKED, CAUSAL, WINDOW, SOFTCAP
        )  # fmt: skip
        shrink = gl.convert_layout(alpha, HALF)
        if V1 > 0:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(sum0, sum1))
            acc1 = acc1 * gl.convert_layout(alpha, gl.SliceLayout(1, acc1.type.layout))[:, None]
        else:
            acc0 = warpgroup_mma_wait(0, deps=(sum0,))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc0 = acc0 * shrink[:, None]
        p = weights.to(p.dtype)
        step += 1
    return p, acc0, acc1, m, norm, step, taken


@gluon.jit
def fa_write(
    x, out_desc, out_ptr, buffer, batch, head, row, column, len_q, v_dim,
    stride_ob, stride_oh, stride_os, stride_od, WIDTH: gl.constexpr, TMA_STORE: gl.constexpr,
):  # fmt: skip
    """Write x [64, WIDTH] of fp32 to the queries from `row` and the elements from `column` on."""
    if TMA_STORE:
        target = buffer._reinterpret(out_desc.dtype, [1, 1, 64, WIDTH], out_desc.layout)
        target.reshape((64, WIDTH)).store(x.to(out_desc.dtype))
        fence_async_shared()
        fa_barrier()
        fa_save(out_desc, [batch, head, row, column], target)
    else:
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        dims = column + gl.arange(0, WIDTH, gl.SliceLayout(0, x.type.layout))
        spots = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
        spots = spots + rows.to(gl.int64)[:, None] * stride_os + dims[None, :] * stride_od
        gl.store(spots, x.to(out_ptr.dtype.element_ty), mask=(rows < len_q)[:, None] & (dims < v_dim)[None, :])
