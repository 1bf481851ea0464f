"""Grouped matmul by plain pointers: out[rows of g] = epilogue(a[rows of g] @ b[g]); any strides, any GPU.

There are as many programs as the worst distribution of rows could need; those without a tile end at once.
"""

import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, tile_of
from kernelwright.kernels.matmul.experts_kernel import group_of, group_tiles
from kernelwright.kernels.matmul.pointer_kernel import reach
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def matmul_grouped_pointer(
    a_ptr, b_ptr, c_ptr, offsets_ptr, operands, G, M, N, K,
    stride_am, stride_ak, stride_bg, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    ends, tile_ends = group_tiles(offsets_ptr, G, BLOCK_M, BLOCK_G)
    if tile >= tl.max(tile_ends, 0) * tiles_n:
        return
    group, first, last, before, after = group_of(tile // tiles_n, ends, tile_ends)
    tile_m, tile_n = tile_of(tile - before * tiles_n, after - before, tiles_n, GROUP_M)
    rows = first + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if WIDE:
        rows, cols, ks = rows.to(tl.int64), cols.to(tl.int64), ks.to(tl.int64)
    a = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b = b_ptr + group.to(tl.int64) * stride_bg + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    row_mask = rows[:, None] < last
    col_mask = cols[None, :] < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    right = acc
    for k in range(0, K, BLOCK_K):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            a_mask = row_mask & (tl.arange(0, BLOCK_K)[None, :] < K - k)
            b_mask = col_mask & (tl.arange(0, BLOCK_K)[:, None] < K - k)
        x = tl.load(a, mask=a_mask, other=0.0)
        acc = product(x, tl.load(b, mask=b_mask, other=0.0), acc, PRECISION)
        if PAIRED:
            # N counts the result's columns: the other half of the gated product begins there
            right = product(x, tl.load(b + N * stride_bn, mask=b_mask, other=0.0), right, PRECISION)
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    if PAIRED:
        acc = finish_pair(acc, right, operands, group, rows, cols, M, N, STEPS)
    else:
        acc = finish(acc, operands, group, rows, cols, M, N, STEPS)
    c = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=row_mask & col_mask)


def plan(inputs, out, knobs, epilogue):
    """The launch that writes out [M, N]: a [M, K], b [G, K, N], offsets [G] (int32) the row at which each expert ends.

    Rows from the last end on are not written.
    """
    a, b, offsets = inputs["a"], inputs["b"], inputs["offsets"]
    (m, k), n, groups = a.shape, out.shape[1], b.shape[0]
    if out.numel() == 0 or groups == 0:
        return []
    block_m, block_n, block_k = (knobs[x] for x in ("block_m", "block_n", "block_k"))
    most_tiles = min(m, m // block_m + groups)
    steps, operands = chain_of(inputs, epilogue)
    wide = max(reach(t) for t in (a, b, out)) + block_k * max(*a.stride(), *b.stride()[1:]) >= 2**31
    args = (
        a, b, out, offsets, operands, groups, m, n, k, *a.stride(), *b.stride(), *out.stride(),
        block_m, block_n, block_k, triton.next_power_of_2(groups), knobs["group_m"], k % block_k == 0, wide,
        dot_precision(knobs["precision"], a), is_paired(epilogue), steps,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(matmul_grouped_pointer, (most_tiles * triton.cdiv(n, block_n),), args, options)]
