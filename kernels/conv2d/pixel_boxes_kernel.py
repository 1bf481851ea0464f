"""Boxes of pixels over which the gradient of a weight is summed: their order, and images from which TMA reads them, as
they lie, copied, in one row, or in parts."""

import itertools

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.conv2d.layout_copy_kernel import nhwc_copy
from kernelwright.kernels.conv2d.parts_copy_kernel import parts_launch
from kernelwright.kernels.conv2d.tma_view_kernel import safe_strides


@gluon.jit
def wgrad_tiles(
    ROWS, CHANNELS, GROUPS: gl.constexpr, TAPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """How many tiles the gradient has."""
    return gl.cdiv(ROWS, BLOCK_M) * gl.cdiv(TAPS * gl.cdiv(CHANNELS, BLOCK_N), UNITS) * GROUPS


@gluon.jit
def wgrad_place(
    item, tiles, ROWS, CHANNELS, TAPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """(part of the sum, group, first row, first column block) of an item; items of the same pixels are neighbours."""
    tiles_m = gl.cdiv(ROWS, BLOCK_M)
    tiles_n = gl.cdiv(TAPS * gl.cdiv(CHANNELS, BLOCK_N), UNITS)
    tile = item % tiles
    group = tile // (tiles_m * tiles_n)
    tile = tile % (tiles_m * tiles_n)
    return item // tiles, group, tile // tiles_n * BLOCK_M, tile % tiles_n * UNITS


@gluon.jit
def wgrad_boxes(part, N, OUT_H, OUT_W, SPLIT_K, TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr):
    """(first box of pixels, how many) of a part of the sum."""
    boxes = gl.cdiv(N, TILE_N) * gl.cdiv(OUT_H, TILE_H) * gl.cdiv(OUT_W, TILE_W)
    each = boxes // SPLIT_K
    longer = boxes % SPLIT_K
    first = gl.minimum(part, longer)
    return part * each + first, each + gl.minimum(part + 1, longer) - first


def boxes_readable(image, multiple):
    """Whether the bulk copy engine can read boxes of an image [N, C, H, W] of 16-bit elements, of which H and W must be
    multiples of the strides that they are read in."""
    sizes, strides = image.shape, image.stride()
    whole = all(stride % 8 == 0 for place, stride in enumerate(strides) if place != 1 and sizes[place] > 1)
    repeated = sizes[0] > 1 and not strides[0]
    even = sizes[2] % multiple[0] == 0 and sizes[3] % multiple[1] == 0
    return whole and even and not repeated and (strides[1] == 1 or sizes[1] == 1) and image.data_ptr() % 16 == 0


def boxes_of(image, multiple, repack):
    """(an image as boxes can be read from it, the launches that copy it there)."""
    if not repack or boxes_readable(image, multiple):
        return image, []
    copy, launch = nhwc_copy(image, multiple)
    return copy, [launch]


def as_line(image):
    """An image [N, C, H, W] as [1, C, 1, N * H * W]; None where its pixels are not evenly spaced in memory."""
    (n, channels, height, width), (step_n, step_c, step_h, step_w) = image.shape, image.stride()
    kept = [(size, step) for size, step in ((n, step_n), (height, step_h), (width, step_w)) if size > 1]
    if any(outer[1] != inner[0] * inner[1] for outer, inner in itertools.pairwise(kept)):
        return None
    step = kept[-1][1] if kept else channels
    return image.as_strided((1, channels, 1, n * height * width), (0, step_c, 0, step), image.storage_offset())


def pixel_lines(x, d_out, geometry):
    """Both images with all of their pixels in one row, where there is one tap and this changes nothing; else as they
    are."""
    plain = all(geometry[f"{name}_{axis}"] == size for name, size in (("STRIDE", 1), ("PAD", 0)) for axis in "HW")
    if geometry["R"] == geometry["S"] == 1 and plain:
        lines = as_line(x), as_line(d_out)
        if None not in lines:
            return lines
    return x, d_out


def box_descriptor(tensor, sizes, strides, box):
    """A descriptor for boxes of 16-bit elements whose rows are swizzled lines of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 16, len(box))
    return GluonDescriptor(tensor, sizes, safe_strides(sizes, strides, 2), box, layout)


def stacked_parts(image, parts, multiple):
    """(images [parts * N, C, H, W] in bf16 and NHWC memory, whose sum over parts is an fp32 image [N, C, H, W], the
    launch that makes them); H and W are rounded up to a multiple, with zeros in what is added."""
    n, channels, *sizes = image.shape
    height, width = (triton.cdiv(size, step) * step for size, step in zip(sizes, multiple, strict=True))
    pitch = triton.cdiv(channels, 8) * 8
    buffer = torch.empty((parts, n, height, width, pitch), dtype=torch.bfloat16, device=image.device)
    launch = parts_launch(image, buffer[0].permute(0, 3, 1, 2), buffer.stride(0), parts)
    return buffer.flatten(0, 1)[..., :channels].permute(0, 3, 1, 2), launch
