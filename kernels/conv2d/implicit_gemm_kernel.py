"""Convolution as a matrix product whose left operand is gathered on the way: rows are pixels of the result, columns its
channels, and the sum runs over taps and the operand's channels. Serves forward, transposed and the input's gradient.

One axis at a time, a result's pixel `first + i * OUT_STEP` meets through tap `tap0 + t * W_STEP` the operand's pixel
`origin + i * IN_STEP + t * TAP_STEP`. Forward: first = tap0 = 0, origin = -pad, IN_STEP = stride, TAP_STEP = dilation.
Scattering (gradient of the input, transposed): the result's pixels fall into classes by their remainder of the stride.
Those of one class meet the same taps, every (stride / gcd(stride, dilation))th from tap0 on, and each class is a
convolution with stride 1 of its own; all of them are computed in one launch.
"""

import math

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places
from kernelwright.kernels.conv2d.conv_reduce_kernel import (
    conv_parts,
    conv_reduce_launch,
    conv_zeros_launch,
    part_strides,
    reach_of,
)
from kernelwright.kernels.matmul.epilogue_kernel import tile_of
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def class_of_axis(
    remainder, SCATTERS: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    DILATION: tl.constexpr, W_STEP: tl.constexpr,
):  # fmt: skip
    """(first tap, number of taps, origin) of a class of the result's pixels along one axis."""
    if SCATTERS:
        tap0 = remainder * 0 + TAPS
        for tap in tl.static_range(W_STEP):
            meets = (remainder + PAD - tap * DILATION) % STRIDE == 0
            tap0 = tl.where(meets, tl.minimum(tap0, tap), tap0)
        taps = (TAPS - tap0 + W_STEP - 1) // W_STEP
        # a class without taps has no origin, and none is needed
        origin = (remainder + PAD - tap0 * DILATION) // STRIDE
    else:
        tap0, taps, origin = remainder * 0, remainder * 0 + TAPS, remainder * 0 - PAD
    return tap0, taps, origin


@triton.jit
def conv_implicit_gemm(
    x_ptr, w_ptr, out_ptr, operands, x_strides, w_strides, out_strides, stride_wg, stride_part,
    ROWS, COLS, CHANNELS, IN_H, IN_W, OUT_H, OUT_W, GRID_H, GRID_W,
    SCATTERS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, TAP_STEP_H: tl.constexpr, TAP_STEP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, W_STEP_H: tl.constexpr, W_STEP_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    REDUCTION: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One tile of the result. ROWS counts the pixels of a class, N * GRID_H * GRID_W; COLS and CHANNELS the channels of
    result and operand in a group; w_strides are those of (result's channel, operand's channel, R, S).

    REDUCTION: "taps" walks over the channels of one tap, then of the next; "channels" over the taps of a block of
    channels, then of the next; "flat" and "flat_taps" cut all channels of all taps into even blocks, with channels or
    taps side by side.
    """
    tiles_m = tl.cdiv(ROWS, BLOCK_M)
    tiles_n = tl.cdiv(COLS, BLOCK_N)
    classes: tl.constexpr = OUT_STEP_H * OUT_STEP_W
    # the classes of a tile read the same pixels, so that they stand side by side
    first_h = tl.program_id(0) % classes // OUT_STEP_W
    first_w = tl.program_id(0) % OUT_STEP_W
    tile = tl.program_id(0) // classes
    group = (tile // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = tile_of(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    split = tl.program_id(1)
    tap0_h, taps_h, origin_h = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
    tap0_w, taps_w, origin_w = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    if WIDE:
        rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols, ks = cols.to(tl.int64), ks.to(tl.int64)
    j = rows % GRID_W
    i = rows // GRID_W % GRID_H
    n = rows // GRID_W // GRID_H
    row_inside, col_inside = rows < ROWS, cols < COLS
    y = i * IN_STEP_H + origin_h
    x = j * IN_STEP_W + origin_w
    x_ptr += group * CHANNELS * x_strides[1]
    w_ptr += group * stride_wg + tap0_h * w_strides[2] + tap0_w * w_strides[3]
    x_rows = n * x_strides[0] + y * x_strides[2] + x * x_strides[3]
    w_cols = cols * w_strides[0]

    blocks = tl.cdiv(CHANNELS, BLOCK_K)
    taps = taps_h * taps_w
    steps = taps * blocks
    if REDUCTION == "flat" or REDUCTION == "flat_taps":
        steps = tl.cdiv(taps * CHANNELS, BLOCK_K)
    per_split = tl.cdiv(steps, SPLIT_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, steps)):
        if REDUCTION == "flat" or REDUCTION == "flat_taps":
            place = step * BLOCK_K + ks
            if REDUCTION == "flat":
                c, tap = place % CHANNELS, place // CHANNELS
            else:
                c, tap = place // taps, place % taps
            u, v = tap // taps_w, tap % taps_w
            in_y = y[:, None] + (u * TAP_STEP_H)[None, :]
            in_x = x[:, None] + (v * TAP_STEP_W)[None, :]
            k_inside = place < taps * CHANNELS
            inside = row_inside[:, None] & k_inside[None, :]
            inside = inside & (in_y >= 0) & (in_y < IN_H) & (in_x >= 0) & (in_x < IN_W)
            w_inside = k_inside[:, None] & col_inside[None, :]
            x_at = c * x_strides[1] + u * TAP_STEP_H * x_strides[2] + v * TAP_STEP_W * x_strides[3]
            w_at = c * w_strides[1] + u * W_STEP_H * w_strides[2] + v * W_STEP_W * w_strides[3]
        else:
            if REDUCTION == "taps":
                tap, block = step // blocks, step % blocks
            else:
                tap, block = step % taps, step // taps
            if WIDE:
                tap = tap.to(tl.int64)
            u, v = tap // taps_w, tap % taps_w
            c = block * BLOCK_K + ks
            in_y = y + u * TAP_STEP_H
            in_x = x + v * TAP_STEP_W
            row = row_inside & (in_y >= 0) & (in_y < IN_H) & (in_x >= 0) & (in_x < IN_W)
            inside = row[:, None]
            w_inside = col_inside[None, :]
            if not EVEN_K:
                inside = inside & (c < CHANNELS)[None, :]
                w_inside = w_inside & (c < CHANNELS)[:, None]
            x_at = c * x_strides[1] + (u * TAP_STEP_H * x_strides[2] + v * TAP_STEP_W * x_strides[3])
            w_at = c * w_strides[1] + (u * W_STEP_H * w_strides[2] + v * W_STEP_W * w_strides[3])
        left = tl.load(x_ptr + (x_rows[:, None] + x_at[None, :]), mask=inside, other=0.0)
        right = tl.load(w_ptr + (w_at[:, None] + w_cols[None, :]), mask=w_inside, other=0.0)
        acc = product(left, right, acc, PRECISION)

    p = first_h + i * OUT_STEP_H
    q = first_w + j * OUT_STEP_W
    row_inside = row_inside & (p < OUT_H) & (q < OUT_W)
    k = group * COLS + cols
    if STEPS != "":
        acc = finish_conv(acc.to(tl.float32), operands, n, p, q, k, row_inside, col_inside, STEPS)
    places = out_ptr + split.to(tl.int64) * stride_part + image_places(n, p, q, k, out_strides)
    inside = row_inside[:, None] & col_inside[None, :]
    if STORE == "add":
        tl.atomic_add(places, acc, mask=inside, sem="relaxed")
    else:
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the convolution to out [N, K, P, Q], or the gradient of the input to out [N, C, H, W].

    inputs: "x" (for a gradient "d_out"), "w" and what the epilogue reads. attributes: all of the workload's.
    """
    if out.numel() == 0:
        return []
    split_k = knobs["split_k"]
    image, weight = inputs["d_out" if attributes["direction"] == "input_gradient" else "x"], inputs["w"]
    whole = image.dtype == torch.int8
    added = split_k > 1 and knobs["combine"] == "add"
    target, strides, stride_part = out, out.stride(), 0
    if split_k > 1:
        target = conv_parts(out, 1 if added else split_k, torch.int32 if whole else torch.float32)
        strides, stride_part = part_strides(out), 0 if added else target.stride(0)
    steps, operands = conv_chain(inputs, epilogue) if split_k == 1 else ("", ())
    sizes, geometry, rows, blocks = gemm_of(image, weight, out, knobs, attributes)
    args = (
        image, weight, target, operands, image.stride(), *weight_view(weight, attributes, strides), stride_part,
        *sizes, *geometry, knobs["block_m"], knobs["block_n"], knobs["block_k"], knobs["group_m"], split_k,
        knobs["reduction"], sizes[2] % knobs["block_k"] == 0, max(rows, *map(reach_of, (image, weight))) >= 2**31,
        "add" if added else "store", dot_precision(knobs["precision"], image), tl.int32 if whole else tl.float32, steps,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    main = (conv_implicit_gemm, (blocks, split_k), args, options)
    zeros = [conv_zeros_launch(target)] if added else []
    return [*zeros, main, *([conv_reduce_launch(target, out, inputs, epilogue)] if split_k > 1 else [])]


def weight_view(weight, attributes, out_strides):
    """(strides of (result's channel, operand's channel, R, S), strides of the result, stride between groups)."""
    first, second, vertical, horizontal = weight.stride()
    between = weight.shape[0] // attributes["groups"] * first
    scatters = attributes["transposed"] or attributes["direction"] == "input_gradient"
    channels = (second, first) if scatters else (first, second)
    return (*channels, vertical, horizontal), out_strides, between


def gemm_of(image, weight, out, knobs, attributes):
    """(sizes, geometry, rows of a class, number of tiles): the kernel's arguments of these names, in its order."""
    groups, (r, s) = attributes["groups"], weight.shape[2:]
    scatters = attributes["transposed"] or attributes["direction"] == "input_gradient"
    stride, padding, dilation = ((attributes[f"{x}_h"], attributes[f"{x}_w"]) for x in ("stride", "pad", "dilation"))
    common = [math.gcd(*pair) for pair in zip(stride, dilation, strict=True)]
    in_step, tap_step, out_step, w_step = stride, dilation, (1, 1), (1, 1)
    if scatters:
        in_step, out_step = (1, 1), stride
        tap_step = tuple(-apart // divisor for apart, divisor in zip(dilation, common, strict=True))
        w_step = tuple(step // divisor for step, divisor in zip(stride, common, strict=True))
    grid = [triton.cdiv(size, step) for size, step in zip(out.shape[2:], out_step, strict=True)]
    rows, cols = out.shape[0] * grid[0] * grid[1], out.shape[1] // groups
    sizes = (rows, cols, image.shape[1] // groups, *image.shape[2:], *out.shape[2:], *grid)
    geometry = (scatters, r, s, *stride, *padding, *dilation, *in_step, *tap_step, *out_step, *w_step)
    tiles = triton.cdiv(rows, knobs["block_m"]) * triton.cdiv(cols, knobs["block_n"])
    return sizes, geometry, rows + knobs["block_m"], tiles * groups * out_step[0] * out_step[1]
