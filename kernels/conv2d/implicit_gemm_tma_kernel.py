"""Convolution as a matrix product by the bulk tensor copy engine (TMA), NHWC; serves forward, transposed and the
gradient of the input. One program a multiprocessor walks over the tiles of the result. Where sums are split or classes
of pixels alternate each unit has a program of its own: loops in loops let the next unit's loads overtake what is still
read of the last one (3 of about 800 schedules were wrong on a GPU with triton 3.6, all of this kind).

A tile is TILE_N images x TILE_H x TILE_W pixels by BLOCK_N channels. What a tap needs of the operand image is a box of
the same shape, moved by the tap: boxes may begin before the image and end behind it, and the engine fills what is not
there with zeros, so that padding costs nothing. A stride splits the image's axis in two, pixel and remainder: the box
lies among the pixels of the remainder that the tap meets. Scattering results (gradient of the input, transposed) are
computed in classes, as `implicit_gemm_kernel` explains.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places
from kernelwright.kernels.conv2d.conv_reduce_kernel import conv_parts, conv_reduce_launch
from kernelwright.kernels.conv2d.implicit_gemm_kernel import class_of_axis
from kernelwright.kernels.conv2d.tma_operand_kernel import engine_image, engine_weight, stored_by_tma
from kernelwright.kernels.conv2d.tma_view_kernel import (
    box_view,
    class_of_unit,
    conv_geometry,
    met_by,
    result_view,
    safe_strides,
)
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def conv_implicit_gemm_tma(
    x_desc, w_desc, out_desc, out_ptr, operands, out_strides, stride_part, N, OUT_H, OUT_W, GRID_H, GRID_W, COLS,
    CHANNELS, stride_remainder,
    GROUPS: tl.constexpr, SCATTERS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr, SPLIT_H: tl.constexpr, SPLIT_W: tl.constexpr, TAP_STEP_H: tl.constexpr,
    TAP_STEP_W: tl.constexpr, ORIGIN_H: tl.constexpr, ORIGIN_W: tl.constexpr, OUT_STEP_H: tl.constexpr,
    OUT_STEP_W: tl.constexpr, W_STEP_H: tl.constexpr, W_STEP_W: tl.constexpr,
    TILE_N: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, W_ACROSS: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """GRID_H x GRID_W pixels of each class and image; COLS and CHANNELS: channels of result and operand in a group.
    W_ACROSS: lines of the weight are of the result's channels."""
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    CLASSES: tl.constexpr = OUT_STEP_H * OUT_STEP_W
    tiles_h = tl.cdiv(GRID_H, TILE_H)
    tiles_w = tl.cdiv(GRID_W, TILE_W)
    tiles_k = tl.cdiv(COLS, BLOCK_N)
    blocks = tl.cdiv(CHANNELS, BLOCK_K)
    items = tl.cdiv(N, TILE_N) * tiles_h * tiles_w * GROUPS * tiles_k * (CLASSES * SPLIT_K)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=CLASSES * SPLIT_K == 1):
        split = item % SPLIT_K
        tile = item // SPLIT_K
        col = tile % tiles_k * BLOCK_N
        group = tile // tiles_k % GROUPS
        tile = tile // (tiles_k * GROUPS)
        which = class_of_unit(tile, SPLIT_K * tiles_k * GROUPS, tl.num_programs(0), CLASSES)
        first_h = which // OUT_STEP_W
        first_w = which % OUT_STEP_W
        tile = tile // CLASSES
        j = tile % tiles_w * TILE_W
        i = tile // tiles_w % tiles_h * TILE_H
        n = tile // (tiles_w * tiles_h) * TILE_N
        tap0_h, taps_h, origin_h = class_of_axis(first_h, SCATTERS, R, STRIDE_H, PAD_H, DILATION_H, W_STEP_H)
        tap0_w, taps_w, origin_w = class_of_axis(first_w, SCATTERS, S, STRIDE_W, PAD_W, DILATION_W, W_STEP_W)
        if not SCATTERS:
            origin_h, origin_w = ORIGIN_H, ORIGIN_W
            taps_h, taps_w = R, S
        steps = taps_h * taps_w * blocks
        first_step = 0
        if SPLIT_K > 1:
            per_split = tl.cdiv(steps, SPLIT_K)
            first_step = split * per_split
            steps = tl.minimum(first_step + per_split, steps)
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        for step in range(first_step, steps):
            tap = step // blocks
            c = step % blocks * BLOCK_K
            u = tap // taps_w
            v = tap % taps_w
            if SPLIT_H or SPLIT_W:
                pixel_h, remainder_h = met_by(u, SPLIT_H, STRIDE_H, PAD_H, DILATION_H, TAP_STEP_H, ORIGIN_H)
                pixel_w, remainder_w = met_by(v, SPLIT_W, STRIDE_W, PAD_W, DILATION_W, TAP_STEP_W, ORIGIN_W)
                inner = remainder_w * stride_remainder + group * CHANNELS + c
                x = x_desc.load([n, i + pixel_h, remainder_h, j + pixel_w, inner]).reshape(BLOCK_M, BLOCK_K)
            else:
                y = i + origin_h + u * TAP_STEP_H
                x = x_desc.load([n, y, j + origin_w + v * TAP_STEP_W, group * CHANNELS + c]).reshape(BLOCK_M, BLOCK_K)
            place = (tap0_h + u * W_STEP_H) * S + tap0_w + v * W_STEP_W
            if W_ACROSS:
                w = w_desc.load([group * CHANNELS + c, place * COLS + col])
            else:
                w = w_desc.load([group * COLS + col, place * CHANNELS + c]).T
            acc = product(x, w, acc, PRECISION)
        rows = tl.arange(0, BLOCK_M)
        batch = n + rows // (TILE_H * TILE_W)
        grid_h = i + rows // TILE_W % TILE_H
        grid_w = j + rows % TILE_W
        p = first_h + grid_h * OUT_STEP_H
        q = first_w + grid_w * OUT_STEP_W
        row_inside = (batch < N) & (p < OUT_H) & (q < OUT_W)
        cols = col + tl.arange(0, BLOCK_N)
        k = group * COLS + cols
        if STEPS != "":
            acc = finish_conv(acc.to(tl.float32), operands, batch, p, q, k, row_inside, cols < COLS, STEPS)
        if STORE == "tma":
            done = acc.to(out_desc.dtype).reshape(TILE_N, TILE_H, TILE_W, BLOCK_N)
            out_desc.store([n, i, j, group * COLS + col], done)
        else:
            places = out_ptr + split.to(tl.int64) * stride_part + image_places(batch, p, q, k, out_strides)
            inside = row_inside[:, None] & (cols < COLS)[None, :]
            tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=inside)


def multiprocessors_of(tensor):
    """How many programs fill the GPU that holds the tensor; 1 where there is none."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the convolution to out [N, K, P, Q], or the gradient of the input to out [N, C, H, W].

    inputs: "x" (for a gradient "d_out"), "w" and what the epilogue reads. attributes: all of the workload's.
    """
    if out.numel() == 0:
        return []
    image, weight = inputs["d_out" if attributes["direction"] == "input_gradient" else "x"], inputs["w"]
    tile = (knobs["block_m"] // (knobs["tile_h"] * knobs["tile_w"]), knobs["tile_h"], knobs["tile_w"])
    block_n, block_k, split_k, groups = (*(knobs[x] for x in ("block_n", "block_k", "split_k")), attributes["groups"])
    geometry = conv_geometry(weight, attributes)
    image, image_launches = engine_image(image, geometry, knobs["repack"])
    lines, across, weight_launches = engine_weight(weight, groups, geometry["SCATTERS"], knobs["repack"])
    x_desc = box_view(image, tile, block_k, geometry)
    w_block = [block_k, block_n] if across else [block_n, block_k]
    cols, channels = out.shape[1] // groups, image.shape[1] // groups
    steps = geometry["OUT_STEP_H"], geometry["OUT_STEP_W"]
    grid_h, grid_w = (triton.cdiv(size, step) for size, step in zip(out.shape[2:], steps, strict=True))
    items = math.prod(triton.cdiv(a, b) for a, b in zip((out.shape[0], grid_h, grid_w), tile, strict=True))
    items *= groups * triton.cdiv(cols, block_n) * steps[0] * steps[1] * split_k
    whole = image.dtype == torch.int8
    target, strides, stride_part, store = out, out.stride(), 0, "pointer"
    out_desc = None
    if split_k > 1:
        target = conv_parts(out, split_k, torch.int32 if whole else torch.float32)
        k, p, q = out.shape[1:]
        strides, stride_part = (p * q * k, 1, q * k, k), target.stride(0)
    elif steps == (1, 1) and stored_by_tma(out):
        store = "tma"
        sizes, out_strides = result_view(out)
        out_strides = safe_strides(sizes, out_strides, out.element_size())
        out_desc = TensorDescriptor(out, sizes, out_strides, [*tile, block_n])
    chain, operands = conv_chain(inputs, epilogue) if split_k == 1 else ("", ())
    args = (
        x_desc, TensorDescriptor(lines, list(lines.shape), [lines.stride(0), 1], w_block), out_desc, target, operands,
        strides, stride_part, out.shape[0], *out.shape[2:], grid_h, grid_w, cols, channels, image.stride(3),
        groups, *geometry.values(), *tile, block_n, block_k, split_k, across, store,
        dot_precision(knobs["precision"], image), tl.int32 if whole else tl.float32, chain,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    alone = split_k > 1 or steps != (1, 1)
    programs = items if alone else min(items, multiprocessors_of(image) * knobs["blocks_per_sm"])
    main = (conv_implicit_gemm_tma, (programs,), args, options)
    tail = [conv_reduce_launch(target, out, inputs, epilogue)] if split_k > 1 else []
    return [*image_launches, *weight_launches, main, *tail]
