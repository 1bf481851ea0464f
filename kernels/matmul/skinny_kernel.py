"""Matmul for few rows: operands swapped, so that b (the weight) stands on the tensor cores' wide side, with split-K.

The tile product is b_tile^T [BLOCK_N, BLOCK_K] @ a_tile^T [BLOCK_K, BLOCK_M]. With split-K every program leaves its
part in a workspace, and the last to arrive at a tile sums the parts in a fixed order: one launch, and always the same
bits.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired
from kernelwright.kernels.matmul.product_kernel import dot_precision, product
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer


@triton.jit
def weight_tile(b_desc, col, k, B_ROW: tl.constexpr):
    """The tile [columns of b, K] at (col, k)."""
    if B_ROW:
        tile = b_desc.load([k, col]).T
    else:
        tile = b_desc.load([col, k])
    return tile


@triton.jit
def arrived_last(acc, right, places, inside, N, split, stride_ps, arrived, SPLIT_K: tl.constexpr, PAIRED: tl.constexpr):
    """Leave this program's part at `places`; (whether it is the tile's last, the parts' sums)."""
    mine = places + split.to(tl.int64) * stride_ps
    tl.store(mine, acc, mask=inside)
    if PAIRED:
        tl.store(mine + N, right, mask=inside)
    # every thread's stores must be done before this program counts as arrived
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        acc = tl.zeros(acc.shape, acc.dtype)
        if PAIRED:
            right = tl.zeros(acc.shape, acc.dtype)
        for _ in range(SPLIT_K):
            acc += tl.load(places, mask=inside, other=0, cache_modifier=".cg")
            if PAIRED:
                right += tl.load(places + N, mask=inside, other=0, cache_modifier=".cg")
            places += stride_ps
        # the counter goes back to zero for the next launch
        tl.atomic_xchg(arrived, 0, sem="relaxed")
    return is_last, acc, right


@triton.jit
def matmul_skinny(
    a_desc, b_desc, c_ptr, operands, partial_ptr, arrived_ptr, M, N, K, stride_ps, stride_pm, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    B_ROW: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K * SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    right = acc
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K
        x = a_desc.load([tile_m * BLOCK_M, k]).T
        acc = product(weight_tile(b_desc, tile_n * BLOCK_N, k, B_ROW), x, acc, PRECISION)
        if PAIRED:
            right = product(weight_tile(b_desc, N + tile_n * BLOCK_N, k, B_ROW), x, right, PRECISION)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (cols[:, None] < N) & (rows[None, :] < M)
    is_last = True
    if SPLIT_K > 1:
        places = partial_ptr + rows.to(tl.int64)[None, :] * stride_pm + cols[:, None]
        arrived = arrived_ptr + tile_m * tl.num_programs(0) + tile_n
        is_last, acc, right = arrived_last(
            acc, right, places, inside, N, split, stride_ps, arrived, SPLIT_K, PAIRED
        )  # fmt: skip
    if is_last:
        if PAIRED:
            done = finish_pair(
                acc.to(tl.float32).T, right.to(tl.float32).T, operands, 0, rows, cols, M, N, STEPS
            ).T  # fmt: skip
        else:
            done = finish(acc.to(tl.float32).T, operands, 0, rows, cols, M, N, STEPS).T
        c = c_ptr + rows.to(tl.int64)[None, :] * stride_cm + cols.to(tl.int64)[:, None] * stride_cn
        tl.store(c, done.to(c_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out [M, N]: a [M, K], b [K, N]."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    b_row = b.stride(1) == 1
    weight, b_block = (b, [block_k, block_n]) if b_row else (b.T, [block_n, block_k])
    grid = (triton.cdiv(n, block_n), triton.cdiv(m, block_m), split_k)
    partial, arrived, part_strides = None, None, (0, 0)
    if split_k > 1:
        partial = partial_buffer(a, b, split_k)
        part_strides = (partial.stride(0), partial.stride(2))
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=out.device)
    steps, operands = chain_of(inputs, epilogue)
    args = (
        TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k]),
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), b_block),
        out, operands, partial, arrived, m, n, k, *part_strides, *out.stride(), block_m, block_n, block_k, split_k,
        b_row, dot_precision(knobs["precision"], a), tl.int32 if a.dtype == torch.int8 else tl.float32,
        is_paired(epilogue), steps,
    )  # fmt: skip
    return [(matmul_skinny, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]
