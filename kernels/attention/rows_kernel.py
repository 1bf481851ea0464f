"""Rows of one head of q, k, v or a gradient as tiles, by plain pointers or by the bulk copy engine."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def places_of(start, local, stride, FAR: tl.constexpr):
    """Offsets of the rows start + local. FAR: those within a tile pass 2^31."""
    if FAR:
        local = local.to(tl.int64)
    return tl.cast(start, tl.int64) * stride + local * stride


@triton.jit
def row_tile(base, row_places, rows_exist, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
             FAR: tl.constexpr):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH of rows of D numbers, [rows, WIDTH]; zeros where there is nothing. rows_exist is
    None where all do."""
    dims = FIRST + tl.arange(0, WIDTH)
    inside = dims < D
    if FAR:
        dims = dims.to(tl.int64)
    places = base + row_places[:, None] + dims[None, :] * stride_d
    if rows_exist is not None:
        if FIRST + WIDTH > D:
            tile = tl.load(places, mask=rows_exist[:, None] & inside[None, :], other=0.0)
        else:
            tile = tl.load(places, mask=rows_exist[:, None], other=0.0)
    elif FIRST + WIDTH > D:
        tile = tl.load(places, mask=inside[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def head_rows(source, place, start, local, exist, strides, D: tl.constexpr, WIDTH: tl.constexpr, BULK: tl.constexpr,
              FAR: tl.constexpr):  # fmt: skip
    """Rows start + local of one head, [rows, WIDTH]. place: batch, head and the sequence's first row.

    BULK: source is a descriptor of `bulk_rows`, and rows behind a packed sequence are those of the next one; otherwise
    it is a pointer, and rows that do not exist are zeros. strides: of batch, head, row and head dimension.
    """
    if BULK:
        if len(source.shape) == 3:
            tile = source.load([(place[2] + start).to(tl.int32), place[1].to(tl.int32), 0])
        else:
            tile = source.load([place[0].to(tl.int32), place[1].to(tl.int32), start, 0])
        tile = tile.reshape((local.shape[0], WIDTH))
    else:
        base = source + place[0] * strides[0] + place[1] * strides[1] + place[2] * strides[2]
        tile = row_tile(base, places_of(start, local, strides[2], FAR), exist, strides[3], 0, WIDTH, D, FAR)
    return tile


def strides_of(tensor):
    """Strides of batch, head, row and head dimension of [B, H, S, D] or packed [T, H, D]."""
    if tensor.dim() == 4:
        return tensor.stride()
    row, head, dim = tensor.stride()
    return 0, head, row, dim


def bulk_rows(tensor, rows, width):
    """A descriptor of [B, H, S, D] or packed [T, H, D] for tiles of `rows` rows of one head by `width` numbers."""
    block = [rows, 1, width] if tensor.dim() == 3 else [1, 1, rows, width]
    return bulk_tiles(tensor, block)


def bulk_tiles(tensor, block):
    """A descriptor for blocks of a tensor. What has size 1 gets a stride that the bulk copy engine takes."""
    whole = 16 // tensor.element_size()
    any_stride = max(whole, tensor.shape[-1] // whole * whole)
    strides = [tensor.stride(i) if tensor.shape[i] > 1 else any_stride for i in range(tensor.dim() - 1)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block)
