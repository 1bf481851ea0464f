"""Grouped convolution of small groups on the tensor cores: SPAN groups share a tile whose weight is block-diagonal, so
that a whole line of channels is read at once. Forward, transposed, and both gradients.

A tap's weight tile [source channels, result channels] of SPAN groups is zero where the groups differ: products with
zeros are cheaper than reading the image once for every group.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places
from kernelwright.kernels.conv2d.conv_reduce_kernel import conv_parts
from kernelwright.kernels.conv2d.implicit_gemm_kernel import class_of_axis, gemm_of
from kernelwright.kernels.conv2d.taps_kernel import put, zeros_tuple
from kernelwright.kernels.conv2d.weight_parts_kernel import sum_weight_parts_launch
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def conv2d_grouped_direct(
    x_ptr, w_ptr, out_ptr, operands, x_strides, w_strides, out_strides, GROUPS, ROWS, IN_H, IN_W, OUT_H, OUT_W,
    GRID_H, GRID_W,
    SCATTERS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    IN_STEP_H: tl.constexpr, IN_STEP_W: tl.constexpr, TAP_STEP_H: tl.constexpr, TAP_STEP_W: tl.constexpr,
    OUT_STEP_H: tl.constexpr, OUT_STEP_W: tl.constexpr, W_STEP_H: tl.constexpr, W_STEP_W: tl.constexpr,
    COLS: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """SPAN groups of a block of pixels of one class, as `conv_implicit_gemm` counts them. COLS and CHANNELS: of result
    and source in a group; w_strides: those of (group, source channel, result channel, R, S)."""
    spans = tl.cdiv(GROUPS, SPAN)
    group = tl.program_id(0) % spans * SPAN
    item = tl.program_id(0) // spans
    first_h = item % (OUT_STEP_H * OUT_STEP_W) // OUT_STEP_W
    first_w = item % OUT_STEP_W
    rows = (item // (OUT_STEP_H * OUT_STEP_W)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tap0_h, taps_h, origin_h = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
    tap0_w, taps_w, origin_w = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)
    j = (rows % GRID_W).to(tl.int32)
    i = (rows // GRID_W % GRID_H).to(tl.int32)
    n = rows // GRID_W // GRID_H
    y = i * IN_STEP_H + origin_h
    x = j * IN_STEP_W + origin_w
    ks = tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_N)
    k_inside = (ks < SPAN * CHANNELS) & (group * CHANNELS + ks < GROUPS * CHANNELS)
    col_inside = (cols < SPAN * COLS) & (group * COLS + cols < GROUPS * COLS)
    diagonal = (ks // CHANNELS)[:, None] == (cols // COLS)[None, :]
    w_inside = diagonal & k_inside[:, None] & col_inside[None, :]
    w_places = w_ptr + (group + ks // CHANNELS)[:, None] * w_strides[0] + (ks % CHANNELS)[:, None] * w_strides[1]
    w_places += (cols % COLS)[None, :] * w_strides[2] + tap0_h * w_strides[3] + tap0_w * w_strides[4]
    x_rows = n * x_strides[0] + y.to(tl.int64) * x_strides[2] + x.to(tl.int64) * x_strides[3]
    x_places = x_ptr + x_rows[:, None] + (group * CHANNELS + ks).to(tl.int64)[None, :] * x_strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for tap in range(taps_h * taps_w):
        u = tap // taps_w
        v = tap % taps_w
        in_y = y + u * TAP_STEP_H
        in_x = x + v * TAP_STEP_W
        row = (rows < ROWS) & (in_y >= 0) & (in_y < IN_H) & (in_x >= 0) & (in_x < IN_W)
        moved = (u * TAP_STEP_H).to(tl.int64) * x_strides[2] + (v * TAP_STEP_W).to(tl.int64) * x_strides[3]
        left = tl.load(x_places + moved, mask=row[:, None] & k_inside[None, :], other=0.0)
        at = u * W_STEP_H * w_strides[3] + v * W_STEP_W * w_strides[4]
        right = tl.load(w_places + at, mask=w_inside, other=0.0)
        acc = product(left, right, acc, PRECISION)
    p = first_h + i * OUT_STEP_H
    q = first_w + j * OUT_STEP_W
    row_inside = (rows < ROWS) & (p < OUT_H) & (q < OUT_W)
    k = group * COLS + cols
    if out_ptr.dtype.element_ty.is_floating():
        acc = acc.to(tl.float32)
    if STEPS != "":
        acc = finish_conv(acc, operands, n, p, q, k, row_inside, col_inside, STEPS)
    places = out_ptr + image_places(n, p, q, k, out_strides)
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])


@triton.jit
def conv2d_grouped_weight(
    x_ptr, d_ptr, dw_ptr, x_strides, d_strides, dw_strides, stride_part, GROUPS, ROWS, IN_H, IN_W, OUT_H, OUT_W,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, COLS: tl.constexpr,
    CHANNELS: tl.constexpr, SPAN: tl.constexpr, TAPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the gradient of the weights of SPAN groups, for TAPS taps: over every n-th block of BLOCK_P pixels of
    d, all pairs of channels are multiplied, and those of one group are kept. COLS, CHANNELS: of d and x in a group."""
    group = tl.program_id(0) * SPAN
    tap0 = tl.program_id(1) * TAPS
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    col_inside = (cols < SPAN * COLS) & (group * COLS + cols < GROUPS * COLS)
    k_inside = (ks < SPAN * CHANNELS) & (group * CHANNELS + ks < GROUPS * CHANNELS)
    d_cols = d_ptr + (group * COLS + cols).to(tl.int64)[None, :] * d_strides[1]
    x_cols = x_ptr + (group * CHANNELS + ks).to(tl.int64)[None, :] * x_strides[1]
    acc = zeros_tuple(TAPS, BLOCK_N, BLOCK_K, tl.float32)
    for block in range(tl.program_id(2), tl.cdiv(ROWS, BLOCK_P), tl.num_programs(2)):
        rows = block * tl.full((1,), BLOCK_P, tl.int64) + tl.arange(0, BLOCK_P)
        q = (rows % OUT_W).to(tl.int32)
        p = (rows // OUT_W % OUT_H).to(tl.int32)
        n = rows // OUT_W // OUT_H
        d_rows = n * d_strides[0] + p.to(tl.int64) * d_strides[2] + q.to(tl.int64) * d_strides[3]
        d = tl.load(d_cols + d_rows[:, None], mask=(rows < ROWS)[:, None] & col_inside[None, :], other=0.0).T
        for t in tl.static_range(TAPS):
            y = p * STRIDE_H + ((tap0 + t) // S * DILATION_H - PAD_H)
            z = q * STRIDE_W + ((tap0 + t) % S * DILATION_W - PAD_W)
            row = (rows < ROWS) & (y >= 0) & (y < IN_H) & (z >= 0) & (z < IN_W)
            x_rows = n * x_strides[0] + y.to(tl.int64) * x_strides[2] + z.to(tl.int64) * x_strides[3]
            x = tl.load(x_cols + x_rows[:, None], mask=row[:, None] & k_inside[None, :], other=0.0)
            acc = put(acc, t, product(d, x, acc[t], PRECISION))
    diagonal = (cols // COLS)[:, None] == (ks // CHANNELS)[None, :]
    inside = diagonal & col_inside[:, None] & k_inside[None, :]
    part = dw_ptr + tl.program_id(2).to(tl.int64) * stride_part
    part += (group * COLS + cols).to(tl.int64)[:, None] * dw_strides[0] + (ks % CHANNELS)[None, :] * dw_strides[1]
    for t in tl.static_range(TAPS):
        places = part + (tap0 + t) // S * dw_strides[2] + (tap0 + t) % S * dw_strides[3]
        tl.store(places, acc[t].to(dw_ptr.dtype.element_ty), mask=inside & (tap0 + t < R * S))


def power_of(size):
    """The least power of two from 16 on that is not smaller: tiles of the tensor cores have no narrower side."""
    return max(16, triton.next_power_of_2(size))


def plan_grouped_weight(x, d_out, dw, knobs, attributes):
    """Launches that write the gradient dw [K, C / groups, R, S]."""
    groups, span, parts = attributes["groups"], knobs["span"], knobs["split_k"]
    cols, channels, (r, s) = dw.shape[0] // groups, dw.shape[1], dw.shape[2:]
    target, strides, stride_part, launches = dw, dw.stride(), 0, []
    if parts > 1:
        target = conv_parts(dw, parts, torch.float32)
        strides, stride_part = (r * s * channels, 1, s * channels, channels), target.stride(0)
        launches = [sum_weight_parts_launch(target, dw)]
    pairs = [attributes[f"{name}_{axis}"] for name in ("stride", "pad", "dilation") for axis in "hw"]
    args = (
        x, d_out, target, x.stride(), d_out.stride(), strides, stride_part, groups,
        d_out.shape[0] * d_out.shape[2] * d_out.shape[3], *x.shape[2:], *d_out.shape[2:], r, s, *pairs, cols, channels,
        span, knobs["taps"], knobs["block_m"], power_of(span * cols), power_of(span * channels),
        dot_precision(knobs["precision"], x),
    )  # fmt: skip
    grid = (triton.cdiv(groups, span), triton.cdiv(r * s, knobs["taps"]), parts)
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(conv2d_grouped_weight, grid, args, options), *launches]


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that compute a grouped convolution, a transposed one, or a gradient, as the attributes say."""
    if out.numel() == 0:
        return []
    if attributes["direction"] == "weight_gradient":
        return plan_grouped_weight(inputs["x"], inputs["d_out"], out, knobs, attributes)
    image, weight = inputs["d_out" if attributes["direction"] == "input_gradient" else "x"], inputs["w"]
    groups, span = attributes["groups"], knobs["span"]
    sizes, geometry, _, _ = gemm_of(image, weight, out, {**knobs, "block_n": 16}, attributes)
    scatters, steps = geometry[0], (geometry[13], geometry[14])
    first, second, vertical, horizontal = weight.stride()
    between = weight.shape[0] // groups * first
    of_weight = (between, *((first, second) if scatters else (second, first)), vertical, horizontal)
    cols, channels = out.shape[1] // groups, image.shape[1] // groups
    chain, operands = conv_chain(inputs, epilogue)
    args = (
        image, weight, out, operands, image.stride(), of_weight, out.stride(), groups, sizes[0], *sizes[3:], *geometry,
        cols, channels, span, knobs["block_m"], power_of(span * cols), power_of(span * channels),
        dot_precision(knobs["precision"], image), tl.int32 if image.dtype == torch.int8 else tl.float32, chain,
    )  # fmt: skip
    programs = triton.cdiv(sizes[0], knobs["block_m"]) * triton.cdiv(groups, span) * steps[0] * steps[1]
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(conv2d_grouped_direct, (programs,), args, options)]
