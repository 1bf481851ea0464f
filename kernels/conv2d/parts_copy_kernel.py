"""Copy fp32 images and weights into narrow parts whose sum they are, channels innermost, ready for tensor cores.

Every part but the last is the number cut to the bits that a part holds, so that what is left is exact. A pixel's, or a
tap's, parts follow each other, the largest first, each filled up with zeros to whole blocks of channels.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.layout_copy_kernel import conv_copy_launch


@triton.jit
def conv_copy_parts(
    src_ptr, dst_ptr, present, sizes, src_strides, dst_strides, stride_part,
    SRC_UNIT: tl.constexpr, DST_UNIT: tl.constexpr, TURNS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    PARTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The part p of src[a, b, c, i, j] goes to dst[a, b, c, i, j] + p * stride_part; the rest is as in
    `conv_copy_tiles`. KEPT: a mask of the bits of an fp32 number that a part holds."""
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
    x = tl.load(places, mask=((i < present_i)[:, None] & (j < present_j)[None, :]) & there, other=0.0)
    if TURNS:
        x = x.T
        dst_j = j.to(tl.int64) * (dst_strides[4] * DST_UNIT)
        places = dst_ptr + dst * DST_UNIT + dst_j[:, None] + i.to(tl.int64)[None, :] * dst_strides[3]
        inside = (j < size_j)[:, None] & (i < size_i)[None, :]
    else:
        dst_i = i.to(tl.int64) * (dst_strides[3] * DST_UNIT)
        places = dst_ptr + dst * DST_UNIT + dst_i[:, None] + j.to(tl.int64)[None, :] * dst_strides[4]
        inside = (i < size_i)[:, None] & (j < size_j)[None, :]
    for part in tl.static_range(PARTS):
        if part < PARTS - 1:
            # cut, not rounded: the largest numbers would become infinite; these and NaN leave nothing to later parts
            finite = tl.abs(x) < float("inf")
            rest = tl.where(finite, x, 0.0)
            cut = (rest.to(tl.int32, bitcast=True) & KEPT).to(tl.float32, bitcast=True)
            kept = tl.where(finite, cut, x)
            rest -= cut
        else:
            kept = x
            rest = x
        tl.store(places + part * stride_part, kept.to(dst_ptr.dtype.element_ty), mask=inside)
        x = rest


def parts_launch(source, target, stride_part, parts):
    """The launch that copies an fp32 source, part by part, to a target (a view of the first part) of at least its
    sizes; the rest is zero. Parts in fp32 are for tensor cores that read 19 bits of them, tf32."""
    _, grid, args, options = conv_copy_launch(source, target)
    kept = -(2**16) if target.dtype == torch.bfloat16 else -(2**13)
    return conv_copy_parts, grid, (*args[:6], stride_part, *args[6:], parts, kept), options


def padded_channels(channels, block_k):
    """Channels in whole blocks."""
    return triton.cdiv(channels, block_k) * block_k


def image_parts(image, dtype, parts, block_k, multiple):
    """(an image [N, parts * padded channels, H, W] in NHWC memory, the launch that makes it) of [N, C, H, W].

    The copy has H and W rounded up to a multiple, with zeros in what is added.
    """
    n, channels, *sizes = image.shape
    height, width = (triton.cdiv(size, step) * step for size, step in zip(sizes, multiple, strict=True))
    each = padded_channels(channels, block_k)
    buffer = torch.empty((n, height, width, parts, each), dtype=dtype, device=image.device)
    launch = parts_launch(image, buffer[..., 0, :].permute(0, 3, 1, 2), each, parts)
    return buffer.flatten(3).permute(0, 3, 1, 2), launch


def weight_parts(weight, groups, scatters, dtype, parts, block_k):
    """(lines [columns, R * S * parts * padded channels], the launch that makes them) of a weight [A, B, R, S].

    Columns are A and channels B; where results scatter columns are groups * B, and channels a group's share of A.
    """
    a, b, r, s = weight.shape
    columns, channels = (groups * b, a // groups) if scatters else (a, b)
    each = padded_channels(channels, block_k)
    buffer = torch.empty((columns, r, s, parts, each), dtype=dtype, device=weight.device)
    first = buffer[..., 0, :]
    if scatters:
        source, target = weight.unflatten(0, (groups, channels)), first.unflatten(0, (groups, b)).permute(0, 4, 1, 2, 3)
    else:
        source, target = weight, first.permute(0, 3, 1, 2)
    return buffer.flatten(1), parts_launch(source, target, each, parts)
