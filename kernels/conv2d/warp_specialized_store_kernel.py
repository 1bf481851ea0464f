"""How warpgroups finish and write a tile of a convolution: by the bulk copy engine, or in pieces of pixels."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.conv2d.conv_epilogue_kernel import finish_conv, image_places
from kernelwright.kernels.conv2d.layout_copy_kernel import common_unit
from kernelwright.kernels.conv2d.tma_operand_kernel import ENGINE_BYTES, class_views, stored_by_tma
from kernelwright.kernels.conv2d.tma_view_kernel import result_view, safe_strides
from kernelwright.kernels.matmul.warp_specialized_kernel import gluon_barrier, tma_store, ws_halves


@gluon.jit
def conv_ws_pixels(
    rows, n, i, j, first_h, first_w, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr,
):  # fmt: skip
    """(image, row, column) in the result of these rows of a tile."""
    batch = n + rows // (TILE_H * TILE_W)
    p = first_h + (i + rows // TILE_W % TILE_H) * OUT_STEP_H
    q = first_w + (j + rows % TILE_W) * OUT_STEP_W
    return batch, p, q


@gluon.jit
def conv_ws_store_box(x, out_descs, out_ring, which, n, i, j, k, CLASSES: gl.constexpr):
    """Write a finished tile of this warpgroup, whose first element is (n, i, j) of channel k of a class, by TMA."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    WIDTH: gl.constexpr = out_ring.shape[4]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, out_ring.dtype.primitive_bitwidth, 2)
    # only the thread that started the copies waits for them
    tma.store_wait(0)
    gluon_barrier()
    out_ring._reinterpret(out_ring.dtype, [ROWS, COLS], layout).store(x.to(out_ring.dtype))
    fence_async_shared()
    gluon_barrier()
    for each in gl.static_range(CLASSES):
        if which == each:
            for panel in gl.static_range(COLS // WIDTH):
                tma_store(out_descs[each], [n, i, j, k + panel * WIDTH], out_ring.index(panel))


@gluon.jit
def conv_ws_store_pixels(
    x, out_ring, out, out_strides, n, i, j, first_h, first_w, first_row, col, group, N, OUT_H, OUT_W, COLS,
    OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Write a finished tile of this warpgroup to a result whose neighbouring pixels are neighbours in memory, UNIT
    pixels at once; out_strides but the last, and OUT_W, are multiples of UNIT."""
    ROWS: gl.constexpr = x.shape[0]
    LANES: gl.constexpr = min(32, ROWS // UNIT)
    layout: gl.constexpr = gl.BlockedLayout([UNIT, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    gluon_barrier()
    out_ring.store(x.to(out_ring.dtype))
    gluon_barrier()
    tile = out_ring.load(layout)
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    batch, p, q = conv_ws_pixels(rows, n, i, j, first_h, first_w, OUT_STEP_H, OUT_STEP_W, TILE_H, TILE_W)
    # the compiler learns what divides the strides, and stores whole pieces
    strides = (
        out_strides[0] // UNIT * UNIT, out_strides[1] // UNIT * UNIT, out_strides[2] // UNIT * UNIT, out_strides[3]
    )  # fmt: skip
    places = out + image_places(batch, p, q, group * COLS + cols, strides)
    row_inside = (batch < N) & (p < OUT_H) & (q < OUT_W // UNIT * UNIT)
    gl.store(places, tile, mask=row_inside[:, None] & (cols < COLS)[None, :])


@gluon.jit
def conv_ws_epilogue(
    acc, out_descs, out_ring, out, operands, out_strides, n, i, j, first_h, first_w, first_row, col, group, N, OUT_H,
    OUT_W, COLS, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, SUBTILE: gl.constexpr, STORE: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's accumulator, whose first row is first_row of its tile, in SUBTILE parts."""
    if SUBTILE > 1:
        left, right = ws_halves(acc)
        conv_ws_epilogue(
            left, out_descs, out_ring, out, operands, out_strides, n, i, j, first_h, first_w, first_row, col, group,
            N, OUT_H, OUT_W, COLS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W,
            SUBTILE // 2, STORE, UNIT, STEPS,
        )  # fmt: skip
        conv_ws_epilogue(
            right, out_descs, out_ring, out, operands, out_strides, n, i, j, first_h, first_w, first_row,
            col + left.shape[1], group, N, OUT_H, OUT_W, COLS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W,
            SUBTILE // 2, STORE, UNIT, STEPS,
        )  # fmt: skip
    else:
        rows = first_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        batch, p, q = conv_ws_pixels(rows, n, i, j, first_h, first_w, OUT_STEP_H, OUT_STEP_W, TILE_H, TILE_W)
        k = group * COLS + cols
        row_inside = (batch < N) & (p < OUT_H) & (q < OUT_W)
        done = finish_conv(acc, operands, batch, p, q, k, row_inside, cols < COLS, STEPS)
        if STORE == "tma":
            conv_ws_store_box(
                done, out_descs, out_ring, first_h * OUT_STEP_W + first_w, n + first_row // (TILE_H * TILE_W),
                i + first_row // TILE_W % TILE_H, j + first_row % TILE_W, group * COLS + col,
                OUT_STEP_H * OUT_STEP_W,
            )  # fmt: skip
        elif STORE == "pixels":
            conv_ws_store_pixels(
                done, out_ring, out, out_strides, n, i, j, first_h, first_w, first_row, col, group, N, OUT_H, OUT_W,
                COLS, OUT_STEP_H, OUT_STEP_W, TILE_H, TILE_W, UNIT,
            )  # fmt: skip
        else:
            places = out + image_places(batch, p, q, k, out_strides)
            gl.store(places, done.to(out.dtype.element_ty), mask=row_inside[:, None] & (cols < COLS)[None, :])


def swizzled(tensor, sizes, strides, box):
    """A descriptor for boxes whose rows are swizzled lines of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), len(box))
    return GluonDescriptor(tensor, sizes, safe_strides(sizes, strides, tensor.element_size()), box, layout)


def half_of(tile):
    """The first half of a tile (images, rows, columns), in the order of its pixels."""
    n, height, width = tile
    if n > 1:
        return n // 2, height, width
    return (1, height // 2, width) if height > 1 else (1, 1, width // 2)


def result_stores(out, tile, out_tile, steps):
    """(how a result [N, K, P, Q] is written, descriptors of its classes, pixels written at once)."""
    views = class_views(out, steps)
    if len(views) <= 4 and stored_by_tma(out) and all(view.numel() for view in views):
        box = [*out_tile, 128 // out.element_size()]
        shown = [(view, result_view(view)) for view in views]
        return "tma", [swizzled(view, sizes, strides, box) for view, (sizes, strides) in shown], 1
    if out.stride(1) == 1:
        return "pointer", [], 1
    strides = [stride for axis, stride in enumerate(out.stride()[:3]) if out.shape[axis] > 1]
    address = out.storage_offset() if out.device.type == "meta" else out.data_ptr() // out.element_size()
    even = steps[1] == 1 and out.stride(3) == 1
    most = ENGINE_BYTES // out.element_size() if even else 1
    return "pixels", [], common_unit([*strides, out.shape[3], tile[2], address], most)
