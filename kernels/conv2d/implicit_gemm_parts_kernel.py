"""Convolution of fp32 tensors as several products of narrower parts, by specialised warps (Hopper).

Image and weight are copied, each number as a sum of two or three parts (bf16 or tf32), to NHWC and KRSC. The sum of a
tile then runs over pairs of parts, the smallest products first, so that the tensor cores, which cut partial sums, lose
nothing of the small ones to the large. Everything else is `implicit_gemm_warp_specialized_kernel`.
"""

import math

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain
from kernelwright.kernels.conv2d.implicit_gemm_kernel import class_of_axis
from kernelwright.kernels.conv2d.implicit_gemm_warp_specialized_kernel import (
    conv_ws_consumer_0,
    conv_ws_consumer_1,
    conv_ws_items,
    conv_ws_place,
)
from kernelwright.kernels.conv2d.layout_copy_kernel import conv_copy_launch
from kernelwright.kernels.conv2d.parts_copy_kernel import image_parts, padded_channels, weight_parts
from kernelwright.kernels.conv2d.tma_view_kernel import conv_geometry, image_view, met_by
from kernelwright.kernels.conv2d.warp_specialized_store_kernel import half_of, result_stores, swizzled
from kernelwright.kernels.matmul.warp_specialized_kernel import panel_descriptor, tma_load, ws_programs

PAIRS_OF_TWO = ((0, 1), (1, 0), (0, 0))
PAIRS_OF_THREE = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))


def parts_of(precision):
    """(type of a part, how many there are, the pairs of parts of image and weight that are multiplied in their order).

    The pairs are packed in two numbers, two bits each, which the kernel can read at any place.
    """
    pairs = PAIRS_OF_THREE if precision == "bf16x6" else PAIRS_OF_TWO
    packed = [sum(pair[side] << 2 * place for place, pair in enumerate(pairs)) for side in (0, 1)]
    dtype = torch.float32 if precision == "tf32x3" else torch.bfloat16
    return dtype, 3 if precision == "bf16x6" else 2, (len(pairs), *packed)


@gluon.jit
def conv_parts_producer(
    x, w, x_ring, w_ring, full, empty, N, GRID_H, GRID_W, COLS, CHANNELS, x_part, w_part, stride_remainder,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr,
    TAP_STEP_W: gl.constexpr, ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, OUT_STEP_H: gl.constexpr,
    OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr, W_STEP_W: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (TILE_N * TILE_H * TILE_W + BLOCK_N) * 128
    items = conv_ws_items(N, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H * OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N)
    blocks = gl.cdiv(CHANNELS, BLOCK_K)
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        col, group, first_h, first_w, n, i, j = conv_ws_place(
            item, GRID_H, GRID_W, COLS, GROUPS, OUT_STEP_H, OUT_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N
        )  # fmt: skip
        tap0_h, taps_h, origin_h = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
        tap0_w, taps_w, origin_w = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)
        for pair in range(PAIRS):
            x_first = ((X_PARTS >> (2 * pair)) & 3) * x_part + group * CHANNELS
            w_first = ((W_PARTS >> (2 * pair)) & 3) * w_part
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
                    for block in range(blocks):
                        stage = turn % STAGES
                        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                        ready = full.index(stage)
                        mbarrier.expect(ready, BYTES)
                        inner = x_first + block * BLOCK_K
                        if SPLIT_H or SPLIT_W:
                            inner += remainder_w * stride_remainder
                            tma_load(x, [n, i + pixel_h, remainder_h, j + pixel_w, inner], ready, x_ring.index(stage))
                        else:
                            tma_load(x, [n, i + pixel_h, j + pixel_w, inner], ready, x_ring.index(stage))
                        w_inner = place * (PARTS * w_part) + w_first + block * BLOCK_K
                        tma_load(w, [group * COLS + col, w_inner], ready, w_ring.index(stage))
                        turn += 1


@gluon.jit
def conv_implicit_gemm_parts(
    x, w, out_desc, out_desc_1, out_desc_2, out_desc_3, out, operands, out_strides, N, OUT_H, OUT_W, GRID_H, GRID_W,
    COLS, CHANNELS, x_part, w_part, stride_remainder,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, X_PARTS: gl.constexpr, W_PARTS: gl.constexpr,
    GROUPS: gl.constexpr, SCATTERS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr,
    STRIDE_W: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr,
    DILATION_W: gl.constexpr, SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr,
    TAP_STEP_W: gl.constexpr, ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, OUT_STEP_H: gl.constexpr,
    OUT_STEP_W: gl.constexpr, W_STEP_H: gl.constexpr, W_STEP_W: gl.constexpr,
    TILE_N: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    OUT_TILE_N: gl.constexpr, OUT_TILE_H: gl.constexpr, OUT_TILE_W: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, STORE: gl.constexpr,
    UNIT: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """As `conv_implicit_gemm_warp_specialized`, with PAIRS of the PARTS of image and weight for each tap; x_part and
    w_part: elements from one part of a pixel, or of a tap, to the next."""
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
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
    # the consumers only count blocks of channels
    multiplied = gl.cdiv(CHANNELS, BLOCK_K) * (BLOCK_K * PAIRS)
    gl.warp_specialize(
        [
            (
                conv_ws_consumer_0,
                (
                    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring_0, full, empty, order,
                    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, multiplied, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                    PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                    TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES, False, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
                ),
            ),
            (
                conv_ws_consumer_1,
                (
                    out_descs, out, operands, out_strides, x_ring, w_ring, out_ring_1, full, empty, order,
                    N, OUT_H, OUT_W, GRID_H, GRID_W, COLS, multiplied, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                    PAD_H, PAD_W, DILATION_H, DILATION_W, OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W,
                    TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES, False, PINGPONG, SUBTILE, STORE, UNIT, STEPS,
                ),
            ),
            (
                conv_parts_producer,
                (
                    x, w, x_ring, w_ring, full, empty, N, GRID_H, GRID_W, COLS, CHANNELS, x_part, w_part,
                    stride_remainder, PARTS, PAIRS, X_PARTS, W_PARTS, GROUPS, SCATTERS, R, S, STRIDE_H, STRIDE_W,
                    PAD_H, PAD_W, DILATION_H, DILATION_W, SPLIT_H, SPLIT_W, TAP_STEP_H, TAP_STEP_W, ORIGIN_H, ORIGIN_W,
                    OUT_STEP_H, OUT_STEP_W, W_STEP_H, W_STEP_W, TILE_N, TILE_H, TILE_W, BLOCK_N, BLOCK_K, STAGES,
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
    pingpong, block_n, block_k, groups = (
        knobs["mode"] == "pingpong",
        knobs["block_n"],
        knobs["block_k"],
        attributes["groups"],
    )
    dtype, parts, pairs = parts_of(knobs["precision"])
    geometry = conv_geometry(weight, attributes)
    channels, x_part = image.shape[1] // groups, padded_channels(image.shape[1], block_k)
    splits = [geometry[f"STRIDE_{axis}"] if geometry[f"SPLIT_{axis}"] else 1 for axis in "HW"]
    image, image_launch = image_parts(image, dtype, parts, block_k, splits)
    lines, weight_launch = weight_parts(weight, groups, geometry["SCATTERS"], dtype, parts, block_k)
    sizes, strides, viewed = image_view(image, geometry)
    box = [*tile, block_k] if len(sizes) == 4 else [tile[0], tile[1], 1, tile[2], block_k]
    steps = geometry["OUT_STEP_H"], geometry["OUT_STEP_W"]
    grid = [triton.cdiv(size, step) for size, step in zip(out.shape[2:], steps, strict=True)]
    cols = out.shape[1] // groups
    items = math.prod(triton.cdiv(a, b) for a, b in zip((out.shape[0], *grid), tile, strict=True))
    items *= groups * triton.cdiv(cols, block_n) * steps[0] * steps[1]
    target, tail = out, []
    if knobs["store"] == "copied":
        target = torch.empty_like(out, memory_format=torch.channels_last)
        tail = [conv_copy_launch(target, out)]
    out_tile = tile if pingpong else half_of(tile)
    store, out_descs, unit = result_stores(target, tile, out_tile, steps)
    chain, operands = conv_chain(inputs, epilogue)
    args = (
        swizzled(viewed, sizes, strides, box), panel_descriptor(lines, block_n), *(out_descs + [None] * 4)[:4],
        target, operands, target.stride(), target.shape[0], *target.shape[2:], *grid, cols, channels, x_part,
        padded_channels(channels, block_k), image.stride(3), parts, *pairs, groups, *geometry.values(), *tile,
        *out_tile, block_n, block_k, knobs["num_stages"], pingpong, knobs["subtile"], store, unit, chain,
    )  # fmt: skip
    main = (conv_implicit_gemm_parts, (ws_programs(image, items),), args, {"num_warps": 4})
    return [image_launch, weight_launch, main, *tail]
