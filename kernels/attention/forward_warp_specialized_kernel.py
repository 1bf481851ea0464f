"""Attention forward by specialised warps (Hopper): one warp loads by TMA, two warpgroups of 64 queries each multiply.

A warpgroup has the product of the last block's weights and values in flight while it makes the weights of the next
block; the two may take turns on the tensor cores, so that one's softmax runs beside the other's products. Blocks of
keys are taken from the last one down: those that need comparing come first. Programs stay on their multiprocessor and
go through the tiles of queries forth and back, so that long and short rows of a causal mask even out. Where shared
memory has room for two tiles of queries, those of the next one arrive, and the result of the last one leaves, beside
the products of this one.
"""

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.attention.softmax_kernel import attention_parts, attention_scale
from kernelwright.kernels.attention.warpgroup_kernel import (
    fa_barrier,
    fa_blocks,
    fa_loop,
    fa_scores,
    fa_softmax,
    fa_tile,
    fa_turns,
    fa_values,
    fa_write,
)

# triton 3.6 has the second name of the pair, 3.8 the first
fa_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def fa_producer(
    q0, q1, k0, k1, v0, v1, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, len_q, len_k, shift, heads, pairs, section,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    D1: gl.constexpr, V1: gl.constexpr,
):  # fmt: skip
    tiles = gl.cdiv(len_q, 128)
    D0: gl.constexpr = k0_ring.shape[4]
    V0: gl.constexpr = v0_ring.shape[4]
    SLOTS: gl.constexpr = q0_ring.shape[0] // 2
    step = 0
    for turn in range(fa_turns(tiles, pairs)):
        tile, pair = fa_tile(turn, tiles, pairs, section)
        batch = pair // heads
        head = pair % heads
        slot = turn % SLOTS
        first, _, _, last = fa_blocks(tile, len_q, len_k, shift, 128, BLOCK_N, CAUSAL, WINDOW)
        mbarrier.wait(q_empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * 128 * (D0 + D1))
        for half in gl.static_range(2):
            row = tile * 128 + half * 64
            fa_load(q0, [batch, head, row, 0], q_full.index(slot), q0_ring.index(2 * slot + half))
            if D1 > 0:
                fa_load(q1, [batch, head, row, D0], q_full.index(slot), q1_ring.index(2 * slot + half))
        for i in range(first - last + 1):
            key = (first - i) * BLOCK_N
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * (D0 + D1))
            fa_load(k0, [batch, head // GROUP, key, 0], k_full.index(stage), k0_ring.index(stage))
            if D1 > 0:
                fa_load(k1, [batch, head // GROUP, key, D0], k_full.index(stage), k1_ring.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * (V0 + V1))
            fa_load(v0, [batch, head // GROUP, key, 0], v_full.index(stage), v0_ring.index(stage))
            if V1 > 0:
                fa_load(v1, [batch, head // GROUP, key, V0], v_full.index(stage), v1_ring.index(stage))
            step += 1


@gluon.jit
def fa_free(empty):
    """Give a buffer back when the copy engine has read the result in it."""
    # only the thread that started the copies waits for them
    tma.store_wait(0)
    fa_barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def fa_free_last(turn, empty):
    """Give the buffer of the turn before back, if there was one."""
    if turn > 0:
        fa_free(empty)


@gluon.jit
def fa_consumer(
    WHICH: gl.constexpr, out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim,
    factor, cap, stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    D1: gl.constexpr, V1: gl.constexpr, PINGPONG: gl.constexpr, TMA_STORE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    D0: gl.constexpr = k0_ring.shape[4]
    V0: gl.constexpr = v0_ring.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 16])
    SUMS1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V1 if V1 > 0 else V0, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SLOTS: gl.constexpr = q0_ring.shape[0] // 2
    tiles = gl.cdiv(len_q, 128)
    step = 0
    taken = 0
    for turn in range(fa_turns(tiles, pairs)):
        tile, pair = fa_tile(turn, tiles, pairs, section)
        batch = pair // heads
        head = pair % heads
        first, masked_end, whole_end, last = fa_blocks(tile, len_q, len_k, shift, 128, BLOCK_N, CAUSAL, WINDOW)
        slot = turn % SLOTS
        q0_tile = q0_ring.index(2 * slot + WHICH).reshape((64, D0))
        q1_tile = q1_ring.index(2 * slot + WHICH).reshape((64, D1 if D1 > 0 else D0))
        row = tile * 128 + WHICH * 64
        rows = row + gl.arange(0, 64, ROWS)
        places = rows + shift
        m = gl.full([64], -float("inf"), gl.float32, ROWS)
        norm = gl.zeros([64], gl.float32, ROWS)
        acc0 = gl.zeros([64, V0], gl.float32, SUMS0)
        acc1 = acc0
        if V1 > 0:
            acc1 = gl.zeros([64, V1], gl.float32, SUMS1)
        mbarrier.wait(q_full.index(slot), (turn // SLOTS) & 1)
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
        s = fa_scores(q0_tile, q1_tile, k0_ring, k1_ring, step % STAGES, BLOCK_N, D0, D1, SCORES)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        if TMA_STORE and SLOTS > 1:
            fa_free_last(turn, q_empty.index(1 - slot))
        weights, _, m, norm = fa_softmax(
            s, m, norm, places, first * BLOCK_N, len_k, factor, cap, True, CAUSAL, WINDOW, SOFTCAP
        )  # fmt: skip
        p = weights.to(k0_ring.dtype)
        step += 1
        if CAUSAL:
            p, acc0, acc1, m, norm, step, taken = fa_loop(
                WHICH, p, acc0, acc1, m, norm, q0_tile, q1_tile, k0_ring, k1_ring, v0_ring, v1_ring, k_full, k_empty,
                v_full, v_empty, order, places, step, taken, (first - 1) * BLOCK_N, first - masked_end, len_k, factor,
                cap, BLOCK_N, STAGES, D0, D1, V0, V1, True, CAUSAL, WINDOW, SOFTCAP, PINGPONG, SCORES,
            )  # fmt: skip
        p, acc0, acc1, m, norm, step, taken = fa_loop(
            WHICH, p, acc0, acc1, m, norm, q0_tile, q1_tile, k0_ring, k1_ring, v0_ring, v1_ring, k_full, k_empty,
            v_full, v_empty, order, places, step, taken, (masked_end - 1) * BLOCK_N, masked_end - whole_end, len_k,
            factor, cap, BLOCK_N, STAGES, D0, D1, V0, V1, False, CAUSAL, WINDOW, SOFTCAP, PINGPONG, SCORES,
        )  # fmt: skip
        if WINDOW > 0:
            p, acc0, acc1, m, norm, step, taken = fa_loop(
                WHICH, p, acc0, acc1, m, norm, q0_tile, q1_tile, k0_ring, k1_ring, v0_ring, v1_ring, k_full, k_empty,
                v_full, v_empty, order, places, step, taken, (whole_end - 1) * BLOCK_N, whole_end - last, len_k, factor,
                cap, BLOCK_N, STAGES, D0, D1, V0, V1, True, CAUSAL, WINDOW, SOFTCAP, PINGPONG, SCORES,
            )  # fmt: skip
        stage = (step + STAGES - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
        sum0, sum1 = fa_values(p, acc0, acc1, v0_ring, v1_ring, stage, BLOCK_N, V0, V1)
        dead = norm == 0.0
        inverse = gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, norm))
        if LSE:
            lse = gl.where(dead, -float("inf"), (m + gl.log2(gl.where(dead, 1.0, norm))) * 0.6931471805599453)
            spots = lse_ptr + batch.to(gl.int64) * stride_lb + head.to(gl.int64) * stride_lh + rows
            gl.store(spots, lse, mask=rows < len_q)
        if V1 > 0:
            acc0, acc1 = warpgroup_mma_wait(0, deps=(sum0, sum1))
        else:
            acc0 = warpgroup_mma_wait(0, deps=(sum0,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        acc0 = acc0 * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS0))[:, None]
        # the buffer of the queries, read for the last time, takes the result
        fa_write(
            acc0, out0, out_ptr, q0_ring.index(2 * slot + WHICH), batch, head, row, 0, len_q, v_dim,
            stride_ob, stride_oh, stride_os, stride_od, V0, TMA_STORE,
        )  # fmt: skip
        if V1 > 0:
            acc1 = acc1 * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS1))[:, None]
            fa_write(
                acc1, out1, out_ptr, q1_ring.index(2 * slot + WHICH), batch, head, row, V0, len_q, v_dim,
                stride_ob, stride_oh, stride_os, stride_od, V1, TMA_STORE,
            )  # fmt: skip
        if not TMA_STORE:
            mbarrier.arrive(q_empty.index(slot), count=1)
        elif SLOTS == 1:
            fa_free(q_empty.index(0))
    tma.store_wait(0)


@gluon.jit
def fa_consumer_0(
    out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor, cap,
    stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    D1: gl.constexpr, V1: gl.constexpr, PINGPONG: gl.constexpr, TMA_STORE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    fa_consumer(
        0, out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor, cap,
        stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
        BLOCK_N, STAGES, CAUSAL, WINDOW, SOFTCAP, D1, V1, PINGPONG, TMA_STORE, LSE,
    )  # fmt: skip


@gluon.jit
def fa_consumer_1(
    out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor, cap,
    stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    D1: gl.constexpr, V1: gl.constexpr, PINGPONG: gl.constexpr, TMA_STORE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    fa_consumer(
        1, out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty, k_full,
        k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor, cap,
        stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
        BLOCK_N, STAGES, CAUSAL, WINDOW, SOFTCAP, D1, V1, PINGPONG, TMA_STORE, LSE,
    )  # fmt: skip


@gluon.jit
def attention_warp_specialized(
    q0, q1, k0, k1, v0, v1, out0, out1, out_ptr, lse_ptr, len_q, len_k, shift, heads, pairs, section, v_dim, factor,
    cap, stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr,
    PINGPONG: gl.constexpr, TMA_STORE: gl.constexpr, LSE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """pairs: sequences times heads. section: how many of them a run of programs shares. Tiles are of 128 queries, of
    which SLOTS are in shared memory."""
    q0_ring = gl.allocate_shared_memory(q0.dtype, [2 * SLOTS, 1, 1, 64, D0], q0.layout)
    k0_ring = gl.allocate_shared_memory(k0.dtype, [STAGES, 1, 1, BLOCK_N, D0], k0.layout)
    v0_ring = gl.allocate_shared_memory(v0.dtype, [STAGES, 1, 1, BLOCK_N, V0], v0.layout)
    q1_ring = q0_ring
    k1_ring = k0_ring
    v1_ring = v0_ring
    if D1 > 0:
        q1_ring = gl.allocate_shared_memory(q1.dtype, [2 * SLOTS, 1, 1, 64, D1], q1.layout)
        k1_ring = gl.allocate_shared_memory(k1.dtype, [STAGES, 1, 1, BLOCK_N, D1], k1.layout)
    if V1 > 0:
        v1_ring = gl.allocate_shared_memory(v1.dtype, [STAGES, 1, 1, BLOCK_N, V1], v1.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    gl.warp_specialize(
        [
            (
                fa_consumer_0,
                (
                    out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor,
                    cap, stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
                    BLOCK_N, STAGES, CAUSAL, WINDOW, SOFTCAP, D1, V1, PINGPONG, TMA_STORE, LSE,
                ),
            ),
            (
                fa_consumer_1,
                (
                    out0, out1, out_ptr, lse_ptr, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, order, len_q, len_k, shift, heads, pairs, section, v_dim, factor,
                    cap, stride_ob, stride_oh, stride_os, stride_od, stride_lb, stride_lh,
                    BLOCK_N, STAGES, CAUSAL, WINDOW, SOFTCAP, D1, V1, PINGPONG, TMA_STORE, LSE,
                ),
            ),
            (
                fa_producer,
                (
                    q0, q1, k0, k1, v0, v1, q0_ring, q1_ring, k0_ring, k1_ring, v0_ring, v1_ring, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, len_q, len_k, shift, heads, pairs, section,
                    BLOCK_N, STAGES, GROUP, CAUSAL, WINDOW, D1, V1,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def head_descriptor(tensor, rows, width):
    """A descriptor of a tensor [B, H, S, D] for boxes of `rows` positions and `width` elements of one head; the stride
    of a dimension with one place says nothing, and may be one that the copy engine does not take."""
    bits = 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(min(128, width * bits // 8), bits, 4)
    strides = [step if size > 1 else 16 for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return GluonDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width], layout)


def head_descriptors(tensor, rows, first, second):
    """Descriptors of both parts of a head; the first one twice where there is no second."""
    one = head_descriptor(tensor, rows, first)
    return (one, head_descriptor(tensor, rows, second) if second else one)


def attention_programs(tensor, tiles):
    """Programs to launch: one a multiprocessor, and no more than there are tiles."""
    if not tensor.is_cuda:
        return 1
    return min(tiles, torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def query_slots(d_width, v_width, block_n, stages, element):
    """Tiles of 128 queries for which shared memory has room beside `stages` blocks of keys and values: 1 or 2."""
    needed = (2 * 128 * d_width + stages * block_n * (d_width + v_width)) * element
    return 2 if needed + 1024 <= 232448 else 1


def stored_by_tma(out, d_parts, v_parts):
    """Whether a tile of out passes through the queries' buffer to the copy engine. TMA writes whole pieces of 16 bytes:
    at the end of a row that is no such multiple it would run over."""
    steps = [step for size, step in zip(out.shape[:3], out.stride()[:3], strict=True) if size > 1]
    whole = all(x * out.element_size() % 16 == 0 for x in (out.shape[3], *steps)) and out.data_ptr() % 16 == 0
    return (
        whole and out.stride(3) == 1 and 0 not in steps and all(v <= d for v, d in zip(v_parts, d_parts, strict=True))
    )


def plan(inputs, out, knobs, attributes):
    """Launches that write the attention of inputs q, k and v [B, H, S, D] to out, or to (out, lse)."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, lse = out if isinstance(out, tuple) else (out, None)
    if out.numel() == 0:
        return []
    batch, heads, len_q, head_dim = q.shape
    len_k, v_dim = k.shape[2], v.shape[3]
    split = knobs["head"] == "split"
    d_parts, v_parts = attention_parts(head_dim, split, 16), attention_parts(v_dim, split, 16)
    block_n = knobs["block_n"]
    tma_store = stored_by_tma(out, d_parts, v_parts)
    outs = head_descriptors(out, 64, *v_parts) if tma_store else (None, None)
    causal, cap = attributes.get("causal", ""), float(attributes.get("softcap", 0.0))
    scale, log2e = attention_scale(attributes, head_dim), 1.4426950408889634
    pairs = batch * heads
    args = (
        *head_descriptors(q, 64, *d_parts), *head_descriptors(k, block_n, *d_parts),
        *head_descriptors(v, block_n, *v_parts), *outs, out, lse, len_q, len_k,
        0 if causal == "top_left" else len_k - len_q, heads, pairs, min(knobs["section"], pairs), v_dim,
        2.0 * log2e * scale / cap if cap else scale * log2e, cap * log2e, *out.stride(),
        *(lse.stride()[:2] if lse is not None else (0, 0)), block_n, knobs["num_stages"], heads // k.shape[1],
        bool(causal), attributes.get("window", 0), cap > 0, *d_parts, *v_parts, bool(knobs["pingpong"]), tma_store,
        lse is not None, query_slots(sum(d_parts), sum(v_parts), block_n, knobs["num_stages"], q.element_size()),
    )  # fmt: skip
    programs = attention_programs(q, triton.cdiv(len_q, 128) * pairs)
    return [(attention_warp_specialized, (programs,), args, {"num_warps": 4})]
