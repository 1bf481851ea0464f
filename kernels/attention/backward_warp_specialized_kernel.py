"""Gradients of attention by specialised warps (Hopper): one warp loads by TMA, two warpgroups of 64 keys each multiply.

A program has 128 keys of one key head and goes through the blocks of 64 queries that see them, head after head of the
group. Tiles stand keys by queries, so that weights and gradients of scores go from registers into the products for dv
and dk. For dq both warpgroups leave their gradients of scores in shared memory; each multiplies all of them with half
the columns of the keys, one block behind so that neither waits for the other, and the copy engine adds the result to
sums in fp32. Products start from minus the logarithm of the denominator and from minus delta, which are thus subtracted
for nothing.
"""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.attention.backward_warpgroup_kernel import (
    fb_add_dq,
    fb_barrier,
    fb_blocks,
    fb_loop,
    fb_start_dq,
    fb_tile,
    fb_write,
)
from kernelwright.kernels.attention.gradient_parts_kernel import gradient_parts, parts_launch
from kernelwright.kernels.attention.gradient_sums_kernel import end_launch, start_launch, sums_space
from kernelwright.kernels.attention.softmax_kernel import attention_scale

# triton 3.6 has the second name of the pair, 3.8 the first
fb_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def fb_producer(
    q, g, k, kc, v, logs, deltas, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, logs_ring, deltas_ring,
    kv_full, q_full, q_empty, g_full, g_empty, len_q, len_k, shift, heads, kv_heads, pairs, section,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_ring.shape[4]
    DV: gl.constexpr = g_ring.shape[4]
    tile, pair, part = fb_tile(gl.cdiv(len_k, 128), pairs, section, SPLITS)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    group = heads // kv_heads
    first, _, _, end = fb_blocks(tile, part, len_q, len_k, shift, BLOCK_M, CAUSAL, WINDOW, SPLITS)
    mbarrier.expect(kv_full.index(0), 2 * 128 * (2 * D + DV))
    for half in gl.static_range(2):
        row = tile * 128 + half * 64
        fb_load(k, [batch, kv_head, row, 0], kv_full.index(0), k_tiles.index(half))
        fb_load(v, [batch, kv_head, row, 0], kv_full.index(0), v_tiles.index(half))
        fb_load(kc, [batch, kv_head, tile * 128, half * (D // 2)], kv_full.index(0), kc_tiles.index(half))
    step = 0
    for member in range(group):
        head = kv_head * group + member
        for block in range(first, end):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            row = block * BLOCK_M
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), 2 * BLOCK_M * D + 4 * BLOCK_M)
            fb_load(q, [batch, head, row, 0], q_full.index(stage), q_ring.index(stage))
            fb_load(logs, [batch * heads + head, row], q_full.index(stage), logs_ring.index(stage))
            mbarrier.wait(g_empty.index(stage), phase ^ 1)
            mbarrier.expect(g_full.index(stage), 2 * BLOCK_M * DV + 4 * BLOCK_M)
            fb_load(g, [batch, head, row, 0], g_full.index(stage), g_ring.index(stage))
            fb_load(deltas, [batch * heads + head, row], g_full.index(stage), deltas_ring.index(stage))
            step += 1


@gluon.jit
def fb_consumer(
    WHICH: gl.constexpr, dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles,
    logs_ring, deltas_ring, kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift, heads,
    kv_heads, pairs, section, d_dim, v_dim, scale, factor, cap,
    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_ring.shape[4]
    DV: gl.constexpr = g_ring.shape[4]
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    tile, pair, part = fb_tile(gl.cdiv(len_k, 128), pairs, section, SPLITS)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    group = heads // kv_heads
    first, masked_end, whole_end, end = fb_blocks(tile, part, len_q, len_k, shift, BLOCK_M, CAUSAL, WINDOW, SPLITS)
    key = tile * 128 + WHICH * 64
    k_tile = k_tiles.index(WHICH).reshape((64, D))
    v_tile = v_tiles.index(WHICH).reshape((64, DV))
    dk = gl.zeros([64, D], gl.float32, KEYS)
    dv = gl.zeros([64, DV], gl.float32, VALUES)
    # before the first block stands one that adds zeros
    before_head = kv_head * group
    before_row = first * BLOCK_M
    step = 0
    ds_tiles.index(0).slice(WHICH * 64, 64).store(gl.zeros([64, BLOCK_M], q_ring.dtype, SCORES))
    fence_async_shared()
    fb_barrier()
    mbarrier.arrive(ds_full.index(0), count=1)
    mbarrier.wait(kv_full.index(0), 0)
    for member in range(group):
        head = kv_head * group + member
        dk, dv, before_head, before_row, step = fb_loop(
            WHICH, dk, dv, before_head, before_row, step, q_ring, g_ring, k_tile, kc_tiles, v_tile, ds_tiles, dq_tiles,
            sums, logs_ring, deltas_ring, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, batch, head, first,
            masked_end, whole_end, end, key, len_k, shift, factor, cap, BLOCK_M, STAGES,
            CAUSAL or WINDOW > 0 or RAGGED, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
    dq = fb_start_dq(WHICH, step, ds_tiles, kc_tiles, ds_full, BLOCK_M, D)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    fb_add_dq(WHICH, dq, sums, dq_tiles, batch, before_head, before_row, BLOCK_M, D)
    # each part of the queries writes its own sums
    place = part * (pairs // kv_heads) + batch
    fb_write(dk * scale, dk_ptr, place, kv_head, key, len_k, d_dim, dk_b, dk_h, dk_s, dk_d)
    fb_write(dv, dv_ptr, place, kv_head, key, len_k, v_dim, dv_b, dv_h, dv_s, dv_d)
    tma.store_wait(0)


@gluon.jit
def fb_consumer_0(
    dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring, deltas_ring,
    kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift, heads, kv_heads, pairs, section,
    d_dim, v_dim, scale, factor, cap, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    fb_consumer(
        0, dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring, deltas_ring,
        kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift, heads, kv_heads, pairs,
        section, d_dim, v_dim, scale, factor, cap, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
        BLOCK_M, STAGES, CAUSAL, WINDOW, SOFTCAP, RAGGED, SPLITS,
    )  # fmt: skip


@gluon.jit
def fb_consumer_1(
    dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring, deltas_ring,
    kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift, heads, kv_heads, pairs, section,
    d_dim, v_dim, scale, factor, cap, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    fb_consumer(
        1, dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring, deltas_ring,
        kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift, heads, kv_heads, pairs,
        section, d_dim, v_dim, scale, factor, cap, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
        BLOCK_M, STAGES, CAUSAL, WINDOW, SOFTCAP, RAGGED, SPLITS,
    )  # fmt: skip


@gluon.jit
def backward_warp_specialized(
    q, g, k, kc, v, logs, deltas, sums, dk_ptr, dv_ptr, len_q, len_k, shift, heads, kv_heads, pairs, section, d_dim,
    v_dim, scale, factor, cap, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    RAGGED: gl.constexpr, SPLITS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, DS_LAYOUT: gl.constexpr,
):  # fmt: skip
    """pairs: sequences times key heads. section: how many of them a run of programs shares. SPLITS: parts of the
    queries, each of which has sums of dk and dv of its own."""
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, BLOCK_M, D], q.layout)
    g_ring = gl.allocate_shared_memory(g.dtype, [STAGES, 1, 1, BLOCK_M, DV], g.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [2, 1, 1, 64, D], k.layout)
    kc_tiles = gl.allocate_shared_memory(k.dtype, [2, 1, 1, 128, D // 2], kc.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [2, 1, 1, 64, DV], v.layout)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [2, 128, BLOCK_M], DS_LAYOUT)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BLOCK_M, D // 2], sums.layout)
    logs_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], logs.layout)
    deltas_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], deltas.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(g_full.index(i), count=1)
        mbarrier.init(g_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                fb_consumer_0,
                (
                    dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring,
                    deltas_ring, kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift,
                    heads, kv_heads, pairs, section, d_dim, v_dim, scale, factor, cap,
                    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d, BLOCK_M, STAGES, CAUSAL, WINDOW, SOFTCAP, RAGGED,
                    SPLITS,
                ),
            ),
            (
                fb_consumer_1,
                (
                    dk_ptr, dv_ptr, sums, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, ds_tiles, dq_tiles, logs_ring,
                    deltas_ring, kv_full, q_full, q_empty, g_full, g_empty, ds_full, ds_empty, len_q, len_k, shift,
                    heads, kv_heads, pairs, section, d_dim, v_dim, scale, factor, cap,
                    dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s, dv_d, BLOCK_M, STAGES, CAUSAL, WINDOW, SOFTCAP, RAGGED,
                    SPLITS,
                ),
            ),
            (
                fb_producer,
                (
                    q, g, k, kc, v, logs, deltas, q_ring, g_ring, k_tiles, kc_tiles, v_tiles, logs_ring, deltas_ring,
                    kv_full, q_full, q_empty, g_full, g_empty, len_q, len_k, shift, heads, kv_heads, pairs, section,
                    BLOCK_M, STAGES, CAUSAL, WINDOW, SPLITS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def tile_descriptor(tensor, rows, width):
    """A descriptor of a tensor [B, H, S, D] for boxes of `rows` positions and `width` elements of one head; the stride
    of a dimension with one place says nothing, and may be one that the copy engine does not take."""
    bits = 8 * tensor.element_size()
    layout = gl.NVMMASharedLayout(min(128, width * bits // 8), bits, 4)
    strides = [step if size > 1 else 16 for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return GluonDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, width], layout)


def row_descriptor(tensor, rows):
    """A descriptor of fp32 numbers [B * H, S] for `rows` of one line."""
    return GluonDescriptor(tensor, list(tensor.shape), [tensor.shape[1], 1], [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def plan(inputs, outs, knobs, attributes):
    """Launches of a backward: from q, k, v, out, lse and d_out [B, H, S, D] to outs (dq, dk, dv)."""
    q, k, v, g = (inputs[name] for name in ("q", "k", "v", "d_out"))
    dq, dk, dv = outs
    batch, heads, len_q, head_dim = q.shape
    kv_heads, len_k, v_dim = k.shape[1], k.shape[2], v.shape[3]
    d_width, v_width = (max(64, triton.next_power_of_2(size)) for size in (head_dim, v_dim))
    block_m, pairs = knobs["block_m"], batch * kv_heads
    padded = triton.cdiv(len_q, block_m) * block_m
    space = sums_space((batch, heads, padded), d_width, q.device)
    logs, deltas = (row_descriptor(facts.view(batch * heads, padded), block_m) for facts in space[:2])
    scale, log2e = attention_scale(attributes, head_dim), 1.4426950408889634
    causal, cap = attributes.get("causal", ""), float(attributes.get("softcap", 0.0))
    factor = 2.0 * log2e * scale / cap if cap else scale * log2e
    bits, splits = 8 * q.element_size(), knobs["split_k"]
    parts = [gradient_parts(splits, tensor) for tensor in (dk, dv)]
    args = (
        tile_descriptor(q, block_m, d_width), tile_descriptor(g, block_m, v_width), tile_descriptor(k, 64, d_width),
        tile_descriptor(k, 128, d_width // 2), tile_descriptor(v, 64, v_width), logs, deltas,
        tile_descriptor(space[2], block_m, d_width // 2), *parts, len_q, len_k,
        0 if causal == "top_left" else len_k - len_q, heads, kv_heads, pairs, min(knobs["section"], pairs), head_dim,
        v_dim, scale, factor, cap * log2e, *parts[0].stride(), *parts[1].stride(), block_m, knobs["num_stages"],
        bool(causal), attributes.get("window", 0), cap > 0, len_k % 128 != 0, splits, d_width,
        v_width,
        gl.NVMMASharedLayout(128, bits, 2),
    )  # fmt: skip
    sums = [parts_launch(x, tensor) for x, tensor in zip(parts, (dk, dv), strict=True)] if splits > 1 else []
    return [
        start_launch(inputs, space, len_q, padded),
        (backward_warp_specialized, (triton.cdiv(len_k, 128) * pairs * splits,), args, {"num_warps": 4}),
        end_launch(inputs, space, dq, len_q, scale),
        *sums,
    ]
