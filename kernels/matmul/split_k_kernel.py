"""The second pass of split-K: sum the partial products in a fixed order and run the epilogue."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, strides3


@triton.jit
def sum_parts(partial_ptr, places, inside, stride_ps, SPLIT_K: tl.constexpr):
    acc = tl.load(partial_ptr + places, mask=inside, other=0)
    for _ in tl.static_range(SPLIT_K - 1):
        partial_ptr += stride_ps
        acc += tl.load(partial_ptr + places, mask=inside, other=0)
    return acc.to(tl.float32)


@triton.jit
def matmul_reduce_splits(
    partial_ptr, c_ptr, operands, M, N, stride_ps, stride_pb, stride_pm, stride_cb, stride_cm, stride_cn,
    SPLIT_K: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    batch = (tl.program_id(0) // tiles_m).to(tl.int64)
    rows = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    places = batch * stride_pb + rows[:, None] * stride_pm + cols[None, :]
    acc = sum_parts(partial_ptr, places, inside, stride_ps, SPLIT_K)
    if PAIRED:
        right = sum_parts(partial_ptr, places + N, inside, stride_ps, SPLIT_K)
        acc = finish_pair(acc, right, operands, batch, rows, cols, M, N, STEPS)
    else:
        acc = finish(acc, operands, batch, rows, cols, M, N, STEPS)
    c = c_ptr + batch * stride_cb + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fill_zeros(ptr, COUNT, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptr + places, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=places < COUNT)


def zeros_launch(tensor):
    """The launch that fills a dense tensor with zeros."""
    return fill_zeros, (triton.cdiv(tensor.numel(), 4096),), (tensor, tensor.numel(), 4096), {"num_warps": 4}


def reduce_launch(partial, out, inputs, epilogue):
    """The launch that turns partial [split_k, batch, M, columns of b] into out [M, N] or [batch, M, N]."""
    split_k, batch, m, _ = partial.shape
    n = out.shape[-1]
    block_m = min(16, triton.next_power_of_2(m))
    block_n = max(16, min(256, 2048 // block_m))
    grid = (batch * triton.cdiv(m, block_m), triton.cdiv(n, block_n))
    steps, operands = chain_of(inputs, epilogue)
    args = (
        partial, out, operands, m, n, *partial.stride()[:3], *strides3(out),
        split_k, is_paired(epilogue), steps, block_m, block_n,
    )  # fmt: skip
    return matmul_reduce_splits, grid, args, {"num_warps": 4}


def partial_buffer(a, b, parts):
    """Workspace for the partial products of a [.., M, K] and b [.., K, N]: [parts, batch, M, N] in fp32 (int32)."""
    dtype = torch.int32 if a.dtype == torch.int8 else torch.float32
    batch = a.shape[0] if a.dim() == 3 else 1
    return torch.empty((parts, batch, a.shape[-2], b.shape[-1]), dtype=dtype, device=a.device)
