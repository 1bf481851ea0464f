"""Matmul by triton's own warp specialisation: the compiler gives the copies to one group of warps and the products to
two others. One program a multiprocessor walks over the output tiles.

What triton 3.6 divides is narrow: num_warps must be 4, descriptors must be made in the kernel (those of the host keep
the size of an undivided tile), and the loop can be neither flattened nor write its tile in pieces.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, tile_of
from kernelwright.kernels.matmul.persistent_tma_kernel import multiprocessors, unaligned
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def matmul_warp_specialized_loop(
    a_ptr, b_ptr, c_ptr, operands, M, N, K, stride_a, stride_b, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, TMA_STORE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    if A_ROW:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    else:
        a_desc = tl.make_tensor_descriptor(a_ptr, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    if B_ROW:
        b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    if TMA_STORE:
        c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), warp_specialize=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        for step in range(k_tiles):
            k = step * BLOCK_K
            if A_ROW:
                x = a_desc.load([row, k])
            else:
                x = a_desc.load([k, row]).T
            if B_ROW:
                y = b_desc.load([k, col])
            else:
                y = b_desc.load([col, k]).T
            acc = product(x, y, acc, PRECISION)
        # not `row`: the second group of warps has that moved to its half of the tile, and its range of rows as well
        rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        done = finish(acc.to(tl.float32), operands, 0, rows, cols, M, N, STEPS).to(c_ptr.dtype.element_ty)
        if TMA_STORE:
            c_desc.store([row, col], done)
        else:
            c = c_ptr + rows[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
            tl.store(c, done, mask=(rows[:, None] < M) & (cols[None, :] < N))


def descriptor_memory(size, alignment, stream):
    """Memory for the descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out [M, N]: a [M, K], b [K, N], both aligned for TMA."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    triton.set_allocator(descriptor_memory)
    block_m, block_n, block_k = (knobs[x] for x in ("block_m", "block_n", "block_k"))
    # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
    by_tma = out.stride(1) == 1 and n * out.element_size() % 16 == 0 and not unaligned(out)
    steps, operands = chain_of(inputs, epilogue)
    a_row, b_row = a.stride(1) == 1, b.stride(1) == 1
    args = (
        a, b, out, operands, m, n, k, a.stride(0 if a_row else 1), b.stride(0 if b_row else 1), *out.stride(),
        block_m, block_n, block_k, knobs["group_m"], a_row, b_row, by_tma,
        dot_precision(knobs["precision"], a), tl.int32 if a.dtype == torch.int8 else tl.float32, steps,
    )  # fmt: skip
    programs = min(triton.cdiv(m, block_m) * triton.cdiv(n, block_n), multiprocessors(a))
    # the loop is given four warps, and four more for each of two groups that multiply
    options = {"num_warps": 4, "num_stages": knobs["num_stages"]}
    return [(matmul_warp_specialized_loop, (programs,), args, options)]
