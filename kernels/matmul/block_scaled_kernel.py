"""Matmul of fp8 operands with fp32 scales for 1 x 128 pieces of a and 128 x 128 blocks of b, from sm_90 on.

Every step along K is one scale block: its sums start at zero and are added to the accumulator times both scales, in
fp32. A tile is no wider than a block of b, so that one number of b_scale serves it. Scales are asked for a step ahead.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, tile_of
from kernelwright.kernels.matmul.persistent_tma_kernel import destination, multiprocessors, store_pair, store_part
from kernelwright.kernels.matmul.skinny_kernel import arrived_last
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer


@triton.jit
def block_scales(
    as_ptr, bs_ptr, rows, col, block, M, K, stride_sm, stride_sk, stride_tk, stride_tn, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Scales of a's rows times that of b's columns from `col` on, in block `block` along K; zero past the ends."""
    inside = block < K // BLOCK_K
    places = as_ptr + rows.to(tl.int64) * stride_sm + block.to(tl.int64) * stride_sk
    a_scale = tl.load(places, mask=(rows < M) & inside, other=0.0)
    b_scale = tl.load(bs_ptr + block.to(tl.int64) * stride_tk + (col // 128) * stride_tn, mask=inside, other=0.0)
    return a_scale, b_scale


@triton.jit
def matmul_block_scaled(
    a_desc, b_desc, c_desc, as_ptr, bs_ptr, c_ptr, operands, M, N, K,
    stride_sm, stride_sk, stride_tk, stride_tn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    STORE: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for item in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(item, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PAIRED:
            right = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        first = tile_m * 0
        a_scale, b_scale = block_scales(
            as_ptr, bs_ptr, rows, col, first, M, K, stride_sm, stride_sk, stride_tk, stride_tn, BLOCK_K
        )  # fmt: skip
        for step in range(tl.cdiv(K, BLOCK_K)):
            a_coming, b_coming = block_scales(
                as_ptr, bs_ptr, rows, col, first + step + 1, M, K, stride_sm, stride_sk, stride_tk, stride_tn, BLOCK_K
            )  # fmt: skip
            x = a_desc.load([row, step * BLOCK_K])
            y = b_desc.load([col, step * BLOCK_K])
            acc += tl.dot(x, y.T) * (a_scale * b_scale)[:, None]
            if PAIRED:
                # N counts the result's columns: the other half of the gated product begins there
                z = b_desc.load([N + col, step * BLOCK_K])
                z_scale = tl.load(bs_ptr + (first + step).to(tl.int64) * stride_tk + (N + col) // 128 * stride_tn)
                right += tl.dot(x, z.T) * (a_scale * z_scale)[:, None]
            a_scale, b_scale = a_coming, b_coming
        if PAIRED:
            store_pair(
                acc, right, c_desc, c_ptr, operands, 0 * item, row, col, M, N, 0, stride_cm, stride_cn, STORE, STEPS
            )  # fmt: skip
        else:
            store_part(
                acc, c_desc, c_ptr, operands, 0 * item, row, col, 0 * item, M, N, 0, 0, stride_cm, stride_cn,
                STORE, STEPS,
            )  # fmt: skip


@triton.jit
def matmul_block_scaled_swapped(
    a_desc, b_desc, as_ptr, bs_ptr, c_ptr, operands, partial_ptr, arrived_ptr, M, N, K,
    stride_sm, stride_sk, stride_tk, stride_tn, stride_ps, stride_pm, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The same for few rows of a: b stands on the tensor cores' wide side, and parts along K meet in a workspace."""
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K * SPLIT_K)
    col = tile_n * BLOCK_N
    cols = col + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    right = acc
    first = split * steps
    a_scale, b_scale = block_scales(
        as_ptr, bs_ptr, rows, col, first, M, K, stride_sm, stride_sk, stride_tk, stride_tn, BLOCK_K
    )  # fmt: skip
    for step in range(steps):
        block = first + step
        a_coming, b_coming = block_scales(
            as_ptr, bs_ptr, rows, col, block + 1, M, K, stride_sm, stride_sk, stride_tk, stride_tn, BLOCK_K
        )  # fmt: skip
        x = a_desc.load([tile_m * BLOCK_M, block * BLOCK_K]).T
        acc += tl.dot(b_desc.load([col, block * BLOCK_K]), x) * (a_scale * b_scale)[None, :]
        if PAIRED:
            z = b_desc.load([N + col, block * BLOCK_K])
            places = bs_ptr + block.to(tl.int64) * stride_tk + (N + col) // 128 * stride_tn
            z_scale = tl.load(places, mask=block < K // BLOCK_K, other=0.0)
            right += tl.dot(z, x) * (a_scale * z_scale)[None, :]
        a_scale, b_scale = a_coming, b_coming
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
            done = finish_pair(acc.T, right.T, operands, 0, rows, cols, M, N, STEPS).T
        else:
            done = finish(acc.T, operands, 0, rows, cols, M, N, STEPS).T
        c = c_ptr + rows.to(tl.int64)[None, :] * stride_cm + cols.to(tl.int64)[:, None] * stride_cn
        tl.store(c, done.to(c_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out [M, N]: fp8 a [M, K] and b [K, N], both dense along K."""
    a, b, a_scale, b_scale = (inputs[name] for name in ("a", "b", "a_scale", "b_scale"))
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    # block scales are no steps of the chain, whatever their shape
    steps, operands = chain_of({name: x for name, x in inputs.items() if not name.endswith("_scale")}, epilogue)
    a_desc = TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k])
    b_desc = TensorDescriptor(b.T, list(b.T.shape), list(b.T.stride()), [block_n, block_k])
    scales = (*a_scale.stride(), *b_scale.stride())
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    tiles_m, tiles_n = triton.cdiv(m, block_m), triton.cdiv(n, block_n)
    if knobs["swap"]:
        partial, arrived, part_strides = None, None, (0, 0)
        if split_k > 1:
            partial = partial_buffer(a, b, split_k)
            part_strides = (partial.stride(0), partial.stride(2))
            arrived = torch.zeros(tiles_m * tiles_n, dtype=torch.int32, device=out.device)
        args = (
            a_desc, b_desc, a_scale, b_scale, out, operands, partial, arrived, m, n, k, *scales, *part_strides,
            *out.stride(), block_m, block_n, block_k, split_k, is_paired(epilogue), steps,
        )  # fmt: skip
        return [(matmul_block_scaled_swapped, (tiles_n, tiles_m, split_k), args, options)]
    _, _, store, _ = destination(a, b, out, knobs)
    c_desc = None
    if store == "tma":
        c_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), [block_m, block_n])
    args = (
        a_desc, b_desc, c_desc, a_scale, b_scale, out, operands, m, n, k, *scales, *out.stride(),
        block_m, block_n, block_k, knobs["group_m"], store, is_paired(epilogue), steps,
    )  # fmt: skip
    return [(matmul_block_scaled, (min(tiles_m * tiles_n, multiprocessors(a)),), args, options)]
