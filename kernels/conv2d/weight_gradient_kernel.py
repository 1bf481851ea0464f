"""The weight's gradient as a matrix product: rows are output channels, columns the input channels of every tap, and the
sum runs over all pixels of the gradient of the output."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_reduce_kernel import (
    conv_parts,
    conv_zeros_launch,
    part_strides,
    reach_of,
)
from kernelwright.kernels.conv2d.weight_parts_kernel import sum_weight_parts_launch
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def conv_weight_gradient(
    d_ptr, x_ptr, out_ptr, d_strides, x_strides, out_strides, stride_part,
    PIXELS, ROWS, CHANNELS, IN_H, IN_W, OUT_H, OUT_W,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient. ROWS and CHANNELS count output and input channels of a group, PIXELS is N * OUT_H *
    OUT_W.

    COLUMNS: "tap" gives a tile channels of one tap, "flat" cuts the channels of all taps into even tiles.
    """
    tiles_m = tl.cdiv(ROWS, BLOCK_M)
    blocks = tl.cdiv(CHANNELS, BLOCK_N)
    tiles_n = R * S * blocks if COLUMNS == "tap" else tl.cdiv(R * S * CHANNELS, BLOCK_N)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    group = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    split = tl.program_id(1)
    tile_m, tile_n = tile % tiles_m, tile // tiles_m
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    if COLUMNS == "tap":
        tap = tile_n // blocks
        c = tile_n % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        col_inside = c < CHANNELS
    else:
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tap, c = cols // CHANNELS, cols % CHANNELS
        col_inside = cols < R * S * CHANNELS
    if WIDE:
        rows, ks, c, tap = rows.to(tl.int64), ks.to(tl.int64), c.to(tl.int64), tap.to(tl.int64)
    r, s = tap // S, tap % S
    row_inside = rows < ROWS
    d_ptr += group * ROWS * d_strides[1]
    x_ptr += group * CHANNELS * x_strides[1]
    d_rows = rows * d_strides[1]
    x_cols = c * x_strides[1] + (r * DILATION_H * x_strides[2] + s * DILATION_W * x_strides[3])

    steps = tl.cdiv(PIXELS, BLOCK_K)
    per_split = tl.cdiv(steps, SPLIT_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        pixel = step * BLOCK_K + ks
        q = pixel % OUT_W
        p = pixel // OUT_W % OUT_H
        n = pixel // OUT_W // OUT_H
        here = pixel < PIXELS
        y = p * STRIDE_H - PAD_H
        x = q * STRIDE_W - PAD_W
        if COLUMNS == "tap":
            in_y, in_x = y + r * DILATION_H, x + s * DILATION_W
            inside = (here & (in_y >= 0) & (in_y < IN_H) & (in_x >= 0) & (in_x < IN_W))[:, None] & col_inside[None, :]
        else:
            in_y = y[:, None] + (r * DILATION_H)[None, :]
            in_x = x[:, None] + (s * DILATION_W)[None, :]
            inside = here[:, None] & col_inside[None, :]
            inside = inside & (in_y >= 0) & (in_y < IN_H) & (in_x >= 0) & (in_x < IN_W)
        d_at = n * d_strides[0] + p * d_strides[2] + q * d_strides[3]
        x_at = n * x_strides[0] + y * x_strides[2] + x * x_strides[3]
        left = tl.load(d_ptr + (d_rows[:, None] + d_at[None, :]), mask=row_inside[:, None] & here[None, :], other=0.0)
        right = tl.load(x_ptr + (x_at[:, None] + x_cols[None, :]), mask=inside, other=0.0)
        acc = product(left, right, acc, PRECISION)

    out_rows = (group * ROWS + rows) * out_strides[0]
    out_cols = c.to(tl.int64) * out_strides[1] + r.to(tl.int64) * out_strides[2] + s.to(tl.int64) * out_strides[3]
    places = out_ptr + split.to(tl.int64) * stride_part + (out_rows[:, None] + out_cols[None, :])
    inside = row_inside[:, None] & col_inside[None, :]
    if STORE == "add":
        tl.atomic_add(places, acc, mask=inside, sem="relaxed")
    else:
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the gradient of the weight to out [K, C/groups, R, S], from inputs x [N, C, H, W] and d_out
    [N, K, P, Q]."""
    x, d_out, groups = inputs["x"], inputs["d_out"], attributes["groups"]
    split_k, (channels, r, s) = knobs["split_k"], out.shape[1:]
    rows = out.shape[0] // groups
    added = split_k > 1 and knobs["combine"] == "add"
    target, strides, stride_part = out, out.stride(), 0
    if split_k > 1:
        target = conv_parts(out, 1 if added else split_k, torch.float32)
        strides, stride_part = part_strides(out), 0 if added else target.stride(0)
    pixels = d_out.shape[0] * d_out.shape[2] * d_out.shape[3]
    block_m, block_n, block_k = knobs["block_m"], knobs["block_n"], knobs["block_k"]
    tiles_n = r * s * triton.cdiv(channels, block_n)
    if knobs["columns"] == "flat":
        tiles_n = triton.cdiv(r * s * channels, block_n)
    args = (
        d_out, x, target, d_out.stride(), x.stride(), strides, stride_part,
        pixels, rows, channels, *x.shape[2:], *d_out.shape[2:], r, s,
        *(attributes[f"{name}_{axis}"] for name in ("stride", "pad", "dilation") for axis in "hw"),
        block_m, block_n, block_k, split_k, knobs["columns"],
        max(pixels + block_k, *map(reach_of, (x, d_out))) >= 2**31, "add" if added else "store",
        dot_precision(knobs["precision"], x),
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    main = (conv_weight_gradient, (groups * triton.cdiv(rows, block_m) * tiles_n, split_k), args, options)
    zeros = [conv_zeros_launch(target)] if added else []
    return [*zeros, main, *([sum_weight_parts_launch(target, out)] if split_k > 1 else [])]
