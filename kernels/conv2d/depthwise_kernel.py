"""Depthwise convolution without tensor cores: forward, transposed, and both gradients.

A tile of results is BLOCK_V positions along one image axis (v) by BLOCK_C channels, and TILE neighbouring positions
along the other (u) in each thread's registers: every input value that a thread loads serves all the results it meets.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv
from kernelwright.kernels.conv2d.taps_kernel import (
    column_count,
    first_column,
    meets,
    pack_taps_launch,
    put,
    sum_tap_parts_launch,
    tap_at,
    zeros_tuple,
)


@triton.jit
def depthwise_row(
    acc, x_places, w_places, u_in, IN_U, inside, in_channels, stride_xu, stride_wu,
    TILE: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr,
    TURNED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add one row of taps to the accumulators of TILE neighbouring results.

    x_places, inside [BLOCK_V, BLOCK_C]: the input row's column 0, and whether there is such a row. w_places
    [1, BLOCK_C]. u_in: the input column that is number 0 of the tile.
    """
    FIRST: tl.constexpr = first_column(TAPS, STRIDE, PAD, DILATION, TURNED)
    for i in tl.static_range(column_count(TILE, TAPS, STRIDE, PAD, DILATION, TURNED)):
        if meets(FIRST + i, TILE, TAPS, STRIDE, PAD, DILATION, TURNED):
            column = u_in + (FIRST + i)
            there = inside & ((column >= 0) & (column < IN_U))
            x = tl.load(x_places + column * stride_xu, mask=there, other=0.0).to(SUM)
            for place in tl.static_range(TILE):
                if tap_at(FIRST + i, place, TAPS, STRIDE, PAD, DILATION, TURNED) >= 0:
                    # equal loads are merged by the compiler: a weight is loaded when it is first needed
                    tap = tap_at(FIRST + i, place, TAPS, STRIDE, PAD, DILATION, TURNED)
                    w = tl.load(w_places + tap * stride_wu, mask=in_channels, other=0.0).to(SUM)
                    acc = put(acc, place, acc[place] + x * w)
    return acc


@triton.jit
def first_meeting_tap(v_class, TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr):
    """The first turned tap that meets results at v_class modulo the stride; TAPS if none does."""
    first = v_class * 0 + TAPS
    for i in tl.static_range(min(STRIDE, TAPS)):
        tap = min(STRIDE, TAPS) - 1 - i
        first = tl.where((v_class + PAD + (DILATION * STRIDE - DILATION) * tap) % STRIDE == 0, tap, first)
    return first


@triton.constexpr_function
def meeting_step(stride, dilation):
    """Every how many taps a turned tap meets the same results' class."""
    step = 1
    while step * dilation % stride:
        step += 1
    return step


@triton.jit
def conv2d_depthwise(
    x_ptr, w_ptr, y_ptr, operands, CHANNELS, U, V, IN_U, IN_V, stride_xn, stride_xc, stride_xu, stride_xv,
    stride_wo, stride_wi, stride_wu, stride_wv, stride_yn, stride_yc, stride_yu, stride_yv,
    TAPS_U: tl.constexpr, TAPS_V: tl.constexpr, STRIDE_U: tl.constexpr, STRIDE_V: tl.constexpr, PAD_U: tl.constexpr,
    PAD_V: tl.constexpr, DILATION_U: tl.constexpr, DILATION_V: tl.constexpr, TURNED: tl.constexpr,
    MULT: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr, INDEX: tl.constexpr, SUM: tl.constexpr, U_IS_W: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """y: U x V results of each image. MULT: results a channel of x has; SUMS: channels of x a result is summed over.

    Weights of channel g, number m of its MULT (or SUMS) stand at g * stride_wo + m * stride_wi.
    """
    # turned taps of a stride meet results of one class, their positions modulo the stride: a tile has one class
    CLASSES: tl.constexpr = STRIDE_V if TURNED else 1
    c_blocks = tl.cdiv(CHANNELS, BLOCK_C)
    u_blocks = tl.cdiv(U, TILE)
    v_blocks = tl.cdiv(tl.cdiv(V, CLASSES), BLOCK_V)
    item = tl.program_id(0)
    channels = (item % c_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    item = item // c_blocks
    u = (item % u_blocks) * TILE
    item = item // u_blocks
    v_class = item % CLASSES
    item = item // CLASSES
    v_base = (item % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
    n = (item // v_blocks).to(tl.int64)
    v = v_base * CLASSES + v_class
    in_channels = channels < CHANNELS
    inside = (v < V) & in_channels
    x_channels = (channels // MULT * SUMS).to(INDEX)
    x_base = x_ptr + n * stride_xn
    w_channels = w_ptr + (channels // MULT) * stride_wo + (channels % MULT) * stride_wi
    u_in = (u // STRIDE_U if TURNED else u * STRIDE_U - PAD_U).to(INDEX)
    acc = zeros_tuple(TILE, BLOCK_V, BLOCK_C, SUM)
    for m in range(SUMS):
        x_places = x_base + (x_channels + m) * stride_xc
        w_places = w_channels + m * stride_wi
        if UNROLL:
            for r in tl.static_range(TAPS_V):
                v_in = v_base + (PAD_V - r * DILATION_V) if TURNED else v * STRIDE_V + (r * DILATION_V - PAD_V)
                acc = depthwise_row(
                    acc, x_places + v_in.to(INDEX) * stride_xv, w_places + r * stride_wv, u_in, IN_U,
                    inside & ((v_in >= 0) & (v_in < IN_V)), in_channels, stride_xu, stride_wu,
                    TILE, TAPS_U, STRIDE_U, PAD_U, DILATION_U, TURNED, SUM,
                )  # fmt: skip
        else:
            first = first_meeting_tap(v_class, TAPS_V, STRIDE_V, PAD_V, DILATION_V) if TURNED else 0
            step: tl.constexpr = meeting_step(STRIDE_V, DILATION_V) if TURNED else 1
            for r in range(first, TAPS_V, step):
                if TURNED:
                    # whole by the choice of the first tap; the stride is added so that it is divided as a positive
                    lead = v_class + PAD_V - r * DILATION_V + DILATION_V * TAPS_V * STRIDE_V
                    v_in = v_base + (lead // STRIDE_V - DILATION_V * TAPS_V)
                else:
                    v_in = v * STRIDE_V + (r * DILATION_V - PAD_V)
                acc = depthwise_row(
                    acc, x_places + v_in.to(INDEX) * stride_xv, w_places + r * stride_wv, u_in, IN_U,
                    inside & ((v_in >= 0) & (v_in < IN_V)), in_channels, stride_xu, stride_wu,
                    TILE, TAPS_U, STRIDE_U, PAD_U, DILATION_U, TURNED, SUM,
                )  # fmt: skip
    y_places = y_ptr + n * stride_yn + channels.to(INDEX) * stride_yc + v.to(INDEX) * stride_yv
    for place in tl.static_range(TILE):
        there = inside & (u + place < U)
        done = acc[place]
        if y_ptr.dtype.element_ty.is_floating():
            done = done.to(tl.float32)
        if STEPS != "":
            rows = tl.reshape(v, (BLOCK_V,))
            cols = tl.reshape(channels, (BLOCK_C,))
            along = rows * 0 + (u + place)
            p, q = (rows, along) if U_IS_W else (along, rows)
            done = finish_conv(
                done, operands, rows * 0 + n, p, q, cols, (rows < V) & (u + place < U), cols < CHANNELS,
                STEPS,
            )  # fmt: skip
        tl.store(y_places + (u + place).to(INDEX) * stride_yu, done.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def depthwise_weight_row(
    acc, d, x_places, u_in, IN_U, inside, stride_xu,
    AT: tl.constexpr, TILE: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """Add the products of TILE gradients d with one row of inputs to the accumulators AT .. AT + TAPS."""
    for i in tl.static_range(column_count(TILE, TAPS, STRIDE, 0, DILATION, False)):
        if meets(i, TILE, TAPS, STRIDE, 0, DILATION, False):
            column = u_in + i
            x = tl.load(
                x_places + column * stride_xu, mask=inside & ((column >= 0) & (column < IN_U)), other=0.0
            ).to(tl.float32)  # fmt: skip
            for place in tl.static_range(TILE):
                if tap_at(i, place, TAPS, STRIDE, 0, DILATION, False) >= 0:
                    sums = acc[AT + tap_at(i, place, TAPS, STRIDE, 0, DILATION, False)] + x * d[place]
                    acc = put(acc, AT + tap_at(i, place, TAPS, STRIDE, 0, DILATION, False), sums)
    return acc


@triton.jit
def conv2d_depthwise_weight(
    x_ptr, d_ptr, dw_ptr, BATCH, CHANNELS, U, V, IN_U, IN_V, stride_xn, stride_xc, stride_xu, stride_xv,
    stride_dn, stride_dc, stride_du, stride_dv, stride_part, stride_wo, stride_wi, stride_wu, stride_wv,
    TAPS_U: tl.constexpr, TAPS_V: tl.constexpr, STRIDE_U: tl.constexpr, STRIDE_V: tl.constexpr, PAD_U: tl.constexpr,
    PAD_V: tl.constexpr, DILATION_U: tl.constexpr, DILATION_V: tl.constexpr, MULT: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """One part of the gradient of the weight: ROWS x TAPS_U taps of BLOCK_C channels over every n-th tile of d.

    d: gradients of U x V results of each image. The part is added up in each thread first and over BLOCK_V at the end.
    """
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    row = tl.program_id(1) * ROWS
    in_channels = channels < CHANNELS
    u_blocks = tl.cdiv(U, TILE)
    v_blocks = tl.cdiv(V, BLOCK_V)
    x_channels = x_ptr + (channels // MULT).to(INDEX) * stride_xc
    d_channels = d_ptr + channels.to(INDEX) * stride_dc
    acc = zeros_tuple(ROWS * TAPS_U, BLOCK_V, BLOCK_C, tl.float32)
    for item in range(tl.program_id(2), BATCH * u_blocks * v_blocks, tl.num_programs(2)):
        n = (item // (u_blocks * v_blocks)).to(tl.int64)
        u = (item % u_blocks) * TILE
        v = (item // u_blocks % v_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[:, None]
        inside = (v < V) & in_channels
        d_places = d_channels + n * stride_dn + v.to(INDEX) * stride_dv
        d = ()
        for place in tl.static_range(TILE):
            there = inside & (u + place < U)
            d_one = tl.load(d_places + (u + place).to(INDEX) * stride_du, mask=there, other=0.0)
            d = d + (d_one.to(tl.float32),)  # type: ignore[assignment]
        for i in tl.static_range(ROWS):
            v_in = v * STRIDE_V + ((row + i) * DILATION_V - PAD_V)
            acc = depthwise_weight_row(
                acc, d, x_channels + n * stride_xn + v_in.to(INDEX) * stride_xv, (u * STRIDE_U - PAD_U).to(INDEX), IN_U,
                inside & ((v_in >= 0) & (v_in < IN_V)), stride_xu,
                i * TAPS_U, TILE, TAPS_U, STRIDE_U, DILATION_U,
            )  # fmt: skip
    part = dw_ptr + tl.program_id(2).to(tl.int64) * stride_part
    part += (channels // MULT).to(tl.int64) * stride_wo + (channels % MULT) * stride_wi
    for i in tl.static_range(ROWS):
        for tap in tl.static_range(TAPS_U):
            total = tl.sum(acc[i * TAPS_U + tap], axis=0)[None, :].to(dw_ptr.dtype.element_ty)
            places = part + (row + i) * stride_wv + tap * stride_wu
            tl.store(places, total, mask=in_channels & (row + i < TAPS_V))


def wide_index(*tensors):
    """The type of offsets inside a tile: 64 bits where a tensor reaches over 2^31 elements."""
    reach = max(sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) for t in tensors)
    return tl.int64 if reach >= 2**31 else tl.int32


def axes_of(tensor, u_is_w):
    """Strides of a [N, C, H, W] tensor in the order N, C, u, v."""
    n, c, h, w = tensor.stride()
    return (n, c, w, h) if u_is_w else (n, c, h, w)


def pairs_of(attributes, u_is_w):
    """(stride u, stride v), (pad u, pad v), (dilation u, dilation v) of a convolution."""
    names = ("w", "h") if u_is_w else ("h", "w")
    return [tuple(attributes.get(f"{kind}_{axis}", default) for axis in names)
            for kind, default in (("stride", 1), ("pad", 0), ("dilation", 1))]  # fmt: skip


def image_sizes(tensor, u_is_w):
    """(size along u, size along v) of a [N, C, H, W] tensor."""
    return (tensor.shape[3], tensor.shape[2]) if u_is_w else (tensor.shape[2], tensor.shape[3])


def by_channels(weight, channels):
    """A view [C, multiplier, R, S] of a depthwise weight [K, 1, R, S] or [C, multiplier, R, S]."""
    return weight[:, 0].unflatten(0, (channels, -1)) if weight.shape[0] != channels else weight


def plan_images(source, weight, result, knobs, attributes, epilogue, inputs, turned):
    """Launches that write a result image [N, C, ..] from a source image and a depthwise weight."""
    u_is_w = knobs["along"] == "w"
    n, channels = result.shape[:2]
    fewest = min(channels, source.shape[1])
    weight = by_channels(weight, fewest)
    launches, stride_w = [], weight.stride()
    if knobs["pack"]:
        packed, launch = pack_taps_launch(weight)
        launches.append(launch)
        stride_w = (weight.shape[1], 1, packed.stride(0) * weight.shape[3], packed.stride(0))
    stride, pad, dilation = pairs_of(attributes, u_is_w)
    (u, v), classes = image_sizes(result, u_is_w), stride[1] if turned else 1
    tile, block_v, block_c = knobs["tile"], knobs["block_v"], knobs["block_c"]
    programs = n * triton.cdiv(channels, block_c) * triton.cdiv(u, tile)
    programs *= classes * triton.cdiv(triton.cdiv(v, classes), block_v)
    w_u, w_v = (stride_w[3], stride_w[2]) if u_is_w else (stride_w[2], stride_w[3])
    taps = image_sizes(weight, u_is_w)
    steps, operands = conv_chain(inputs, epilogue)
    args = (
        source, packed if knobs["pack"] else weight, result, operands, channels, u, v, *image_sizes(source, u_is_w),
        *axes_of(source, u_is_w), stride_w[0], stride_w[1], w_u, w_v, *axes_of(result, u_is_w),
        *(part for pair in (taps, stride, pad, dilation) for part in pair), turned,
        channels // fewest, source.shape[1] // fewest, tile, block_v, block_c, bool(knobs["unroll"]),
        wide_index(source, result), tl.int32 if source.dtype == torch.int8 else tl.float32, u_is_w, steps,
    )  # fmt: skip
    return [*launches, (conv2d_depthwise, (programs,), args, {"num_warps": knobs["num_warps"], "num_stages": 1})]


def plan_weight(x, d_out, dw, knobs, attributes):
    """Launches that write the gradient dw [K, 1, R, S] of a depthwise weight."""
    u_is_w = knobs["along"] == "w"
    n, channels = d_out.shape[:2]
    by_channel = by_channels(dw, x.shape[1])
    stride, pad, dilation = pairs_of(attributes, u_is_w)
    (u, v), (taps_u, taps_v) = image_sizes(d_out, u_is_w), image_sizes(dw, u_is_w)
    parts, rows, tile, block_v, block_c = (knobs[x] for x in ("parts", "tap_rows", "tile", "block_v", "block_c"))
    launches, target, part_stride, strides = [], by_channel, 0, axes_of(by_channel, u_is_w)
    if parts > 1:
        target = torch.empty((parts, dw.shape[2] * dw.shape[3], channels), dtype=torch.float32, device=dw.device)
        launches, part_stride = [sum_tap_parts_launch(target, by_channel)], target.stride(0)
        row, column = dw.shape[3] * channels, channels
        strides = (by_channel.shape[1], 1, *((column, row) if u_is_w else (row, column)))
    args = (
        x, d_out, target, n, channels, u, v, *image_sizes(x, u_is_w), *axes_of(x, u_is_w), *axes_of(d_out, u_is_w),
        part_stride, *strides, taps_u, taps_v, *(part for pair in (stride, pad, dilation) for part in pair),
        by_channel.shape[1], tile, rows, block_v, block_c, wide_index(x, d_out),
    )  # fmt: skip
    grid = (triton.cdiv(channels, block_c), triton.cdiv(taps_v, rows), parts)
    options = {"num_warps": knobs["num_warps"], "num_stages": 1}
    return [(conv2d_depthwise_weight, grid, args, options), *launches]


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that compute a depthwise convolution, a transposed one, or a gradient, as the attributes say."""
    if out.numel() == 0:
        return []
    direction = attributes.get("direction", "forward")
    if direction == "weight_gradient":
        return plan_weight(inputs["x"], inputs["d_out"], out, knobs, attributes)
    turned = direction == "input_gradient" or bool(attributes.get("transposed", False))
    source = inputs["x" if direction == "forward" else "d_out"]
    return plan_images(source, inputs["w"], out, knobs, attributes, epilogue, inputs, turned)
