"""Batches of small products: a program computes one tile of several matrices in turn, each with all of K in one step.

Loads of the next matrices run while one is multiplied; tiles of one matrix are neighbours in the grid, whose first
dimension alone is used, so that a batch may be of any size.
"""

import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, strides3
from kernelwright.kernels.matmul.pointer_kernel import reach
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def matmul_batched_small(
    a_ptr, b_ptr, c_ptr, operands, BATCH, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_cb, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BATCHES: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    tile = tl.program_id(0) % tiles
    begin = tl.program_id(0) // tiles * BATCHES
    rows = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_mask, col_mask, a_k, b_k = rows[:, None] < M, cols[None, :] < N, ks[None, :] < K, ks[:, None] < K
    if WIDE:
        rows, cols, ks = rows.to(tl.int64), cols.to(tl.int64), ks.to(tl.int64)
    a_places = rows[:, None] * stride_am + ks[None, :] * stride_ak
    b_places = ks[:, None] * stride_bk + cols[None, :] * stride_bn
    c_places = rows[:, None] * stride_cm + cols[None, :] * stride_cn
    for step in tl.range(0, tl.minimum(BATCH - begin, BATCHES), num_stages=STAGES):
        batch = begin.to(tl.int64) + step
        x = tl.load(a_ptr + batch * stride_ab + a_places, mask=row_mask & a_k, other=0.0)
        y = tl.load(b_ptr + batch * stride_bb + b_places, mask=b_k & col_mask, other=0.0)
        acc = product(x, y, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), PRECISION)
        acc = finish(acc, operands, batch, rows, cols, M, N, STEPS)
        tl.store(c_ptr + batch * stride_cb + c_places, acc.to(c_ptr.dtype.element_ty), mask=row_mask & col_mask)


def plan(inputs, out, knobs, epilogue):
    """The launch that writes epilogue(a @ b) to out: a [batch, M, K], b [batch, K, N], and a block_k of at least K."""
    a, b = inputs["a"], inputs["b"]
    (batch, m, k), n = a.shape, out.shape[2]
    if out.numel() == 0:
        return []
    block_m, block_n, batches = knobs["block_m"], knobs["block_n"], knobs["batches"]
    steps, operands = chain_of(inputs, epilogue)
    args = (
        a, b, out, operands, batch, m, n, k, *strides3(a), *strides3(b), *strides3(out),
        block_m, block_n, knobs["block_k"], batches, knobs["num_stages"],
        max(reach(t) for t in (a, b, out)) + 256 * max(*a.stride()[1:], *b.stride()[1:]) >= 2**31,
        dot_precision(knobs["precision"], a), steps,
    )  # fmt: skip
    grid = (triton.cdiv(batch, batches) * triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    return [(matmul_batched_small, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]
