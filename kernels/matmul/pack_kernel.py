"""Copy a matrix whose rows are not aligned for TMA into a buffer whose rows are."""

import torch
import triton
import triton.language as tl


@triton.jit
def pack_rows(
    src_ptr, dst_ptr, ROWS, COLS, stride_src, stride_dst, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows[:, None] < ROWS) & (cols[None, :] < COLS)
    x = tl.load(src_ptr + rows[:, None] * stride_src + cols[None, :], mask=inside, other=0.0)
    tl.store(dst_ptr + rows[:, None] * stride_dst + cols[None, :], x, mask=inside)


def packed(tensor):
    """(a copy with rows of whole 128-byte lines, the launch that fills it) of a tensor [R, C] with unit stride in C."""
    rows, cols = tensor.shape
    per_line = 128 // tensor.element_size()
    pitch = triton.cdiv(cols, per_line) * per_line
    buffer = torch.empty((rows, pitch), dtype=tensor.dtype, device=tensor.device)[:, :cols]
    grid = (triton.cdiv(rows, 8), triton.cdiv(cols, 512))
    args = (tensor, buffer, rows, cols, tensor.stride(0), buffer.stride(0), 8, 512)
    return buffer, (pack_rows, grid, args, {"num_warps": 4})


@triton.jit
def pack_columns(
    src_ptr, dst_ptr, ROWS, COLS, stride_src, stride_dst, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows[:, None] < ROWS) & (cols[None, :] < COLS)
    x = tl.load(src_ptr + rows[:, None] * stride_src + cols[None, :], mask=inside, other=0.0)
    tl.store(dst_ptr + cols[:, None] * stride_dst + rows[None, :], x.T, mask=inside.T)


def packed_transposed(tensor):
    """(the transpose [C, R] with rows of whole 128-byte lines, the launch that fills it) of a tensor [R, C] with unit
    stride in C."""
    rows, cols = tensor.shape
    per_line = 128 // tensor.element_size()
    pitch = triton.cdiv(rows, per_line) * per_line
    buffer = torch.empty((cols, pitch), dtype=tensor.dtype, device=tensor.device)[:, :rows]
    grid = (triton.cdiv(rows, 64), triton.cdiv(cols, 64))
    args = (tensor, buffer, rows, cols, tensor.stride(0), buffer.stride(0), 64, 64)
    return buffer, (pack_columns, grid, args, {"num_warps": 8})
