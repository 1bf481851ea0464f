"""Matmul by plain pointers: any strides, any sizes, any GPU."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, strides3, tile_of
from kernelwright.kernels.matmul.product_kernel import dot_precision, product
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer, reduce_launch


@triton.jit
def matmul_pointer(
    a_ptr, b_ptr, c_ptr, operands, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_cs, stride_cb, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
    PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = tile_of(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = split * BLOCK_K + tl.arange(0, BLOCK_K)
    if WIDE:
        rows, cols, ks = rows.to(tl.int64), cols.to(tl.int64), ks.to(tl.int64)
    a = a_ptr + batch * stride_ab + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b = b_ptr + batch * stride_bb + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    row_mask = rows[:, None] < M
    col_mask = cols[None, :] < N
    step = BLOCK_K * SPLIT_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    right = acc
    for k in range(split * BLOCK_K, K, step):
        a_mask, b_mask = row_mask, col_mask
        if not EVEN_K:
            left = K - k
            a_mask = row_mask & (tl.arange(0, BLOCK_K)[None, :] < left)
            b_mask = col_mask & (tl.arange(0, BLOCK_K)[:, None] < left)
        x = tl.load(a, mask=a_mask, other=0.0)
        acc = product(x, tl.load(b, mask=b_mask, other=0.0), acc, PRECISION)
        if PAIRED:
            # N counts the result's columns: the other half of the gated product begins there
            right = product(x, tl.load(b + N * stride_bn, mask=b_mask, other=0.0), right, PRECISION)
        a += step * stride_ak
        b += step * stride_bk
    inside = row_mask & col_mask
    c = c_ptr + batch * stride_cb + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    if SPLIT_K > 1:
        c += split.to(tl.int64) * stride_cs
        if PAIRED:
            tl.store(c + N * stride_cn, right, mask=inside)
    elif PAIRED:
        acc = finish_pair(acc.to(tl.float32), right.to(tl.float32), operands, batch, rows, cols, M, N, STEPS)
    else:
        acc = finish(acc.to(tl.float32), operands, batch, rows, cols, M, N, STEPS)
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out: a [M, K], b [K, N], or both with a batch before."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape[-2:], out.shape[-1]
    if out.numel() == 0:
        return []
    paired = is_paired(epilogue)
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    target = out if split_k == 1 else partial_buffer(a, b, split_k)
    strides = (0, *strides3(out)) if split_k == 1 else target.stride()
    batch = out.shape[0] if out.dim() == 3 else 1
    wide = max(reach(t) for t in (a, b, out)) + block_k * split_k * max(*a.stride(), *b.stride()) >= 2**31
    grid = (batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n), split_k)
    steps, operands = chain_of(inputs, epilogue) if split_k == 1 else ("", ())
    args = (
        a, b, target, operands, m, n, k, *strides3(a), *strides3(b), *strides,
        block_m, block_n, block_k, knobs["group_m"], split_k, k % (block_k * split_k) == 0,
        wide or m * b.shape[-1] >= 2**31, dot_precision(knobs["precision"], a),
        tl.int32 if a.dtype == torch.int8 else tl.float32, paired, steps,
    )  # fmt: skip
    launch = (matmul_pointer, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})
    return [launch] if split_k == 1 else [launch, reduce_launch(target, out, inputs, epilogue)]


def reach(tensor):
    """The largest offset within a matrix that an element of the tensor has, in elements."""
    sizes = zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True)
    return sum((size - 1) * stride for size, stride in sizes if size)
