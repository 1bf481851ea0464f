"""Convolution by specialised warps (Hopper), NHWC: one warp loads boxes of pixels and of weights by TMA into a ring,
two warpgroups multiply them, both operands in shared memory. Serves forward, transposed and the gradient of the input.
Operands that lie otherwise, NCHW, are copied first.

Tiles, boxes and classes are those of `implicit_gemm_tma_kernel`. "cooperative": both warpgroups share a tile, each has
half of its pixels. "pingpong": each has tiles of its own and they take turns on the tensor cores, so that one's
epilogue runs beside the other's products.
"""

import math

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_init, warpgroup_mma_wait

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain
from kernelwright.kernels.conv2d.implicit_gemm_kernel import class_of_axis
from kernelwright.kernels.conv2d.layout_copy_kernel import conv_copy_launch
from kernelwright.kernels.conv2d.tma_operand_kernel import engine_image, engine_weight
from kernelwright.kernels.conv2d.tma_view_kernel import class_of_unit, conv_geometry, image_view, met_by
from kernelwright.kernels.conv2d.warp_specialized_store_kernel import (
    conv_ws_epilogue,
    half_of,
    result_stores,
    swizzled,
)
from kernelwright.kernels.matmul.warp_specialized_kernel import (
    panel_descriptor,
    tma_load,
    ws_load,
    ws_multiply,
    ws_programs,
)


@gluon.jit
def conv_ws_items(
    N, GRID_H, GRID_W, COLS, GROUPS: gl.constexpr, CLASSES: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """How many tiles there are."""
    pixels = gl.cdiv(N, TILE_N) * gl.cdiv(GRID_H, TILE_H) * gl.cdiv(GRID_W, TILE_W)
    return pixels * gl.cdiv(COLS, BLOCK_N) * (GROUPS * CLASSES)


@gluon.jit
def conv_ws_place(
    item, GRID_H, GRID_W, COLS, GROUPS: gl.constexpr, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(first channel, group, class, first image, row and column) of a tile; tiles of the same pixels are neighbours."""
    CLASSES: gl.constexpr = OUT_STEP_H * OUT_STEP_W
    tiles_h = gl.cdiv(GRID_H, TILE_H)
    tiles_w = gl.cdiv(GRID_W, TILE_W)
    tiles_k = gl.cdiv(COLS, BLOCK_N)
    col = item % tiles_k * BLOCK_N
    group = item // tiles_k % GROUPS
    tile = item // (tiles_k * GROUPS)
    which = class_of_unit(tile, tiles_k * GROUPS, gl.num_programs(0), CLASSES)
    first_h = which // OUT_STEP_W
    first_w = which % OUT_STEP_W
    tile = tile // CLASSES
    j = tile % tiles_w * TILE_W
    i = tile // tiles_w % tiles_h * TILE_H
    n = tile // (tiles_w * tiles_h) * TILE_N
    return col, group, first_h, first_w, n, i, j


@gluon.jit
def conv_ws_steps(
    item, items, blocks, GRID_H, GRID_W, COLS, GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr,
    S: gl.constexpr, STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr,
    DILATION_H: gl.constexpr, DILATION_W: gl.constexpr, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr,
    W_STEP_H: gl.constexpr, W_STEP_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """How many stages a tile takes, each tap having `blocks` of them; none behind the last tile."""
    _, _, first_h, first_w, _, _, _ = conv_ws_place(
        item, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N
    )  # fmt: skip
    _, taps_h, _ = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
    _, taps_w, _ = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)
    return tl.where(item < items, taps_h * taps_w * blocks, 0)


@gluon.jit
def conv_ws_producer(
    x, w, x_ring, w_ring, full, empty, N, GRID_H, GRID_W, COLS, CHANNELS, stride_remainder,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr,
    TAP_STEP_W: gl.constexpr, ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, OUT_STEP_H: gl.constexpr,
    OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr, W_STEP_W: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, W_ACROSS: gl.constexpr,
):  # fmt: skip
    PANELS: gl.constexpr = BLOCK_N // BLOCK_K if W_ACROSS else 1
    BYTES: gl.constexpr = (TILE_N * TILE_H * TILE_W + BLOCK_N) * 128
    items = conv_ws_items(N, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H * OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N)
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        col, group, first_h, first_w, n, i, j = conv_ws_place(
            item, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N
        )  # fmt: skip
        tap0_h, taps_h, origin_h = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
        tap0_w, taps_w, origin_w = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)
        for u in range(taps_h):
            for v in range(taps_w):
                place = (tap0_h + u * W_STEP_H) * S + tap0_w + v * W_STEP_W
                if SPLIT_H or SPLIT_W:
                    pixel_h, remainder_h = met_by(u, SPLIT_H, STRIDE_H, PAD_H, DILATION_H, TAP_STEP_H, ORIGIN_H)
                    pixel_w, remainder_w = met_by(v, SPLIT_W, STRIDE_W, PAD_W, DILATION_W, TAP_STEP_W, ORIGIN_W)
                elif SCATTERS:
                    pixel_h = origin_h + u * TAP_STEP_H
                    pixel_w = origin_w + v * TAP_STEP_W
                else:
                    pixel_h = ORIGIN_H + u * TAP_STEP_H
                    pixel_w = ORIGIN_W + v * TAP_STEP_W
                for block in range(gl.cdiv(CHANNELS, BLOCK_K)):
                    c = block * BLOCK_K
                    stage = turn % STAGES
                    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    mbarrier.expect(ready, BYTES)
                    inner = group * CHANNELS + c
                    if SPLIT_H or SPLIT_W:
                        inner += remainder_w * stride_remainder
                        tma_load(x, [n, i + pixel_h, remainder_h, j + pixel_w, inner], ready, x_ring.index(stage))
                    else:
                        tma_load(x, [n, i + pixel_h, j + pixel_w, inner], ready, x_ring.index(stage))
                    if W_ACROSS:
                        ws_load(
                            w, w_ring, stage * PANELS, ready, group * CHANNELS + c, place * COLS + col, PANELS, BLOCK_K
                        )
                    else:
                        ws_load(w, w_ring, stage, ready, group * COLS + col, place * CHANNELS + c, 1, BLOCK_K)
                    turn += 1


@gluon.jit
def conv_ws_consumer(
    WHICH: gl.constexpr, out_descs, out, operands, out_strides, x_ring, w_ring, out_ring, full, empty, order,
    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr,
    W_STEP_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_ACROSS: gl.constexpr, PINGPONG: gl.constexpr,
    SUBTILE: gl.constexpr, STORE: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    SHARE: gl.constexpr = 1 if PINGPONG else 2
    ROWS: gl.constexpr = TILE_N * TILE_H * TILE_W // SHARE
    FIRST: gl.constexpr = 0 if PINGPONG else WHICH * ROWS
    BITS: gl.constexpr = x_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // BITS]
    )
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    x_tiles = x_ring._reinterpret(x_ring.dtype, [STAGES * SHARE, ROWS, BLOCK_K], tile_layout)
    w_tiles = w_ring._reinterpret(
        w_ring.dtype, [STAGES, BLOCK_K, BLOCK_N] if W_ACROSS else [STAGES, BLOCK_N, BLOCK_K], tile_layout
    )
    items = conv_ws_items(N, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H * OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N)
    blocks = gl.cdiv(CHANNELS, BLOCK_K)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    turn = 0
    apart = stride
    if PINGPONG:
        first += WHICH * stride
        stride *= 2
        if WHICH == 1:
            # the other's first tile goes through the ring before
            turn = conv_ws_steps(
                gl.program_id(0), items, blocks, GRID_H, GRID_W, COLS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                TILE_N, TILE_H, TILE_W, BLOCK_N,
            )  # fmt: skip
    mine = 0
    for item in range(first, items, stride):
        col, group, first_h, first_w, n, i, j = conv_ws_place(
            item, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N
        )  # fmt: skip
        steps = conv_ws_steps(
            item, items, blocks, GRID_H, GRID_W, COLS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
            DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N,
        )  # fmt: skip
        acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_N), gl.float32, layout))
        if PINGPONG:
            # the other must have met all of its stages first: a barrier tells only odd phases from even ones
            mbarrier.wait(order.index(WHICH), mine ^ (1 - WHICH))
        acc = ws_multiply(x_tiles, w_tiles, FIRST // ROWS, SHARE, full, empty, turn, steps, acc, STAGES, True, W_ACROSS)
        if PINGPONG:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # a class of pixels that no tap meets has no steps, and holds no stage
        mbarrier.arrive(empty.index((turn + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        conv_ws_epilogue(
            acc, out_descs, out_ring, out, operands, out_strides, n, i, j, first_h, first_w, FIRST, col, group,
            N, OUT_H, OUT_W, COLS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W,
            SUBTILE, STORE, UNIT, STEPS,
        )  # fmt: skip
        turn += steps
        if PINGPONG:
            turn += conv_ws_steps(
                item + apart, items, blocks, GRID_H, GRID_W, COLS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                TILE_N, TILE_H, TILE_W, BLOCK_N,
            )  # fmt: skip
        mine ^= 1
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def conv_ws_consumer_0(
    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring, full, empty, order,
    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr,
    W_STEP_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_ACROSS: gl.constexpr, PINGPONG: gl.constexpr,
    SUBTILE: gl.constexpr, STORE: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    conv_ws_consumer(
        0, out_descs, out, operands, out_strides, x_ring, w_ring, out_ring, full, empty, order,
        N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
        DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W, TILE_N, TILE_H, TILE_W,
        BLOCK_N, BLOCK_K, STAGES, W_ACROSS, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
    )  # fmt: skip


@gluon.jit
def conv_ws_consumer_1(
    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring, full, empty, order,
    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, OUT_STEP_H: gl.constexpr, OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr,
    W_STEP_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_ACROSS: gl.constexpr, PINGPONG: gl.constexpr,
    SUBTILE: gl.constexpr, STORE: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    conv_ws_consumer(
        1, out_descs, out, operands, out_strides, x_ring, w_ring, out_ring, full, empty, order,
        N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
        DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W, TILE_N, TILE_H, TILE_W,
        BLOCK_N, BLOCK_K, STAGES, W_ACROSS, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
    )  # fmt: skip


@gluon.jit
def conv_implicit_gemm_warp_specialized(
    x, w, out_desc, out_desc_1, out_desc_2, out_desc_3, out, operands, out_strides, N, OUT_H, OUT_W, GRID_H, GRID_W,
    COLS, CHANNELS, stride_remainder,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr,
    TAP_STEP_W: gl.constexpr, ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, OUT_STEP_H: gl.constexpr,
    OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr, W_STEP_W: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    OUT_TILE_N: gl.constexpr, OUT_TILE_H: gl.constexpr, OUT_TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_ACROSS: gl.constexpr, PINGPONG: gl.constexpr,
    SUBTILE: gl.constexpr, STORE: gl.constexpr, UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """GRID_H x GRID_W pixels of each class and image; COLS and CHANNELS: channels of result and operand in a group.
    W_ACROSS: lines of the weight are of the result's channels. STORE: "tma" with a descriptor for each class, "pixels"
    in pieces of UNIT pixels, or "pointer"."""
    W_BOX: gl.constexpr = BLOCK_K if W_ACROSS else BLOCK_N
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES * BLOCK_N // W_BOX, W_BOX, BLOCK_K], w.layout)
    BITS: gl.constexpr = out.dtype.element_ty.primitive_bitwidth
    OUT_COLS: gl.constexpr = BLOCK_N // SUBTILE
    OUT_ROWS: gl.constexpr = OUT_TILE_N * OUT_TILE_H * OUT_TILE_W
    OUT_WIDTH: gl.constexpr = 1024 // BITS
    if STORE == "tma":
        OUT_SHAPE: gl.constexpr = [OUT_COLS // OUT_WIDTH, OUT_TILE_N, OUT_TILE_H, OUT_TILE_W, OUT_WIDTH]
        out_layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 4)
    elif STORE == "pixels":
        OUT_SHAPE: gl.constexpr = [OUT_ROWS, OUT_COLS]
        out_layout: gl.constexpr = gl.SwizzledSharedLayout(128 // BITS, 1, 8, order=[0, 1])
    else:
        OUT_SHAPE: gl.constexpr = [1, OUT_WIDTH]
        out_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    out_ring_0 = gl.allocate_shared_memory(out.dtype.element_ty, OUT_SHAPE, out_layout)
    out_ring_1 = gl.allocate_shared_memory(out.dtype.element_ty, OUT_SHAPE, out_layout)
    out_descs = (out_desc, out_desc_1, out_desc_2, out_desc_3)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if PINGPONG else 2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    gl.warp_specialize(
        [
            (
                conv_ws_consumer_0,
                (
                    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring_0, full, empty, order,
                    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                    PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                    TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES, W_ACROSS, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
                ),
            ),
            (
                conv_ws_consumer_1,
                (
                    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring_1, full, empty, order,
                    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, CHANNELS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                    PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                    TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES, W_ACROSS, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
                ),
            ),
            (
                conv_ws_producer,
                (
                    x, w, x_ring, w_ring, full, empty, N, GRID_H, GRID_W, COLS, CHANNELS, stride_remainder,
                    GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, SPLIT_H, SPLIT_W,
                    TAP_STEP_H, TAP_STEP_W, ORIGIN_H, ORIGIN_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                    TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES, W_ACROSS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the convolution to out [N, K, P, Q], or the gradient of the input to out [N, C, H, W].

    inputs: "x" (for a gradient "d_out"), "w" and what the epilogue reads. attributes: all of the workload's.
    """
    if out.numel() == 0:
        return []
    image, weight = inputs["d_out" if attributes["direction"] == "input_gradient" else "x"], inputs["w"]
    tile = (knobs["block_m"] // (knobs["tile_h"] * knobs["tile_w"]), knobs["tile_h"], knobs["tile_w"])
    pingpong, block_n, groups = knobs["mode"] == "pingpong", knobs["block_n"], attributes["groups"]
    block_k = 128 // image.element_size()
    geometry = conv_geometry(weight, attributes)
    image, image_launches = engine_image(image, geometry, knobs["repack"])
    lines, across, weight_launches = engine_weight(weight, groups, geometry["SCATTERS"], knobs["repack"])
    sizes, strides, viewed = image_view(image, geometry)
    box = [*tile, block_k] if len(sizes) == 4 else [tile[0], tile[1], 1, tile[2], block_k]
    steps = geometry["OUT_STEP_H"], geometry["OUT_STEP_W"]
    grid = [triton.cdiv(size, step) for size, step in zip(out.shape[2:], steps, strict=True)]
    cols = out.shape[1] // groups
    items = math.prod(triton.cdiv(a, b) for a, b in zip((out.shape[0], *grid), tile, strict=True))
    items *= groups * triton.cdiv(cols, block_n) * steps[0] * steps[1]
    out_tile = tile if pingpong else half_of(tile)
    target, tail = out, []
    if knobs["store"] == "copied":
        target = torch.empty_like(out, memory_format=torch.channels_last)
        tail = [conv_copy_launch(target, out)]
    store, out_descs, unit = result_stores(target, tile, out_tile, steps)
    chain, operands = conv_chain(inputs, epilogue)
    args = (
        swizzled(viewed, sizes, strides, box), panel_descriptor(lines, block_k if across else block_n),
        *(out_descs + [None] * 4)[:4], target, operands, target.stride(), target.shape[0], *target.shape[2:], *grid,
        cols, image.shape[1] // groups, image.stride(3), groups, *geometry.values(), *tile, *out_tile, block_n,
        block_k, knobs["num_stages"], across, pingpong, knobs["subtile"], store, unit, chain,
    )  # fmt: skip
    main = (conv_implicit_gemm_warp_specialized, (ws_programs(image, items),), args, {"num_warps": 4})
    return [*image_launches, *weight_launches, main, *tail]
