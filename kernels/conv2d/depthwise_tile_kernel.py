"""Depthwise convolution by tiles of ROWS x TILE results in each thread's registers: an input is loaded, and made wide,
once for all results of the tile that it meets, and a row of weights once for a row of results. Forward, transposed and
both gradients; all taps are written out.

A block is BLOCK_V tiles, one below the other, by BLOCK_C channels.
"""

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
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
)

FEW_TAPS = 9
"""Up to so many weights of a channel are read where they lie, more are laid out by taps first."""


@triton.jit
def depthwise_line(
    places, column, SIZE, inside, STRIDE: tl.constexpr, COUNT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """COUNT neighbouring columns of lines of SIZE, from number `column` on, which stands at places [BLOCK_V, BLOCK_C];
    those before LOW and from HIGH on are not there."""
    line = ()
    for i in tl.static_range(COUNT):
        if i >= LOW and i < HIGH:
            # numbers below 0 are large without a sign
            there = inside & ((column + i).to(tl.uint32) < SIZE)
            one = tl.load(places + i * STRIDE, mask=there, other=0.0).to(SUM)
        else:
            one = 0
        line = line + (one,)  # type: ignore[assignment]
    return line


@triton.constexpr_function
def column_of(place, tap, stride, pad, dilation, turned, low, high, first):
    """Number of the column, of those from `first` on, that result `place` meets with a tap; -1 if there is none, or
    none from number low to high."""
    distance = place * stride + tap * dilation
    if turned:
        if (place + pad - tap * dilation) % stride:
            return -1
        distance = (place + pad - tap * dilation) // stride - first
    return distance if low <= distance < high else -1


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
        for tap in tl.static_range(TAPS):
            if column_of(place, tap, STRIDE, PAD, DILATION, TURNED, LOW, HIGH, FIRST) >= 0:
                one += x[column_of(place, tap, STRIDE, PAD, DILATION, TURNED, LOW, HIGH, FIRST)] * w[tap]
        done = done + (one,)  # type: ignore[assignment]
    return done


@triton.jit
def depthwise_tile_results(
    x_ptr, w_ptr, y_ptr, operands, line, channel, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, y_image,
    X: tl.constexpr, Y: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, TURNED: tl.constexpr, MULT: tl.constexpr, LOW_H: tl.constexpr, HIGH_H: tl.constexpr,
    LOW_W: tl.constexpr, HIGH_W: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, INDEX: tl.constexpr, SUM: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """y: HEIGHT x WIDTH results of each image; MULT of them for each channel of x. line, channel: 0 to BLOCK_V and 0 to
    BLOCK_C, laid out as the threads shall lie. X, Y: strides of channels, rows and columns of the images, W: of groups,
    results of a group, rows and columns of taps.

    Where taps are TURNED, ROWS and TILE are multiples of the strides. LOW_H to HIGH_H, LOW_W to HIGH_W: which of the
    lines and columns that a tile meets can exist: where a tile covers a whole image, products with padding are left
    out.
    """
    FIRST_H: tl.constexpr = first_column(R, STRIDE_H, PAD_H, DILATION_H, TURNED)
    FIRST_W: tl.constexpr = first_column(S, STRIDE_W, PAD_W, DILATION_W, TURNED)
    COLUMNS: tl.constexpr = column_count(TILE, S, STRIDE_W, PAD_W, DILATION_W, TURNED)
    LINES: tl.constexpr = column_count(ROWS, R, STRIDE_H, PAD_H, DILATION_H, TURNED)
    c_blocks = tl.cdiv(CHANNELS, BLOCK_C)
    u_blocks = tl.cdiv(WIDTH, TILE)
    v_blocks = tl.cdiv(HEIGHT, BLOCK_V * ROWS)
    item = tl.program_id(0)
    cols = (item % c_blocks) * BLOCK_C + channel
    item = item // c_blocks
    u = (item % u_blocks) * TILE
    item = item // u_blocks
    p_first = ((item % v_blocks) * BLOCK_V + line) * ROWS
    n = (item // v_blocks).to(tl.int64)
    channels = cols[None, :]
    v = p_first[:, None]
    in_channels = channels < CHANNELS
    u_in = (u // STRIDE_W if TURNED else u * STRIDE_W - PAD_W) + FIRST_W
    v_in = (v // STRIDE_H if TURNED else v * STRIDE_H - PAD_H) + FIRST_H
    x_places = x_ptr + n * x_image + (v_in.to(INDEX) * X[1] + u_in * X[2] + (channels // MULT).to(INDEX) * X[0])
    w_places = w_ptr + (channels // MULT * W[0] + channels % MULT * W[1])
    acc = ()
    for _ in tl.static_range(ROWS * TILE):
        acc = acc + ((v * 0 + channels * 0).to(SUM),)  # type: ignore[assignment]
    for i in tl.static_range(LINES):
        if meets(FIRST_H + i, ROWS, R, STRIDE_H, PAD_H, DILATION_H, TURNED) and i >= LOW_H and i < HIGH_H:
            x = depthwise_line(
                x_places + i * X[1], u_in, IN_W, in_channels & ((v_in + i).to(tl.uint32) < IN_H), X[2],
                COLUMNS, LOW_W, HIGH_W, SUM,
            )  # fmt: skip
            for row in tl.static_range(ROWS):
                if tap_at(FIRST_H + i, row, R, STRIDE_H, PAD_H, DILATION_H, TURNED) >= 0:
                    w = ()
                    for s in tl.static_range(S):
                        # equal loads are merged by the compiler
                        tap = tap_at(FIRST_H + i, row, R, STRIDE_H, PAD_H, DILATION_H, TURNED) * W[2] + s * W[3]
                        w = w + (tl.load(w_places + tap, mask=in_channels, other=0.0).to(SUM),)  # type: ignore[assignment]
                    sums = depthwise_products(
                        acc[row * TILE : row * TILE + TILE], x, w, TILE, S, STRIDE_W, PAD_W, DILATION_W, TURNED,
                        LOW_W, HIGH_W,
                    )  # fmt: skip
                    acc = acc[: row * TILE] + sums + acc[row * TILE + TILE :]
    done = ()
    for at in tl.static_range(ROWS * TILE):
        one = acc[at]  # type: ignore[var-annotated]
        if y_ptr.dtype.element_ty.is_floating():
            one = one.to(tl.float32)
        if STEPS != "":
            p = p_first + at // TILE
            q = p * 0 + (u + at % TILE)
            inside = (p < HEIGHT) & (q < WIDTH)
            one = finish_conv(one, operands, p * 0 + n, p, q, cols, inside, cols < CHANNELS, STEPS)
        done = done + (one.to(y_ptr.dtype.element_ty),)  # type: ignore[assignment]
    # all stores come last: after one, the compiler would load an epilogue's operands again
    y_places = y_ptr + n * y_image + (v.to(INDEX) * Y[1] + u * Y[2] + channels.to(INDEX) * Y[0])
    for at in tl.static_range(ROWS * TILE):
        there = in_channels & (v + at // TILE < HEIGHT) & (u + at % TILE < WIDTH)
        tl.store(y_places + (at // TILE * Y[1] + at % TILE * Y[2]), done[at], mask=there)


@triton.jit
def conv2d_depthwise_tile(
    x_ptr, w_ptr, y_ptr, operands, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, y_image,
    X: tl.constexpr, Y: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, TURNED: tl.constexpr, MULT: tl.constexpr, LOW_H: tl.constexpr, HIGH_H: tl.constexpr,
    LOW_W: tl.constexpr, HIGH_W: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, INDEX: tl.constexpr, SUM: tl.constexpr, STEPS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """`depthwise_tile_results`, with threads as the compiler lays them out: for the interpreter."""
    depthwise_tile_results(
        x_ptr, w_ptr, y_ptr, operands, tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_C), CHANNELS, HEIGHT, WIDTH, IN_H,
        IN_W, x_image, y_image, X, Y, W, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, TURNED, MULT,
        LOW_H, HIGH_H, LOW_W, HIGH_W, ROWS, TILE, BLOCK_V, BLOCK_C, INDEX, SUM, STEPS,
    )  # fmt: skip


@gluon.jit
def conv2d_depthwise_tile_threads(
    x_ptr, w_ptr, y_ptr, operands, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, y_image,
    X: gl.constexpr, Y: gl.constexpr, W: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, TURNED: gl.constexpr, MULT: gl.constexpr, LOW_H: gl.constexpr, HIGH_H: gl.constexpr,
    LOW_W: gl.constexpr, HIGH_W: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_C: gl.constexpr, INDEX: gl.constexpr, SUM: gl.constexpr, STEPS: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """`depthwise_tile_results`, with threads as THREADS says (see `thread_layout`): nothing is left for the compiler to
    choose, which takes it minutes with so much code."""
    layout: gl.constexpr = gl.BlockedLayout(THREADS[0], THREADS[1], THREADS[2], [1, 0])
    line = gl.arange(0, BLOCK_V, gl.SliceLayout(1, layout))
    channel = gl.arange(0, BLOCK_C, gl.SliceLayout(0, layout))
    depthwise_tile_results(
        x_ptr, w_ptr, y_ptr, operands, line, channel, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, y_image, X, Y, W,
        R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, TURNED, MULT, LOW_H, HIGH_H, LOW_W, HIGH_W,
        ROWS, TILE, BLOCK_V, BLOCK_C, INDEX, SUM, STEPS,
    )  # fmt: skip


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
def depthwise_tile_part(
    x_ptr, d_ptr, dw_ptr, line, channel, BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, d_image, stride_part,
    X: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, MULT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """One part of the gradient of the weight: all taps of BLOCK_C channels over every n-th block of d, HEIGHT x WIDTH
    gradients of each image. The part is added up in each thread first and over BLOCK_V at the end. line, channel, X, D
    and W: as `depthwise_tile_results` has them."""
    COLUMNS: tl.constexpr = column_count(TILE, S, STRIDE_W, 0, DILATION_W, False)
    cols = tl.program_id(0) * BLOCK_C + channel
    channels = cols[None, :]
    in_channels = channels < CHANNELS
    u_blocks = tl.cdiv(WIDTH, TILE)
    v_blocks = tl.cdiv(HEIGHT, BLOCK_V * ROWS)
    acc = ()
    for _ in tl.static_range(R * S):
        acc = acc + ((line[:, None] * 0 + channels * 0).to(tl.float32),)  # type: ignore[assignment]
    for item in range(tl.program_id(1), BATCH * u_blocks * v_blocks, tl.num_programs(1)):
        n = (item // (u_blocks * v_blocks)).to(tl.int64)
        u = (item % u_blocks) * TILE
        v = (((item // u_blocks % v_blocks) * BLOCK_V + line) * ROWS)[:, None]
        u_in = u * STRIDE_W - PAD_W
        v_in = v * STRIDE_H - PAD_H
        d_places = d_ptr + n * d_image + (v.to(INDEX) * D[1] + u * D[2] + channels.to(INDEX) * D[0])
        x_places = x_ptr + n * x_image + (v_in.to(INDEX) * X[1] + u_in * X[2] + (channels // MULT).to(INDEX) * X[0])
        d = ()
        for row in tl.static_range(ROWS):
            d = d + depthwise_line(
                d_places + row * D[1], u, WIDTH, in_channels & (v + row < HEIGHT), D[2], TILE, 0, TILE, tl.float32,
            )  # fmt: skip
        for i in tl.static_range(column_count(ROWS, R, STRIDE_H, 0, DILATION_H, False)):
            if meets(i, ROWS, R, STRIDE_H, 0, DILATION_H, False):
                x = depthwise_line(
                    x_places + i * X[1], u_in, IN_W, in_channels & ((v_in + i).to(tl.uint32) < IN_H), X[2], COLUMNS,
                    0, COLUMNS, tl.float32,
                )  # fmt: skip
                for row in tl.static_range(ROWS):
                    if tap_at(i, row, R, STRIDE_H, 0, DILATION_H, False) >= 0:
                        acc = depthwise_tap_products(
                            acc, x, d, tap_at(i, row, R, STRIDE_H, 0, DILATION_H, False) * S, row * TILE, TILE, S,
                            STRIDE_W, DILATION_W,
                        )  # fmt: skip
    part = dw_ptr + tl.program_id(1).to(tl.int64) * stride_part + (cols // MULT * W[0] + cols % MULT * W[1])
    for tap in tl.static_range(R * S):
        total = tl.sum(acc[tap], axis=0).to(dw_ptr.dtype.element_ty)
        tl.store(part + (tap // S * W[2] + tap % S * W[3]), total, mask=cols < CHANNELS)


@triton.jit
def conv2d_depthwise_tile_weight(
    x_ptr, d_ptr, dw_ptr, BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, d_image, stride_part,
    X: tl.constexpr, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, MULT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, INDEX: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """`depthwise_tile_part`, with threads as the compiler lays them out: for the interpreter."""
    depthwise_tile_part(
        x_ptr, d_ptr, dw_ptr, tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_C), BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W,
        x_image, d_image, stride_part, X, D, W, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, MULT,
        ROWS, TILE, BLOCK_V, BLOCK_C, INDEX,
    )  # fmt: skip


@gluon.jit
def conv2d_depthwise_tile_weight_threads(
    x_ptr, d_ptr, dw_ptr, BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, d_image, stride_part,
    X: gl.constexpr, D: gl.constexpr, W: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, MULT: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_C: gl.constexpr, INDEX: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """`depthwise_tile_part`, with threads as THREADS says (see `thread_layout`)."""
    layout: gl.constexpr = gl.BlockedLayout(THREADS[0], THREADS[1], THREADS[2], [1, 0])
    line = gl.arange(0, BLOCK_V, gl.SliceLayout(1, layout))
    channel = gl.arange(0, BLOCK_C, gl.SliceLayout(0, layout))
    depthwise_tile_part(
        x_ptr, d_ptr, dw_ptr, line, channel, BATCH, CHANNELS, HEIGHT, WIDTH, IN_H, IN_W, x_image, d_image, stride_part,
        X, D, W, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, MULT, ROWS, TILE, BLOCK_V, BLOCK_C,
        INDEX,
    )  # fmt: skip


def packed_wide(weight, dtype):
    """(packed [R * S, channels] in the type of sums, the launch that fills it) of a weight [C, multiplier, R, S]."""
    groups, multiplier, r, s = weight.shape
    packed = torch.empty((r * s, groups * multiplier), dtype=dtype, device=weight.device)
    block_t = min(64, triton.next_power_of_2(r * s))
    grid = (triton.cdiv(groups * multiplier, 64), triton.cdiv(r * s, block_t))
    args = (weight, packed, groups * multiplier, r * s, s, *weight.stride(), multiplier, 64, block_t)
    return packed, (conv2d_pack_taps, grid, args, {"num_warps": 4})


def thread_layout(block_v, block_c, knobs):
    """Elements of a thread, threads of a warp and warps along the two axes of a block: neighbouring channels in a
    thread and in neighbouring threads."""
    warps, lanes = knobs["num_warps"], warp_lanes()
    each = max(1, block_v * block_c // (lanes * warps))
    across = min(lanes, max(1, block_c // each))
    down = min(warps, max(1, block_v * across // lanes))
    return (1, each), (lanes // across, across), (down, warps // down)


def warp_lanes():
    """Threads of a warp of the GPU that is compiled for; 32 where there is none."""
    try:
        return triton.runtime.driver.active.get_current_target().warp_size
    except RuntimeError:
        return 32


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
        x, d_out, target, n, channels, height, width, *x.shape[2:], x.stride(0), d_out.stride(0), part_stride,
        x.stride()[1:], d_out.stride()[1:], strides, r, s, *pairs_of_taps(attributes), by_channel.shape[1],
        knobs["rows"], knobs["tile"], knobs["block_v"], block_c, wide_index(x, d_out),
        thread_layout(knobs["block_v"], block_c, knobs),
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": 1}
    plain = triton.knobs.runtime.interpret
    kernel = conv2d_depthwise_tile_weight if plain else conv2d_depthwise_tile_weight_threads
    return [(kernel, (triton.cdiv(channels, block_c), parts), args, options), *launches]


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
    weight = by_channels(inputs["w"], source.shape[1])
    mult, r, s = weight.shape[1:]
    launches, w_strides = [], weight.stride()
    if r * s > FEW_TAPS:
        weight, launch = packed_wide(weight, kind)
        launches, w_strides = [launch], (mult, 1, s * channels, channels)
    rows, tile, block_v, block_c = (knobs[name] for name in ("rows", "tile", "block_v", "block_c"))
    steps, operands = conv_chain(inputs, epilogue)
    pairs = pairs_of_taps(attributes)
    vertical = existing(source.shape[2], block_v == 1 and rows >= height, r, pairs[::2], turned)
    horizontal = existing(source.shape[3], tile >= width, s, pairs[1::2], turned)
    args = (
        source, weight, out, operands, channels, height, width, *source.shape[2:], source.stride(0), out.stride(0),
        source.stride()[1:], out.stride()[1:], w_strides, r, s, *pairs, turned, mult, *vertical, *horizontal, rows,
        tile, block_v, block_c, wide_index(source, out), sums, steps, thread_layout(block_v, block_c, knobs),
    )  # fmt: skip
    programs = n * triton.cdiv(channels, block_c) * triton.cdiv(width, tile) * triton.cdiv(height, block_v * rows)
    options = {"num_warps": knobs["num_warps"], "num_stages": 1}
    kernel = conv2d_depthwise_tile if triton.knobs.runtime.interpret else conv2d_depthwise_tile_threads
    return [*launches, (kernel, (programs,), args, options)]
