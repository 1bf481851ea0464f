"""Depthwise convolution by tiles of ROWS x TILE results in each thread's registers: an input is loaded, and made wide,
once for all results of the tile that it meets, and a row of weights once for a row of results. Forward, transposed and
both gradients; all taps are written out.

A block is BLOCK_V tiles, one below the other, by BLOCK_C channels.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv
from kernelwright.kernels.conv2d.depthwise_kernel import by_channels, wide_index
from kernelwright.kernels.conv2d.taps_kernel import (
    column_count,
    conv2d_pack_taps,
    first_column,
    meets,
    sum_tap_parts_launch,
    tap_at,
    zeros_tuple,
)


@triton.jit
def depthwise_line(places, column, SIZE, inside, stride, COUNT: tl.constexpr, SUM: tl.constexpr):
    """COUNT neighbouring columns, from `column` on, of lines whose column 0 stands at places [BLOCK_V, BLOCK_C]."""
    line = ()
    for i in tl.static_range(COUNT):
        there = inside & ((column + i >= 0) & (column + i < SIZE))
        one = tl.load(places + (column + i) * stride, mask=there, other=0.0).to(SUM)
        line = line + (one,)  # type: ignore[assignment]
    return line


@triton.jit
def depthwise_products(
    sums, x, w, TILE: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    DILATION: tl.constexpr, TURNED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Add a row of taps w times a line of inputs x, of which columns LOW to HIGH exist, to TILE sums."""
    FIRST: tl.constexpr = first_column(TAPS, STRIDE, PAD, DILATION, TURNED)
    done = ()
    for place in tl.static_range(TILE):
        one = sums[place]
        for i in tl.static_range(column_count(TILE, TAPS, STRIDE, PAD, DILATION, TURNED)):
            if tap_at(FIRST + i, place, TAPS, STRIDE, PAD, DILATION, TURNED) >= 0 and i >= LOW and i < HIGH:
                one += x[i] * w[tap_at(FIRST + i, place, TAPS, STRIDE, PAD, DILATION, TURNED)]
        done = done + (one,)  # type: ignore[assignment]
    return done


@triton.jit
def conv2d_depthwise_tile(
    x_ptr, w_ptr, y_ptr, operands, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_strides, y_strides,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, TURNED: tl.constexpr, MULT: tl.constexpr,
    LOW_H: tl.constexpr, HIGH_H: tl.constexpr, LOW_W: tl.constexpr, HIGH_W: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr,
    SUM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """y: HEIGHT x WIDTH results of each image; MULT of them for each channel of x. w [R * S, CHANNELS], type SUM.

    Where taps are TURNED, ROWS and TILE are multiples of the strides. LOW_H to HIGH_H, LOW_W to HIGH_W: which of the
    lines and columns that a tile meets can exist: where a tile covers a whole image, products with padding are left
    out.
    """
    FIRST_H: tl.constexpr = first_column(R, STRIDE_H, PAD_H, DILATION_H, TURNED)
    FIRST_W: tl.constexpr = first_column(S, STRIDE_W, PAD_W, DILATION_W, TURNED)
    COLUMNS: tl.constexpr = column_count(TILE, S, STRIDE_W, PAD_W, DILATION_W, TURNED)
    c_blocks = tl.cdiv(CHANNELS, BLOCK_C)
    u_blocks = tl.cdiv(WIDTH, TILE)
    v_blocks = tl.cdiv(HEIGHT, BLOCK_V * ROWS)
    item = tl.program_id(0)
    channels = (item % c_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    item = item // c_blocks
    u = (item % u_blocks) * TILE
    item = item // u_blocks
    v = ((item % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]) * ROWS
    n = (item // v_blocks).to(tl.int64)
    in_channels = channels < CHANNELS
    x_base = x_ptr + n * x_strides[0] + (channels // MULT).to(INDEX) * x_strides[1]
    w_places = w_ptr + channels
    u_in = (u // STRIDE_W if TURNED else u * STRIDE_W - PAD_W) + FIRST_W
    v_in = v // STRIDE_H if TURNED else v * STRIDE_H - PAD_H
    acc = zeros_tuple(ROWS * TILE, BLOCK_V, BLOCK_C, SUM)
    for i in tl.static_range(column_count(ROWS, R, STRIDE_H, PAD_H, DILATION_H, TURNED)):
        if meets(FIRST_H + i, ROWS, R, STRIDE_H, PAD_H, DILATION_H, TURNED) and i >= LOW_H and i < HIGH_H:
            y = v_in + (FIRST_H + i)
            x = depthwise_line(
                x_base + y.to(INDEX) * x_strides[2], u_in.to(INDEX), IN_W, in_channels & (y >= 0) & (y < IN_H),
                x_strides[3], COLUMNS, SUM,
            )  # fmt: skip
            for row in tl.static_range(ROWS):
                if tap_at(FIRST_H + i, row, R, STRIDE_H, PAD_H, DILATION_H, TURNED) >= 0:
                    tap = tap_at(FIRST_H + i, row, R, STRIDE_H, PAD_H, DILATION_H, TURNED) * S
                    w = ()
                    for s in tl.static_range(S):
                        one = tl.load(w_places + (tap + s) * CHANNELS, mask=in_channels, other=0.0)
                        w = w + (one,)  # type: ignore[assignment]
                    sums = depthwise_products(
                        acc[row * TILE : row * TILE + TILE], x, w, TILE, S, STRIDE_W, PAD_W, DILATION_W, TURNED,
                        LOW_W, HIGH_W,
                    )  # fmt: skip
                    acc = acc[: row * TILE] + sums + acc[row * TILE + TILE :]
    y_base = y_ptr + n * y_strides[0] + channels.to(INDEX) * y_strides[1]
    cols = tl.reshape(channels, (BLOCK_C,))
    for row in tl.static_range(ROWS):
        p = v + row
        for place in tl.static_range(TILE):
            there = in_channels & (p < HEIGHT) & (u + place < WIDTH)
            done = acc[row * TILE + place]
            if y_ptr.dtype.element_ty.is_floating():
                done = done.to(tl.float32)
            if STEPS != "":
                lines = tl.reshape(p, (BLOCK_V,))
                q = lines * 0 + (u + place)
                inside = (lines < HEIGHT) & (u + place < WIDTH)
                done = finish_conv(done, operands, lines * 0 + n, lines, q, cols, inside, cols < CHANNELS, STEPS)
            places = y_base + p.to(INDEX) * y_strides[2] + (u + place).to(INDEX) * y_strides[3]
            tl.store(places, done.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def depthwise_tap_products(
    acc, x, d, AT: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """Add the products of TILE gradients, d[FIRST] and on, and a line of inputs x to TAPS sums, acc[AT] and on."""
    done = ()
    for tap in tl.static_range(TAPS):
        one = acc[AT + tap]
        for place in tl.static_range(TILE):
            one += x[place * STRIDE + tap * DILATION] * d[FIRST + place]
        done = done + (one,)  # type: ignore[assignment]
    return acc[:AT] + done + acc[AT + TAPS :]


@triton.jit
def conv2d_depthwise_tile_weight(
    x_ptr, d_ptr, dw_ptr, BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_strides, d_strides, stride_part, dw_strides,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, MULT: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """One part of the gradient of the weight: all taps of BLOCK_C channels over every n-th block of d, HEIGHT x WIDTH
    gradients of each image. The part is added up in each thread first and over BLOCK_V at the end."""
    COLUMNS: tl.constexpr = column_count(TILE, S, STRIDE_W, 0, DILATION_W, False)
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    in_channels = channels < CHANNELS
    u_blocks = tl.cdiv(WIDTH, TILE)
    v_blocks = tl.cdiv(HEIGHT, BLOCK_V * ROWS)
    x_channels = x_ptr + (channels // MULT).to(INDEX) * x_strides[1]
    d_channels = d_ptr + channels.to(INDEX) * d_strides[1]
    acc = zeros_tuple(R * S, BLOCK_V, BLOCK_C, tl.float32)
    for item in range(tl.program_id(1), BATCH * u_blocks * v_blocks, tl.num_programs(1)):
        n = (item // (u_blocks * v_blocks)).to(tl.int64)
        u = (item % u_blocks) * TILE
        v = ((item // u_blocks % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]) * ROWS
        d = ()
        for row in tl.static_range(ROWS):
            line = depthwise_line(
                d_channels + n * d_strides[0] + (v + row).to(INDEX) * d_strides[2], u.to(INDEX), WIDTH,
                in_channels & (v + row < HEIGHT), d_strides[3], TILE, tl.float32,
            )  # fmt: skip
            d = d + line
        for i in tl.static_range(column_count(ROWS, R, STRIDE_H, 0, DILATION_H, False)):
            if meets(i, ROWS, R, STRIDE_H, 0, DILATION_H, False):
                y = v * STRIDE_H + (i - PAD_H)
                x = depthwise_line(
                    x_channels + n * x_strides[0] + y.to(INDEX) * x_strides[2], (u * STRIDE_W - PAD_W).to(INDEX), IN_W,
                    in_channels & (y >= 0) & (y < IN_H), x_strides[3], COLUMNS, tl.float32,
                )  # fmt: skip
                for row in tl.static_range(ROWS):
                    if tap_at(i, row, R, STRIDE_H, 0, DILATION_H, False) >= 0:
                        acc = depthwise_tap_products(
                            acc, x, d, tap_at(i, row, R, STRIDE_H, 0, DILATION_H, False) * S, row * TILE, TILE, S,
                            STRIDE_W, DILATION_W,
                        )  # fmt: skip
    part = dw_ptr + tl.program_id(1).to(tl.int64) * stride_part
    part += (channels // MULT).to(tl.int64) * dw_strides[0] + (channels % MULT) * dw_strides[1]
    for tap in tl.static_range(R * S):
        total = tl.sum(acc[tap], axis=0)[None, :].to(dw_ptr.dtype.element_ty)
        tl.store(part + tap // S * dw_strides[2] + tap % S * dw_strides[3], total, mask=in_channels)


def packed_wide(weight, dtype):
    """(packed [R * S, channels] in the type of sums, the launch that fills it) of a weight [C, multiplier, R, S]."""
    groups, multiplier, r, s = weight.shape
    packed = torch.empty((r * s, groups * multiplier), dtype=dtype, device=weight.device)
    block_t = min(64, triton.next_power_of_2(r * s))
    grid = (triton.cdiv(groups * multiplier, 64), triton.cdiv(r * s, block_t))
    args = (weight, packed, groups * multiplier, r * s, s, *weight.stride(), multiplier, 64, block_t)
    return packed, (conv2d_pack_taps, grid, args, {"num_warps": 4})


def existing(size, covered, taps, numbers, turned):
    """(first, last + 1) of the lines that a tile meets and that can exist: all of them, unless one tile covers the
    result's axis; size: lines of the source; numbers: stride, padding and dilation."""
    stride, pad, dilation = numbers
    if not covered:
        return 0, 2**20
    first = (pad - (taps - 1) * dilation) // stride if turned else -pad
    return -first, size - first


def pairs_of_taps(attributes):
    """Strides, paddings and dilations, vertical before horizontal."""
    return [attributes[f"{name}_{axis}"] for name in ("stride", "pad", "dilation") for axis in "hw"]


def plan_tile_weight(x, d_out, dw, knobs, attributes):
    """Launches that write the gradient dw [K, 1, R, S] of a depthwise weight."""
    by_channel = by_channels(dw, x.shape[1])
    n, channels, height, width = d_out.shape
    r, s = dw.shape[2:]
    parts, block_c = knobs["parts"], knobs["block_c"]
    launches, target, part_stride, strides = [], by_channel, 0, by_channel.stride()
    if parts > 1:
        target = torch.empty((parts, r * s, channels), dtype=torch.float32, device=dw.device)
        launches, part_stride = [sum_tap_parts_launch(target, by_channel)], target.stride(0)
        strides = (by_channel.shape[1], 1, s * channels, channels)
    args = (
        x, d_out, target, n, channels, height, width, *x.shape[2:], x.stride(), d_out.stride(), part_stride, strides,
        r, s, *pairs_of_taps(attributes), by_channel.shape[1], knobs["rows"], knobs["tile"], knobs["block_v"], block_c,
        wide_index(x, d_out),
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": 1}
    return [(conv2d_depthwise_tile_weight, (triton.cdiv(channels, block_c), parts), args, options), *launches]


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that compute a depthwise convolution, a transposed one, or a gradient, as the attributes say."""
    if out.numel() == 0:
        return []
    direction = attributes["direction"]
    if direction == "weight_gradient":
        return plan_tile_weight(inputs["x"], inputs["d_out"], out, knobs, attributes)
    turned = direction == "input_gradient" or bool(attributes["transposed"])
    source = inputs["x" if direction == "forward" else "d_out"]
    n, channels, height, width = out.shape
    kind, sums = (torch.int32, tl.int32) if source.dtype == torch.int8 else (torch.float32, tl.float32)
    packed, launch = packed_wide(by_channels(inputs["w"], source.shape[1]), kind)
    rows, tile, block_v, block_c = (knobs[name] for name in ("rows", "tile", "block_v", "block_c"))
    steps, operands = conv_chain(inputs, epilogue)
    pairs, (r, s) = pairs_of_taps(attributes), inputs["w"].shape[2:]
    vertical = existing(source.shape[2], block_v == 1 and rows >= height, r, pairs[::2], turned)
    horizontal = existing(source.shape[3], tile >= width, s, pairs[1::2], turned)
    args = (
        source, packed, out, operands, channels, height, width, *source.shape[2:], source.stride(), out.stride(),
        r, s, *pairs, turned, channels // source.shape[1], *vertical, *horizontal, rows, tile, block_v, block_c,
        wide_index(source, out), sums, steps,
    )  # fmt: skip
    programs = n * triton.cdiv(channels, block_c) * triton.cdiv(width, tile) * triton.cdiv(height, block_v * rows)
    options = {"num_warps": knobs["num_warps"], "num_stages": 1}
    return [launch, (conv2d_depthwise_tile, (programs,), args, options)]
