"""Copy a matrix that TMA or the tensor cores cannot read as it lies into a buffer that they can."""

import torch
import triton
import triton.language as tl


@triton.jit
def pack_rows(
    src_ptr, dst_ptr, ROWS, WORDS, stride_src, stride_dst, start, LAST,
    SHIFTED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy rows in words of 4 bytes, whatever byte they begin at. stride_src, start: in bytes, start from the word that
    src_ptr points into; WORDS, stride_dst: in words; LAST: number of the source's last word."""
    src = src_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    dst = dst_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows[:, None] < ROWS) & (cols[None, :] < WORDS)
    begin = start + rows * stride_src
    words = (begin // 4)[:, None] + cols[None, :]
    x = tl.load(src + words, mask=inside & (words <= LAST), other=0)
    if SHIFTED:
        bits = (begin % 4 * 8).to(tl.uint32)[:, None]
        y = tl.load(src + words + 1, mask=inside & (words < LAST), other=0)
        # two shifts, since one by 32 bits is not defined
        x = (x >> bits) | ((y << 1) << (31 - bits))
    tl.store(dst + rows[:, None] * stride_dst + cols[None, :], x, mask=inside)


def packed(tensor):
    """(a copy with rows of whole 128-byte lines, the launch that fills it) of a tensor [R, C] with unit stride in C."""
    rows, cols = tensor.shape
    size = tensor.element_size()
    pitch = triton.cdiv(cols * size, 128) * 128 // size
    buffer = torch.empty((rows, pitch), dtype=tensor.dtype, device=tensor.device)[:, :cols]
    # meta tensors have no address
    start = tensor.data_ptr() % 4 if tensor.device.type != "meta" else tensor.storage_offset() * size % 4
    base = tensor.as_strided((1,), (1,), tensor.storage_offset() - start // size)
    stride, words = tensor.stride(0) * size, triton.cdiv(cols * size, 4)
    last = (start + (rows - 1) * stride + cols * size - 1) // 4
    shifted = start % 4 != 0 or stride % 4 != 0
    grid = (triton.cdiv(rows, 8), triton.cdiv(words, 512))
    args = (base, buffer, rows, words, stride, pitch * size // 4, start, last, shifted, 8, 512)
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
