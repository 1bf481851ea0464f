"""Convolutions brought into the form that `resident_weights_kernel` computes: stride 1, lines of many channels.

Small groups: SPAN neighbouring groups become one, whose weight is zero where the groups differ. Gradient of the input
with stride 1: a convolution with the taps turned round. Few channels: STEP rows of an image (its vertical stride) are
laid beside each other, so that a pixel has STEP times as many channels; then the taps of a row, with all their
channels, are neighbours in memory, and count as channels of one tap. Descriptors read such overlapping lines in place.
"""

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def conv_merge_weight(
    w_ptr, wide_ptr, ROWS, w_strides, FIRST: tl.constexpr, SECOND: tl.constexpr, SPAN: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """wide[result channel, tap, channel of SPAN groups] of a weight whose groups have FIRST x SECOND channels.

    TURNED: results are the second dimension's channels, and taps run backwards. ROWS: result channels.
    """
    PER_ROW: tl.constexpr = SECOND if TURNED else FIRST
    PER_GROUP: tl.constexpr = FIRST if TURNED else SECOND
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tap = tl.program_id(1)
    channels = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    group = rows // PER_ROW
    inside = (rows < ROWS) & (channels < SPAN * PER_GROUP)
    own = inside & (channels // PER_GROUP == group % SPAN)
    if TURNED:
        first, second = group * FIRST + channels % PER_GROUP, rows % PER_ROW + channels * 0
        r, s = R - 1 - tap // S, S - 1 - tap % S
    else:
        first, second = rows + channels * 0, channels % PER_GROUP + rows * 0
        r, s = tap // S, tap % S
    places = first * w_strides[0] + second * w_strides[1] + r * w_strides[2] + s * w_strides[3]
    tile = tl.load(w_ptr + places, mask=own, other=0.0)
    tl.store(wide_ptr + (rows * (R * S) + tap).to(tl.int64) * (SPAN * PER_GROUP) + channels, tile, mask=inside)


@triton.jit
def conv_pack_weight(
    w_ptr, wide_ptr, ROWS, C, R, S, w_strides, STEP: tl.constexpr, DEPTH: tl.constexpr, LINE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """wide[k, row of taps // STEP, (s, row % STEP, c)] of a weight [K, C, R, S]; DEPTH places for c, LINE in all."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    block = tl.program_id(1)
    places = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    c = places % DEPTH
    r = block * STEP + places // DEPTH % STEP
    s = places // (DEPTH * STEP)
    inside = (rows < ROWS) & (places < LINE)
    source = rows * w_strides[0] + c * w_strides[1] + r * w_strides[2] + s * w_strides[3]
    tile = tl.load(w_ptr + source, mask=inside & (c < C) & (r < R) & (s < S), other=0.0)
    tl.store(wide_ptr + (rows * tl.num_programs(1) + block).to(tl.int64) * LINE + places, tile, mask=inside)


@triton.jit
def conv_pack_image(
    x_ptr, packed_ptr, C, IN_H, IN_W, HEIGHT, LENGTH, x_strides, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    STEP: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """packed[n, row // STEP, column, row % STEP, c] of an image, its padding written out: one of HEIGHT lines of LENGTH
    elements, or a part of it."""
    line = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = places % DEPTH
    y = line % HEIGHT * STEP + places // DEPTH % STEP - PAD_H
    x = places // (DEPTH * STEP) - PAD_W
    inside = (places < LENGTH) & (c < C) & (y >= 0) & (y < IN_H) & (x >= 0) & (x < IN_W)
    image = x_ptr + (line // HEIGHT).to(tl.int64) * x_strides[0]
    source = c.to(tl.int64) * x_strides[1] + y.to(tl.int64) * x_strides[2] + x.to(tl.int64) * x_strides[3]
    tile = tl.load(image + source, mask=inside, other=0.0)
    tl.store(packed_ptr + line.to(tl.int64) * LENGTH + places, tile, mask=places < LENGTH)


@dataclasses.dataclass(frozen=True)
class Arranged:
    """image: (tensor, sizes, strides) as [N, H, W, C]. weight [result channels, taps, channels of a group]."""

    image: Any
    weight: Any
    groups: int
    taps: tuple[int, int]
    pad: tuple[int, int]


def packed_depth(channels, stride, element_size):
    """Places for a pixel's channels, so that results' pixels are whole pieces of 16 bytes apart."""
    depth = channels
    while stride[0] * stride[1] * depth * element_size % 16:
        depth += 1
    return depth


def packed_image(x, taps, result, attributes):
    """(an image of few channels in its packed form, its sizes and strides as [N, H, W, C], places for a pixel's
    channels, the launch that fills it). taps: rows and columns of the kernel; result: those of the result."""
    step, across, pad_h, pad_w = (attributes[name] for name in ("stride_h", "stride_w", "pad_h", "pad_w"))
    size, (n, c, height, width), (r, s), (p, q) = x.element_size(), x.shape, taps, result
    depth = packed_depth(c, (step, across), size)
    unit, lines = step * depth, p + triton.cdiv(r, step) - 1
    # a line is a whole number of results' steps and of pieces of 16 bytes
    whole = math.lcm(across, 16 // size)
    columns = triton.cdiv((q - 1) * across + s, whole) * whole
    packed = torch.empty((n, lines, columns, unit), dtype=x.dtype, device=x.device)
    args = (
        x, packed, c, height, width, lines, columns * unit, x.stride(), pad_h, pad_w, step, depth, 1024,
    )  # fmt: skip
    launch = conv_pack_image, (n * lines, triton.cdiv(columns * unit, 1024)), args, {"num_warps": 4}
    strides = [lines * columns * unit, columns * unit, across * unit, 1]
    return packed, [n, lines, q, s * unit], strides, depth, launch


def packed_form(x, weight, out, attributes):
    """(Arranged, launches) of a convolution of few channels."""
    (k, c, r, s), step = weight.shape, attributes["stride_h"]
    packed, sizes, strides, depth, launch = packed_image(x, (r, s), out.shape[2:], attributes)
    rows, padded = triton.cdiv(r, step), triton.cdiv(sizes[3], 64) * 64
    wide = torch.empty((k, rows, padded), dtype=x.dtype, device=x.device)
    args = (weight, wide, k, c, r, s, weight.stride(), step, depth, padded, 16, 64)
    pack = (conv_pack_weight, (triton.cdiv(k, 16), rows, padded // 64), args, {"num_warps": 4})
    return Arranged((packed, sizes, strides), wide, 1, (rows, 1), (0, 0)), [launch, pack]


def arranged(inputs, out, span, attributes):
    """(Arranged, launches that make it) of a convolution or of the gradient of its input. span: groups that become one;
    0 packs the few channels of an image."""
    turned = attributes["direction"] == "input_gradient"
    image, weight = inputs["d_out" if turned else "x"], inputs["w"]
    if span == 0:
        return packed_form(image, weight, out, attributes)
    groups, (first, second, r, s) = attributes["groups"], weight.shape
    first //= groups
    pad = attributes["pad_h"], attributes["pad_w"]
    if turned:
        pad = r - 1 - pad[0], s - 1 - pad[1]
    (n, c, h, w), (s_n, _, s_h, s_w) = image.shape, image.stride()
    channels = span * (first if turned else second)
    wide = torch.empty((out.shape[1], r * s, channels), dtype=weight.dtype, device=weight.device)
    block = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(out.shape[1], 16), r * s, triton.cdiv(channels, block))
    args = (weight, wide, out.shape[1], weight.stride(), first, second, span, r, s, turned, 16, block)
    form = Arranged((image, [n, h, w, c], [s_n, s_h, s_w, 1]), wide, groups // span, (r, s), pad)
    return form, [(conv_merge_weight, grid, args, {"num_warps": 4})]
