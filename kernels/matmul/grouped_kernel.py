"""Grouped matmul by TMA: out[rows of g] = epilogue(a[rows of g] @ b[g]); one program a multiprocessor walks all tiles.

A tile that reaches past its expert reads rows of the next one, and they are not written. With SWAP the weight stands on
the tensor cores' wide side, so that a tile of few rows still uses them whole.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, tile_of
from kernelwright.kernels.matmul.experts_kernel import group_of, group_tiles
from kernelwright.kernels.matmul.product_kernel import dot_precision, product

ROWS_END = tl.constexpr(2**30)


@triton.jit
def expert_tile(b_desc, group, k, col, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, B_ROW: tl.constexpr):
    """The tile [BLOCK_K, BLOCK_N] of expert `group` at (k, col)."""
    if B_ROW:
        y = b_desc.load([group, k, col]).reshape(BLOCK_K, BLOCK_N)
    else:
        y = b_desc.load([group, col, k]).reshape(BLOCK_N, BLOCK_K).T
    return y


@triton.jit
def accumulate(x, y, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ y; with SWAP acc and the product are transposed."""
    if SWAP:
        acc = product(y.T, x.T, acc, PRECISION)
    else:
        acc = product(x, y, acc, PRECISION)
    return acc


@triton.jit
def matmul_grouped(
    a_desc, b_desc, c_desc, c_ptr, offsets_ptr, operands, G, M, N, K, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, TMA_STORE: tl.constexpr, B_ROW: tl.constexpr,
    PRECISION: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    ends, tile_ends = group_tiles(offsets_ptr, G, BLOCK_M, BLOCK_G)
    tiles = tl.max(tile_ends, 0) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        group, first, last, before, after = group_of(tile // tiles_n, ends, tile_ends)
        tile_m, tile_n = tile_of(tile - before * tiles_n, after - before, tiles_n, GROUP_M)
        row = first + tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        right = acc
        for step in range(k_tiles):
            k = step * BLOCK_K
            x = a_desc.load([row, k])
            acc = accumulate(x, expert_tile(b_desc, group, k, col, BLOCK_K, BLOCK_N, B_ROW), acc, SWAP, PRECISION)
            if PAIRED:
                # N counts the result's columns: the other half of the gated product begins there
                y = expert_tile(b_desc, group, k, col + N, BLOCK_K, BLOCK_N, B_ROW)
                right = accumulate(x, y, right, SWAP, PRECISION)
        if SWAP:
            acc, right = acc.T, right.T
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        if PAIRED:
            acc = finish_pair(acc, right, operands, group, rows, cols, M, N, STEPS)
        else:
            acc = finish(acc, operands, group, rows, cols, M, N, STEPS)
        c = acc.to(c_ptr.dtype.element_ty)
        if TMA_STORE:
            # the hardware cuts the tile off at the last row of the group: `ragged` says how
            c_desc.store([ROWS_END, last, ROWS_END - last + row, col], c.reshape(1, 1, BLOCK_M, BLOCK_N))
        else:
            places = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
            tl.store(places, c, mask=(rows[:, None] < last) & (cols[None, :] < N))


def ragged(tensor, block):
    """A TMA descriptor of [M, N] for stores that end at any row r; tile (i, j) is [ROWS_END, r, ROWS_END - r + i, j].

    The third dimension ends at ROWS_END, so that rows from r on lie outside. The first two bring the address back: the
    steps of the first add up to 2^64 bytes (or a multiple), less ROWS_END rows.
    """
    step = tensor.stride(0)
    strides = [2**34 - step, step, step, 1]
    return TensorDescriptor(tensor, [2**31 - 2**16, 2**31 - 2**16, 2**30, tensor.shape[1]], strides, [1, 1, *block])


def resident_programs(tensor, each):
    """How many programs fill the GPU that holds the tensor, `each` to a multiprocessor; 1 where there is none."""
    return each * torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def plan(inputs, out, knobs, epilogue):
    """The launch that writes out [M, N]: a [M, K], b [G, K, N], offsets [G] (int32) the row at which each expert ends.

    Rows from the last end on are not written.
    """
    a, b, offsets = inputs["a"], inputs["b"], inputs["offsets"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0 or b.shape[0] == 0:
        return []
    block_m, block_n, block_k = (knobs[x] for x in ("block_m", "block_n", "block_k"))
    b_row = b.stride(2) == 1
    experts, b_block = (b, [1, block_k, block_n]) if b_row else (b.mT, [1, block_n, block_k])
    c_desc = ragged(out, [block_m, block_n]) if knobs["tma_store"] else None
    steps, operands = chain_of(inputs, epilogue)
    args = (
        TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k]),
        TensorDescriptor(experts, list(experts.shape), list(experts.stride()), b_block),
        c_desc, out, offsets, operands, b.shape[0], m, n, k, *out.stride(),
        block_m, block_n, block_k, triton.next_power_of_2(b.shape[0]), knobs["group_m"], bool(knobs["swap"]),
        bool(knobs["tma_store"]), b_row, dot_precision(knobs["precision"], a),
        is_paired(epilogue), steps,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(matmul_grouped, (resident_programs(a, knobs["blocks_per_sm"]),), args, options)]
