"""The gradient of an additive mask: a program adds up, in a fixed order, all that reads its tile of the mask."""

import triton
import triton.language as tl

from kernelwright.kernels.attention.gradients_kernel import row_facts, score_gradients
from kernelwright.kernels.attention.rows_kernel import head_rows, places_of
from kernelwright.kernels.matmul.product_kernel import product


@triton.jit
def backward_mask(
    q, k, v, d_out, lse, delta, mask, alibi, d_mask,
    own_heads, Sq, Skv, batches, heads, tiles_n, scale,
    q_strides, k_strides, v_strides, d_out_strides, lse_strides, mask_strides, d_mask_strides,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVER_Q: tl.constexpr, OVER_K: tl.constexpr, CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of an additive mask: the sum over whatever reads it. batches, heads: how many of them
    repeat the mask (B or 1, H or 1). OVER_Q, OVER_K: whether all queries (keys) do."""
    tile_n = tl.program_id(0) % tiles_n
    tile_m = tl.program_id(0) // tiles_n
    own_batch = (tl.program_id(1) // own_heads).to(tl.int64)
    own_head = (tl.program_id(1) % own_heads).to(tl.int64)
    shift = 0
    if BOTTOM_RIGHT:
        shift = Skv - Sq
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    none = total
    first_m, last_m = tile_m * BLOCK_M, tile_m * BLOCK_M + 1
    first_n, last_n = tile_n * BLOCK_N, tile_n * BLOCK_N + 1
    if OVER_Q:
        last_m = Sq
    if OVER_K:
        last_n = Skv
    for repeat in range(batches * heads):
        batch = own_batch + repeat // heads
        head = own_head + repeat % heads
        slope = None
        if alibi is not None:
            slope = tl.load(alibi + head)
        facts = batch * lse_strides[0] + head * lse_strides[1]
        mask_head = mask + batch * mask_strides[0] + head * mask_strides[1]
        place = (batch, head, batch * 0)
        kv_place = (batch, head // GROUP, batch * 0)
        for start_m in range(first_m, last_m, BLOCK_M):
            rows = start_m + local_m
            exist = rows < Sq
            query = head_rows(q, place, start_m, local_m, exist, q_strides, D, BLOCK_D, False, FAR)
            gradient = head_rows(d_out, place, start_m, local_m, exist, d_out_strides, DV, BLOCK_DV, False, FAR)
            logs, deltas = row_facts(
                lse + facts, delta + facts, places_of(start_m, local_m, lse_strides[2], FAR), exist
            )
            for start_n in range(first_n, last_n, BLOCK_N):
                positions = start_n + local_n
                there = positions < Skv
                key = head_rows(k, kv_place, start_n, local_n, there, k_strides, D, BLOCK_D, False, FAR)
                value = head_rows(v, kv_place, start_n, local_n, there, v_strides, DV, BLOCK_DV, False, FAR)
                _, d_capped, _ = score_gradients(
                    product(query, key.T, none, PRECISION), product(gradient, value.T, none, PRECISION),
                    logs[:, None], deltas[:, None], (rows + shift)[:, None], positions[None, :],
                    exist[:, None] & there[None, :], slope, mask_head,
                    rows.to(tl.int64)[:, None] * mask_strides[2] + positions.to(tl.int64)[None, :] * mask_strides[3],
                    scale, CAUSAL, WINDOW, CAP, "additive", True,
                )  # fmt: skip
                total += d_capped
    d_mask += own_batch * d_mask_strides[0] + own_head * d_mask_strides[1]
    at_m, at_n = first_m + local_m, first_n + local_n
    inside = (at_m < Sq)[:, None] & (at_n < Skv)[None, :]
    if OVER_Q:
        # whoever reads one row of the mask wrote into all rows of the tile
        total = tl.broadcast_to(tl.sum(total, 0)[None, :], (BLOCK_M, BLOCK_N))
        inside = inside & (local_m == 0)[:, None]
    if OVER_K:
        total = tl.broadcast_to(tl.sum(total, 1)[:, None], (BLOCK_M, BLOCK_N))
        inside = inside & (local_n == 0)[None, :]
    at = at_m.to(tl.int64)[:, None] * d_mask_strides[2] + at_n.to(tl.int64)[None, :] * d_mask_strides[3]
    tl.store(d_mask + at, total.to(d_mask.dtype.element_ty), mask=inside)


def mask_launch(inputs, d_mask, delta, read, sizes, scale, ways):
    """The launch that writes d_mask [B, H, Sq, Skv], 1 where the mask repeats."""
    (b, h, sq, skv), own = inputs["mask"].shape, d_mask.shape
    over_q, over_k = own[2] == 1 and sq != 1, own[3] == 1 and skv != 1
    block = 32 if sizes[2] + sizes[4] > 256 else 64
    tiles_m = 1 if over_q else triton.cdiv(sq, block)
    tiles_n = 1 if over_k else triton.cdiv(skv, block)
    args = (
        *(inputs[name] for name in ("q", "k", "v", "d_out", "lse")), delta, inputs["mask"], inputs.get("alibi"), d_mask,
        own[1], sq, skv, b // own[0], h // own[1], tiles_n, scale, *read, d_mask.stride(), *sizes,
        block, block, over_q, over_k, *ways,
    )  # fmt: skip
    return backward_mask, (tiles_m * tiles_n, own[0] * own[1]), args, {"num_warps": 4, "num_stages": 2}
