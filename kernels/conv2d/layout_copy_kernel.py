"""Copy a tensor into another order of dimensions in memory, NCHW to NHWC for one: both sides in long pieces.

A tile has two dimensions: one along which neighbours are neighbours in the source, and one along which they are in the
target. It is read along the first, turned inside of the multiprocessor and written along the second.
"""

import math

import torch
import triton
import triton.language as tl

COPY_SIDE = 64
COPY_PIECE = 16


@triton.jit
def conv_copy_tiles(
    src_ptr, dst_ptr, present, sizes, src_strides, dst_strides,
    SRC_UNIT: tl.constexpr, DST_UNIT: tl.constexpr, TURNS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """dst[a, b, c, i, j] = src[a, b, c, i, j], or 0 from `present` elements on; j is along the source's memory.

    TURNS: i is along the target's memory, else j is there too. Sizes of the dimension along the memory, and strides of
    the others, are in units of SRC_UNIT or DST_UNIT elements, so that the compiler knows what divides them.
    """
    J_UNIT: tl.constexpr = SRC_UNIT if TURNS else min(SRC_UNIT, DST_UNIT)
    I_UNIT: tl.constexpr = DST_UNIT if TURNS else 1
    present_i, present_j = present[3] * I_UNIT, present[4] * J_UNIT
    size_i, size_j = sizes[3] * I_UNIT, sizes[4] * J_UNIT
    tiles_i, tiles_j = tl.cdiv(size_i, BLOCK_I), tl.cdiv(size_j, BLOCK_J)
    tile = tl.program_id(0)
    i = tile % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
    tile = tile // tiles_i
    j = tile % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
    tile = tile // tiles_j
    c = tile % sizes[2]
    b = tile // sizes[2] % sizes[1]
    a = tile // sizes[2] // sizes[1]
    there = (a < present[0]) & (b < present[1]) & (c < present[2])
    src = a.to(tl.int64) * src_strides[0] + b.to(tl.int64) * src_strides[1] + c.to(tl.int64) * src_strides[2]
    dst = a.to(tl.int64) * dst_strides[0] + b.to(tl.int64) * dst_strides[1] + c.to(tl.int64) * dst_strides[2]
    src_i = i.to(tl.int64) * (src_strides[3] * SRC_UNIT)
    places = src_ptr + src * SRC_UNIT + src_i[:, None] + j.to(tl.int64)[None, :] * src_strides[4]
    x = tl.load(places, mask=((i < present_i)[:, None] & (j < present_j)[None, :]) & there, other=0)
    if TURNS:
        dst_j = j.to(tl.int64) * (dst_strides[4] * DST_UNIT)
        places = dst_ptr + dst * DST_UNIT + dst_j[:, None] + i.to(tl.int64)[None, :] * dst_strides[3]
        tl.store(places, x.T, mask=(j < size_j)[:, None] & (i < size_i)[None, :])
    else:
        dst_i = i.to(tl.int64) * (dst_strides[3] * DST_UNIT)
        places = dst_ptr + dst * DST_UNIT + dst_i[:, None] + j.to(tl.int64)[None, :] * dst_strides[4]
        tl.store(places, x, mask=(i < size_i)[:, None] & (j < size_j)[None, :])


def merged_axes(axes):
    """Axes (present, size, stride in source, stride in target) without those of one element, neighbours joined where
    both sides run on without a gap; five at least."""
    kept = axes[:0]
    for axis in (axis for axis in axes if axis[1] != 1):
        present, size, src, dst = axis
        if kept and present == size and kept[-1][2] == src * size and kept[-1][3] == dst * size:
            kept[-1] = (kept[-1][0] * size, kept[-1][1] * size, src, dst)
        else:
            kept.append(axis)
    return [(1, 1, 0, 0)] * (5 - len(kept)) + kept


def common_unit(numbers, most):
    """The largest power of two, at most `most`, that divides all of the numbers."""
    unit = most
    while any(number % unit for number in numbers):
        unit //= 2
    return unit


def conv_copy_launch(source, target):
    """The launch that copies a source of up to five dimensions to a target of at least its sizes; the rest is zero."""
    if source.element_size() == 1:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    axes = merged_axes(list(zip(source.shape, target.shape, source.stride(), target.stride(), strict=True)))
    # a stride of 0 repeats an image: that is no direction to read along
    j = min(range(5), key=lambda x: (axes[x][1] == 1, axes[x][2] == 0, axes[x][2]))
    i = min((x for x in range(5) if x != j), key=lambda x: (axes[x][1] == 1, axes[x][3]))
    turns = axes[i][1] > 1 and axes[i][3] < axes[j][3]
    order = [x for x in range(5) if x not in (i, j)] + [i, j]
    axes = [axes[x] for x in order]
    present, sizes, src, dst = (list(column) for column in zip(*axes, strict=True))
    most = COPY_PIECE // source.element_size()
    along = 3 if turns else 4
    src_unit = common_unit([*src[:4], present[4], sizes[4]], most)
    dst_unit = common_unit(
        [stride for x, stride in enumerate(dst) if x != along] + [sizes[along], present[along]], most
    )
    units = {3: dst_unit if turns else 1, 4: src_unit if turns else min(src_unit, dst_unit)}
    shown = [[size // units.get(x, 1) for x, size in enumerate(column)] for column in (present, sizes)]
    src = [stride // src_unit if x != 4 else stride for x, stride in enumerate(src)]
    dst = [stride // dst_unit if x != along else stride for x, stride in enumerate(dst)]
    block_i, block_j = (max(16, min(COPY_SIDE, triton.next_power_of_2(size))) for size in sizes[3:])
    tiles = triton.cdiv(sizes[3], block_i) * triton.cdiv(sizes[4], block_j) * math.prod(sizes[:3])
    args = (
        source, target, *(tuple(column) for column in (*shown, src, dst)), src_unit, dst_unit, turns, block_i, block_j,
    )  # fmt: skip
    return conv_copy_tiles, (tiles,), args, {"num_warps": 4}


def nhwc_copy(image, multiple=(1, 1)):
    """(a copy of an image [N, C, H, W] in NHWC memory that the bulk copy engine can read, the launch that fills it).

    The copy has H and W rounded up to a multiple, with zeros in what is added.
    """
    n, channels, *sizes = image.shape
    height, width = (triton.cdiv(size, step) * step for size, step in zip(sizes, multiple, strict=True))
    pitch = triton.cdiv(channels * image.element_size(), COPY_PIECE) * COPY_PIECE // image.element_size()
    buffer = torch.empty((n, height, width, pitch), dtype=image.dtype, device=image.device)
    copy = buffer[..., :channels].permute(0, 3, 1, 2)
    return copy, conv_copy_launch(image, copy)


def krsc_copy(weight):
    """(a copy of a weight [A, B, R, S] in the order A, R, S, B, the launch that fills it)."""
    a, b, r, s = weight.shape
    copy = torch.empty((a, r, s, b), dtype=weight.dtype, device=weight.device).permute(0, 3, 1, 2)
    return copy, conv_copy_launch(weight, copy)


def turned_weight_copy(weight, groups):
    """(a copy [groups * B, A / groups, R, S] of a weight [A, B, R, S] in the order B, R, S, A, the launch that fills
    it): inside of each group, A and B change places."""
    a, b, r, s = weight.shape
    each = a // groups
    buffer = torch.empty((groups * b, r, s, each), dtype=weight.dtype, device=weight.device)
    source = weight.unflatten(0, (groups, each))
    target = buffer.unflatten(0, (groups, b)).permute(0, 4, 1, 2, 3)
    return buffer.permute(0, 3, 1, 2), conv_copy_launch(source, target)
