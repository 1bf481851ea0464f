"""Which input positions the taps of a convolution meet along one axis, and weights and gradients laid out by taps.

Plain taps: result position p and tap r meet at p * stride - pad + r * dilation. Turned taps (the transposed convolution
and the gradient of the input): they meet at (p + pad - r * dilation) / stride, where that is whole.
"""

import torch
import triton
import triton.language as tl


@triton.constexpr_function
def first_column(taps, stride, pad, dilation, turned):
    """The least column that a tile of neighbouring results meets, counted from the tile's own column 0."""
    return (pad - (taps - 1) * dilation) // stride if turned else 0


@triton.constexpr_function
def column_count(tile, taps, stride, pad, dilation, turned):
    """How many columns, from the first on, a tile of neighbouring results spans."""
    if turned:
        return (tile - 1 + pad) // stride - (pad - (taps - 1) * dilation) // stride + 1
    return (tile - 1) * stride + (taps - 1) * dilation + 1


@triton.constexpr_function
def tap_at(column, place, taps, stride, pad, dilation, turned):
    """The tap with which result number `place` of a tile meets a column; -1 if none does."""
    distance = place + pad - column * stride if turned else column - place * stride
    tap = distance // dilation
    return tap if distance % dilation == 0 and 0 <= tap < taps else -1


@triton.constexpr_function
def meets(column, tile, taps, stride, pad, dilation, turned):
    """Whether any result of a tile meets a column."""
    for place in range(tile):
        distance = place + pad - column * stride if turned else column - place * stride
        if distance % dilation == 0 and 0 <= distance // dilation < taps:
            return True
    return False


@triton.jit
def put(items, AT: tl.constexpr, value):
    """A tuple with another value at one place."""
    return items[:AT] + (value,) + items[AT + 1 :]


@triton.jit
def zeros_tuple(COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUM: tl.constexpr):
    """COUNT accumulators [ROWS, COLS]."""
    items = ()
    for _ in tl.static_range(COUNT):
        items = items + (tl.zeros((ROWS, COLS), SUM),)  # type: ignore[assignment]
    return items


@triton.jit
def conv2d_pack_taps(
    w_ptr, packed_ptr, CHANNELS, TAPS, S, stride_co, stride_ci, stride_r, stride_s,
    MULT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """packed[tap, channel] = w[channel // MULT, channel % MULT, r, s]."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
    taps = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    inside = (channels < CHANNELS) & (taps < TAPS)
    wide = channels.to(tl.int64)
    places = wide // MULT * stride_co + wide % MULT * stride_ci + taps // S * stride_r + taps % S * stride_s
    tile = tl.load(w_ptr + places, mask=inside, other=0.0)
    tl.store(packed_ptr + taps * CHANNELS + channels, tile, mask=inside)


@triton.jit
def conv2d_sum_tap_parts(
    partial_ptr, dw_ptr, CHANNELS, S, PARTS, stride_part, stride_co, stride_ci, stride_r, stride_s,
    MULT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """dw[channel // MULT, channel % MULT, r, s] = sum over parts of partial[part, tap, channel], in a fixed order."""
    channels = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap = tl.program_id(1)
    inside = channels < CHANNELS
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    places = partial_ptr + tap.to(tl.int64) * CHANNELS + channels
    for first in range(0, PARTS, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)[:, None]
        there = (part < PARTS) & inside[None, :]
        acc += tl.load(places[None, :] + part.to(tl.int64) * stride_part, mask=there, other=0.0)
    wide = channels.to(tl.int64)
    target = dw_ptr + wide // MULT * stride_co + wide % MULT * stride_ci + tap // S * stride_r + tap % S * stride_s
    tl.store(target, tl.sum(acc, axis=0).to(dw_ptr.dtype.element_ty), mask=inside)


def pack_taps_launch(weight):
    """(packed [R * S, channels], the launch that fills it) of a weight [C, multiplier, R, S]."""
    groups, multiplier, r, s = weight.shape
    packed = torch.empty((r * s, groups * multiplier), dtype=weight.dtype, device=weight.device)
    block_t = min(64, triton.next_power_of_2(r * s))
    grid = (triton.cdiv(groups * multiplier, 64), triton.cdiv(r * s, block_t))
    args = (weight, packed, groups * multiplier, r * s, s, *weight.stride(), multiplier, 64, block_t)
    return packed, (conv2d_pack_taps, grid, args, {"num_warps": 4})


def sum_tap_parts_launch(partial, dw):
    """The launch that sums partial [parts, R * S, channels] into dw [C, multiplier, R, S]."""
    parts, taps, channels = partial.shape
    block, together = 32, min(64, triton.next_power_of_2(parts))
    grid = (triton.cdiv(channels, block), taps)
    args = (partial, dw, channels, dw.shape[3], parts, partial.stride(0), *dw.stride(), dw.shape[1], block, together)
    return conv2d_sum_tap_parts, grid, args, {"num_warps": 4}
