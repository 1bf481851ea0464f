"""Gradient of the input where no two taps meet one pixel: kernels no larger than the stride, as patch embeddings have.

The input falls into cells of stride x stride pixels, each met by one pixel of the output alone. Its gradient is a
matrix product: rows are cells, columns the pixels and channels of a cell, and the sum runs over the filters. Columns of
pixels that no tap meets have weights of zero, so that every pixel is written, and once.
"""

import triton
import triton.language as tl

from kernelwright.kernels.conv2d.layout_copy_kernel import common_unit
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def conv_patch_gradient(
    d_out_ptr, w_ptr, x_ptr, d_strides, w_strides, x_strides, ROWS, CELLS_H, CELLS_W, FILTERS, OUT_H, OUT_W, IN_H, IN_W,
    CHANNELS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, CHANNELS_LAST: tl.constexpr, W_DENSE: tl.constexpr,
    W_UNIT: tl.constexpr, X_DENSE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile. Cells are (n, i, j), columns (r, s, c), or (c, r, s) where channels are not last in memory: pixel
    (i * STRIDE_H - PAD_H + r, j * STRIDE_W - PAD_W + s) of channel c.

    W_DENSE: a filter's weights lie in the order of the columns, filters a multiple of W_UNIT elements apart (w_strides
    counts in them). X_DENSE: pixels of a row follow each other without gaps, channels last.
    WHOLE: every cell lies inside of the input.
    """
    COLS: tl.constexpr = CHANNELS * STRIDE_H * STRIDE_W
    tiles_n: tl.constexpr = (COLS + BLOCK_N - 1) // BLOCK_N
    rows = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    j = rows % CELLS_W
    i = rows // CELLS_W % CELLS_H
    n = (rows // CELLS_W // CELLS_H).to(tl.int64)
    if CHANNELS_LAST:
        c = cols % CHANNELS
        s = cols // CHANNELS % STRIDE_W
        r = cols // (CHANNELS * STRIDE_W)
    else:
        s = cols % STRIDE_W
        r = cols // STRIDE_W % STRIDE_H
        c = cols // (STRIDE_W * STRIDE_H)
    met = (rows < ROWS) & (i < OUT_H) & (j < OUT_W)
    weighted = cols < COLS
    if not W_DENSE:
        weighted = weighted & (r < R) & (s < S)
    lines = n * d_strides[0] + i.to(tl.int64) * d_strides[2] + j.to(tl.int64) * d_strides[3]
    if W_DENSE:
        places = cols.to(tl.int64)
    else:
        places = c.to(tl.int64) * w_strides[1] + r.to(tl.int64) * w_strides[2] + s.to(tl.int64) * w_strides[3]
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(FILTERS, BLOCK_K)):
        k = step * BLOCK_K + ks
        inside, w_inside = met[:, None], weighted[None, :]
        if not EVEN_K:
            inside = inside & (k < FILTERS)[None, :]
            w_inside = w_inside & (k < FILTERS)[:, None]
        wide = k.to(tl.int64)
        left = tl.load(d_out_ptr + lines[:, None] + (wide * d_strides[1])[None, :], mask=inside, other=0.0)
        right = tl.load(w_ptr + (wide * (w_strides[0] * W_UNIT))[:, None] + places[None, :], mask=w_inside, other=0.0)
        acc = product(left, right, acc, PRECISION)
    inside = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
    if not WHOLE:
        p = (i * STRIDE_H - PAD_H)[:, None] + r[None, :]
        q = (j * STRIDE_W - PAD_W)[:, None] + s[None, :]
        inside = inside & (p >= 0) & (p < IN_H) & (q >= 0) & (q < IN_W)
    first = n * x_strides[0] + (i * STRIDE_H - PAD_H).to(tl.int64) * x_strides[2]
    first += (j * STRIDE_W - PAD_W).to(tl.int64) * x_strides[3]
    if X_DENSE:
        within = r.to(tl.int64) * x_strides[2] + cols % (CHANNELS * STRIDE_W)
    else:
        within = c.to(tl.int64) * x_strides[1] + r.to(tl.int64) * x_strides[2] + s.to(tl.int64) * x_strides[3]
    tl.store(x_ptr + first[:, None] + within[None, :], acc.to(x_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the gradient of the input to out [N, C, H, W]. inputs: "d_out" and "w"."""
    if out.numel() == 0:
        return []
    d_out, weight = inputs["d_out"], inputs["w"]
    stride, pad = ((attributes[f"{x}_h"], attributes[f"{x}_w"]) for x in ("stride", "pad"))
    n, channels, *sizes = out.shape
    cells = [(size - 1 + edge) // step + 1 for size, edge, step in zip(sizes, pad, stride, strict=True)]
    rows, cols, filters = n * cells[0] * cells[1], channels * stride[0] * stride[1], d_out.shape[1]
    block_m, block_n, block_k = (knobs[name] for name in ("block_m", "block_n", "block_k"))
    last = out.stride(1) == 1 and channels > 1
    # as the columns are ordered
    filter_of = (weight.permute(0, 2, 3, 1) if last else weight)[0]
    w_dense = tuple(weight.shape[2:]) == stride and filter_of.is_contiguous()
    whole = pad == (0, 0) and all(size % step == 0 for size, step in zip(sizes, stride, strict=True))
    unit = common_unit([weight.stride(0)], 16 // weight.element_size())
    args = (
        d_out, weight, out, d_out.stride(), (weight.stride(0) // unit, *weight.stride()[1:]), out.stride(),
        rows, *cells, filters, *d_out.shape[2:], *sizes, channels, *weight.shape[2:], *stride, *pad, last, w_dense,
        unit, last and out.stride(3) == channels, whole, block_m, block_n, block_k, filters % block_k == 0,
        dot_precision(knobs["precision"], d_out),
    )  # fmt: skip
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(cols, block_n),)
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(conv_patch_gradient, grid, args, options)]
