"""First layers: convolution of images with few channels, the products of all taps and channels in one short sum.

The operand is gathered pixel by pixel into tiles [pixels, BLOCK_K] of the tensor cores. "runs": a tile holds a run of
elements that are neighbours in memory, the taps of one row (in NHWC with all their channels), so that one comparison
tells whether an element exists; "flat": a tile holds BLOCK_K of all taps and channels, one by one.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places
from kernelwright.kernels.conv2d.conv_reduce_kernel import reach_of
from kernelwright.kernels.matmul.epilogue_kernel import tile_of
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def stem_chunk(
    acc, x_ptr, w_ptr, rows, y, z, row_inside, cols, col_inside, chunk, IN_H, IN_W, x_strides, w_strides,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    REDUCTION: tl.constexpr, LAST: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of one tile. rows: offsets of the pixels (y, z) that tap 0 meets. LAST: "c" or "s", which of
    channel and tap runs fastest."""
    ks = tl.arange(0, BLOCK_K)
    if REDUCTION == "runs":
        # a run: the taps of row r, in NHWC with their channels, else of one channel
        UNIT: tl.constexpr = C if LAST == "c" else 1
        k_inside = ks < S * UNIT
        s = ks // UNIT
        r = chunk % R
        c = ks % UNIT if LAST == "c" else ks * 0 + chunk // R
        run = z * UNIT
        element = run[:, None] + ks[None, :]
        in_y = y + r * DILATION_H
        inside = (row_inside & (in_y >= 0) & (in_y < IN_H))[:, None] & k_inside[None, :]
        inside = inside & (element >= 0) & (element < IN_W * UNIT)
        x_at = ks if LAST == "c" else ks + chunk // R * x_strides[1]
        x_at += r * DILATION_H * x_strides[2]
    else:
        k = chunk * BLOCK_K + ks
        k_inside = k < R * S * C
        if LAST == "c":
            c, s, r = k % C, k // C % S, k // (C * S)
        else:
            s, r, c = k % S, k // S % R, k // (S * R)
        in_y = y[:, None] + (r * DILATION_H)[None, :]
        in_z = z[:, None] + (s * DILATION_W)[None, :]
        inside = row_inside[:, None] & k_inside[None, :] & (in_y >= 0) & (in_y < IN_H) & (in_z >= 0) & (in_z < IN_W)
        x_at = c * x_strides[1] + r * DILATION_H * x_strides[2] + s * DILATION_W * x_strides[3]
    left = tl.load(x_ptr + (rows[:, None] + x_at[None, :]), mask=inside, other=0.0)
    w_at = c * w_strides[1] + r * w_strides[2] + s * w_strides[3]
    w_inside = k_inside[:, None] & col_inside[None, :]
    right = tl.load(w_ptr + (w_at[:, None] + cols[None, :] * w_strides[0]), mask=w_inside, other=0.0)
    return product(left, right, acc, PRECISION)


@triton.jit
def conv2d_stem(
    x_ptr, w_ptr, out_ptr, operands, x_strides, w_strides, out_strides, ROWS, COLS, IN_H, IN_W, OUT_H, OUT_W,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    REDUCTION: tl.constexpr, LAST: tl.constexpr, CHUNKS: tl.constexpr, UNROLL: tl.constexpr, INDEX: tl.constexpr,
    PRECISION: tl.constexpr, SUM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile of the result; ROWS pixels by COLS channels in all."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(ROWS, BLOCK_M), tl.cdiv(COLS, BLOCK_N), GROUP_M)
    pixels = tile_m.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    q = (pixels % OUT_W).to(tl.int32)
    p = (pixels // OUT_W % OUT_H).to(tl.int32)
    n = pixels // OUT_W // OUT_H
    row_inside, col_inside = pixels < ROWS, cols < COLS
    y = p * STRIDE_H - PAD_H
    z = q * STRIDE_W - PAD_W
    rows = n * x_strides[0] + y.to(INDEX) * x_strides[2] + z.to(INDEX) * x_strides[3]
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    if UNROLL:
        for chunk in tl.static_range(CHUNKS):
            acc = stem_chunk(
                acc, x_ptr, w_ptr, rows, y, z, row_inside, cols, col_inside, chunk, IN_H, IN_W, x_strides, w_strides,
                C, R, S, DILATION_H, DILATION_W, REDUCTION, LAST, BLOCK_K, PRECISION,
            )  # fmt: skip
    else:
        for chunk in range(CHUNKS):
            acc = stem_chunk(
                acc, x_ptr, w_ptr, rows, y, z, row_inside, cols, col_inside, chunk, IN_H, IN_W, x_strides, w_strides,
                C, R, S, DILATION_H, DILATION_W, REDUCTION, LAST, BLOCK_K, PRECISION,
            )  # fmt: skip
    if out_ptr.dtype.element_ty.is_floating():
        acc = acc.to(tl.float32)
    if STEPS != "":
        acc = finish_conv(acc, operands, n, p, q, cols, row_inside, col_inside, STEPS)
    places = out_ptr + image_places(n, p, q, cols, out_strides)
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


def plan(inputs, out, knobs, attributes, epilogue):
    """The launch that writes the convolution of x [N, C, H, W] with w [K, C, R, S] to out [N, K, P, Q]."""
    if out.numel() == 0:
        return []
    x, weight = inputs["x"], inputs["w"]
    c, r, s = weight.shape[1:]
    rows, cols = out.shape[0] * out.shape[2] * out.shape[3], out.shape[1]
    last = "c" if x.stride(1) == 1 else "s"
    block_k, runs = knobs["block_k"], knobs["reduction"] == "runs"
    chunks = (r if last == "c" else r * c) if runs else triton.cdiv(r * s * c, block_k)
    pairs = [attributes[f"{name}_{axis}"] for name in ("stride", "pad", "dilation") for axis in "hw"]
    steps, operands = conv_chain(inputs, epilogue)
    args = (
        x, weight, out, operands, x.stride(), weight.stride(), out.stride(), rows, cols, *x.shape[2:], *out.shape[2:],
        c, r, s, *pairs, knobs["block_m"], knobs["block_n"], block_k, 8, knobs["reduction"], last, chunks,
        bool(knobs["unroll"]), tl.int64 if max(rows, reach_of(x)) >= 2**31 - 2**16 else tl.int32,
        dot_precision(knobs["precision"], x), tl.int32 if x.dtype == torch.int8 else tl.float32, steps,
    )  # fmt: skip
    grid = (triton.cdiv(rows, knobs["block_m"]) * triton.cdiv(cols, knobs["block_n"]),)
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(conv2d_stem, grid, args, options)]
