"""The second pass of split-K: sum the partial products in a fixed order and apply the epilogue."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import finish


@triton.jit
def matmul_reduce_splits(
    partial_ptr, bias_ptr, c_ptr, M, N, stride_ps, stride_cm, stride_cn,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    places = rows[:, None] * N + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.static_range(SPLIT_K):
        acc += tl.load(partial_ptr + places, mask=inside, other=0.0)
        partial_ptr += stride_ps
    acc = finish(acc, bias_ptr, cols, N, HAS_BIAS, ACTIVATION)
    tl.store(c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn, acc.to(c_ptr.dtype.element_ty), mask=inside)


def reduce_launch(partial, bias, out, split_k, activation):
    """The launch that turns partial [split_k, M, N] (fp32) into out [M, N]."""
    m, n = out.shape
    block_m = min(16, triton.next_power_of_2(m))
    block_n = max(16, min(256, 2048 // block_m))
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, block_n))
    args = (
        partial, bias, out, m, n, partial.stride(0), *out.stride(),
        split_k, bias is not None, activation, block_m, block_n,
    )  # fmt: skip
    return matmul_reduce_splits, grid, args, {"num_warps": 4}


def partial_buffer(out, split_k):
    """Workspace for the partial products: fp32 [split_k, M, N]."""
    return torch.empty((split_k, *out.shape), dtype=torch.float32, device=out.device)
