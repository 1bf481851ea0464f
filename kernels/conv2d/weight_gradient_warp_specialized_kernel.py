"""The weight's gradient by specialised warps (Hopper), NHWC: one warp loads boxes of pixels of both images by TMA into
a ring, two warpgroups multiply them, pixels being the dimension that is summed over.

A tile is BLOCK_M output channels by UNITS column blocks; a column block is BLOCK_N input channels of one tap, and
neighbouring blocks are neighbouring channels, then the next tap. A step of the sum is one box of pixels of d_out and,
for every column block, the box of x that its tap meets: moved by the tap, with zeros where there is no image. Boxes
behind the end of d_out are zero, so that any shape of box serves any image. Tiles of 64 output channels share out their
column blocks between the warpgroups, larger ones their output channels.

fp32 images come as PARTS bf16 images, one after the other, whose sum they are: a step multiplies several pairs of
parts. Tensor cores cut partial sums, so that after CHUNK steps these are added to sums in fp32.
"""

import torch
import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernelwright.kernels.conv2d.conv_reduce_kernel import part_strides
from kernelwright.kernels.conv2d.implicit_gemm_parts_kernel import parts_of
from kernelwright.kernels.conv2d.pixel_boxes_kernel import (
    box_descriptor,
    boxes_of,
    pixel_lines,
    stacked_parts,
    wgrad_boxes,
    wgrad_place,
    wgrad_tiles,
)
from kernelwright.kernels.conv2d.resident_arrange_kernel import packed_image
from kernelwright.kernels.conv2d.tma_view_kernel import conv_geometry, image_view, met_by
from kernelwright.kernels.conv2d.weight_parts_kernel import sum_weight_parts_launch

# triton 3.6 has the second name, 3.8 the first
wgrad_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def wgrad_producer(
    d, x, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K, stride_remainder, units,
    GROUPS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr, DILATION_W: gl.constexpr,
    SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr, TAP_STEP_W: gl.constexpr,
    ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    D_PANELS: gl.constexpr = BLOCK_M // 64
    X_PANELS: gl.constexpr = BLOCK_N // 64
    BYTES: gl.constexpr = TILE_N * TILE_H * TILE_W * (BLOCK_M + UNITS * BLOCK_N) * (2 * PARTS)
    tiles = wgrad_tiles(ROWS, CHANNELS, GROUPS, R * S, BLOCK_M, BLOCK_N, UNITS)
    tiles_h = gl.cdiv(OUT_H, TILE_H)
    tiles_w = gl.cdiv(OUT_W, TILE_W)
    turn = 0
    for item in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        part, group, row, first_unit = wgrad_place(item, tiles, ROWS, CHANNELS, R * S, BLOCK_M, BLOCK_N, UNITS)
        first, count = wgrad_boxes(part, N, OUT_H, OUT_W, SPLIT_K, TILE_N, TILE_H, TILE_W)
        blocks = gl.cdiv(CHANNELS, BLOCK_N)
        first_tap = first_unit // blocks
        first_c = first_unit % blocks * BLOCK_N
        for box in range(first, first + count):
            j = box % tiles_w * TILE_W
            i = box // tiles_w % tiles_h * TILE_H
            n = box // (tiles_w * tiles_h) * TILE_N
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            for piece in gl.static_range(PARTS * D_PANELS):
                k = group * ROWS + row + piece % D_PANELS * 64
                image = n + piece // D_PANELS * N
                wgrad_load(d, [image, i, j, k], ready, d_ring.index(stage * (PARTS * D_PANELS) + piece))
            tap = first_tap
            c = first_c
            # a number that the compiler does not know: unrolled, this loop would not fit the warp's few registers
            for unit in range(units):
                pixel_h, remainder_h = met_by(tap // S, SPLIT_H, STRIDE_H, PAD_H, DILATION_H, TAP_STEP_H, ORIGIN_H)
                pixel_w, remainder_w = met_by(tap % S, SPLIT_W, STRIDE_W, PAD_W, DILATION_W, TAP_STEP_W, ORIGIN_W)
                # behind the last tap there is no image, and zeros come
                image = n if tap < R * S else N * PARTS
                inner = group * CHANNELS + c
                for piece in gl.static_range(PARTS * X_PANELS):
                    at = inner + piece % X_PANELS * 64
                    place = (stage * PARTS + piece // X_PANELS) * UNITS + unit
                    slot = x_ring.index(place * X_PANELS + piece % X_PANELS)
                    from_n = image + piece // X_PANELS * N
                    if SPLIT_H or SPLIT_W:
                        at += remainder_w * stride_remainder
                        wgrad_load(x, [from_n, i + pixel_h, remainder_h, j + pixel_w, at], ready, slot)
                    else:
                        wgrad_load(x, [from_n, i + pixel_h, j + pixel_w, at], ready, slot)
                c += BLOCK_N
                if c >= CHANNELS:
                    c = 0
                    tap += 1
            turn += 1


@gluon.jit
def wgrad_accumulators(COUNT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """COUNT sums [ROWS, COLS], all zero."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (warpgroup_mma_init(gl.zeros((ROWS, COLS), gl.float32, layout)),)  # type: ignore[assignment]
    return sums


@gluon.jit
def wgrad_waited(sums, LEFT: gl.constexpr):
    """The sums as plain tensors, once all but the last LEFT products have ended."""
    COUNT: gl.constexpr = len(sums)
    if COUNT == 1:
        done = (warpgroup_mma_wait(LEFT, deps=sums),)
    else:
        done = warpgroup_mma_wait(LEFT, deps=sums)
    return done


@gluon.jit
def wgrad_multiply(
    d_tiles, x_tiles, d_slot, d_slots, first, full, empty, turn, steps, sums, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr,
):  # fmt: skip
    """Multiply the next `steps` stages of the ring, d_out's channels by the column blocks from `first` on; every stage
    but the last is handed back. The products of one step are in flight when this returns."""
    COUNT: gl.constexpr = len(sums)
    for step in range(steps):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        for pair in gl.static_range(PAIRS):
            d_part = stage * PARTS + ((D_PARTS >> (2 * pair)) & 3)
            x_part = stage * PARTS + ((X_PARTS >> (2 * pair)) & 3)
            left = d_tiles.index(d_part * d_slots + d_slot).permute((1, 0))
            started = ()
            for at in gl.static_range(COUNT):
                right = x_tiles.index(x_part * UNITS + first + at)
                more = True if pair > 0 else step > 0
                started = started + (warpgroup_mma(left, right, sums[at], use_acc=more, is_async=True),)  # type: ignore[assignment]
            sums = started
        waited = wgrad_waited(sums, COUNT * PAIRS)
        sums = ()
        for at in gl.static_range(COUNT):
            sums = sums + (warpgroup_mma_init(waited[at]),)
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    return sums


@gluon.jit
def wgrad_sums(
    d_tiles, x_tiles, d_slot, d_slots, first, full, empty, turn, steps, layout: gl.constexpr, COUNT: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """COUNT sums [ROWS, COLS] over the next `steps` stages of the ring, all of which are handed back."""
    if CHUNK == 0:
        sums = wgrad_multiply(
            d_tiles, x_tiles, d_slot, d_slots, first, full, empty, turn, steps,
            wgrad_accumulators(COUNT, ROWS, COLS, layout), UNITS, STAGES, PARTS, PAIRS, D_PARTS, X_PARTS,
        )  # fmt: skip
        totals = wgrad_waited(sums, 0)
        # a part without pixels has no steps, and holds no stage
        mbarrier.arrive(empty.index((turn + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    else:
        totals = ()
        for _ in gl.static_range(COUNT):
            totals = totals + (gl.zeros((ROWS, COLS), gl.float32, layout),)
        for begun in range(0, steps, CHUNK):
            share = gl.minimum(steps - begun, CHUNK)
            sums = wgrad_multiply(
                d_tiles, x_tiles, d_slot, d_slots, first, full, empty, turn + begun, share,
                wgrad_accumulators(COUNT, ROWS, COLS, layout), UNITS, STAGES, PARTS, PAIRS, D_PARTS, X_PARTS,
            )  # fmt: skip
            done = wgrad_waited(sums, 0)
            mbarrier.arrive(empty.index((turn + begun + share + STAGES - 1) % STAGES), count=1)
            more = ()
            for at in gl.static_range(COUNT):
                more = more + (totals[at] + done[at],)  # type: ignore[assignment]
            totals = more
    return totals


@gluon.jit
def wgrad_store(
    acc, out, out_strides, stride_part, part, group, row, tap, col, ROWS, CHANNELS, R: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Write sums [output channels from row on, input channels from col on] of a tap to their part of out."""
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    down = (group * ROWS + rows).to(gl.int64) * out_strides[0]
    across = cols.to(gl.int64) * out_strides[1]
    out += part.to(gl.int64) * stride_part
    out += (tap // S).to(gl.int64) * out_strides[2] + (tap % S).to(gl.int64) * out_strides[3]
    inside = (rows < ROWS)[:, None] & (cols < CHANNELS)[None, :] & (tap < R * S)
    gl.store(out + (down[:, None] + across[None, :]), acc.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def wgrad_consumer(
    WHICH: gl.constexpr, out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS,
    SPLIT_K, GROUPS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    SHARE: gl.constexpr = 1 if BLOCK_M == 64 else 2
    OWN_ROWS: gl.constexpr = BLOCK_M // SHARE
    OWN_UNITS: gl.constexpr = UNITS // 2 if SHARE == 1 else UNITS
    FIRST_ROW: gl.constexpr = 0 if SHARE == 1 else WHICH * OWN_ROWS
    FIRST_UNIT: gl.constexpr = WHICH * OWN_UNITS if SHARE == 1 else 0
    PIXELS: gl.constexpr = TILE_N * TILE_H * TILE_W
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    lines: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    d_tiles = d_ring._reinterpret(d_ring.dtype, [STAGES * PARTS * SHARE, PIXELS, OWN_ROWS], lines)
    x_tiles = x_ring._reinterpret(x_ring.dtype, [STAGES * PARTS * UNITS, PIXELS, BLOCK_N], lines)
    tiles = wgrad_tiles(ROWS, CHANNELS, GROUPS, R * S, BLOCK_M, BLOCK_N, UNITS)
    blocks = gl.cdiv(CHANNELS, BLOCK_N)
    turn = 0
    for item in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        part, group, row, first_unit = wgrad_place(item, tiles, ROWS, CHANNELS, R * S, BLOCK_M, BLOCK_N, UNITS)
        _, steps = wgrad_boxes(part, N, OUT_H, OUT_W, SPLIT_K, TILE_N, TILE_H, TILE_W)
        done = wgrad_sums(
            d_tiles, x_tiles, FIRST_ROW // OWN_ROWS, SHARE, FIRST_UNIT, full, empty, turn, steps, layout, OWN_UNITS,
            OWN_ROWS, BLOCK_N, UNITS, STAGES, PARTS, PAIRS, D_PARTS, X_PARTS, CHUNK,
        )  # fmt: skip
        for at in gl.static_range(OWN_UNITS):
            unit = first_unit + FIRST_UNIT + at
            wgrad_store(
                done[at], out, out_strides, stride_part, part, group, row + FIRST_ROW, unit // blocks,
                unit % blocks * BLOCK_N, ROWS, CHANNELS, R, S,
            )  # fmt: skip
        turn += steps


@gluon.jit
def wgrad_consumer_0(
    out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K,
    GROUPS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    wgrad_consumer(
        0, out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K,
        GROUPS, R, S, TILE_N, TILE_H, TILE_W, BLOCK_M, BLOCK_N, UNITS, STAGES, PARTS, PAIRS, D_PARTS, X_PARTS, CHUNK,
    )  # fmt: skip


@gluon.jit
def wgrad_consumer_1(
    out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K,
    GROUPS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    wgrad_consumer(
        1, out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K,
        GROUPS, R, S, TILE_N, TILE_H, TILE_W, BLOCK_M, BLOCK_N, UNITS, STAGES, PARTS, PAIRS, D_PARTS, X_PARTS, CHUNK,
    )  # fmt: skip


@gluon.jit
def conv_weight_gradient_warp_specialized(
    d, x, out, out_strides, stride_part, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K, stride_remainder, units,
    GROUPS: gl.constexpr, R: gl.constexpr, S: gl.constexpr, STRIDE_H: gl.constexpr, STRIDE_W: gl.constexpr,
    PAD_H: gl.constexpr, PAD_W: gl.constexpr, DILATION_H: gl.constexpr, DILATION_W: gl.constexpr,
    SPLIT_H: gl.constexpr, SPLIT_W: gl.constexpr, TAP_STEP_H: gl.constexpr, TAP_STEP_W: gl.constexpr,
    ORIGIN_H: gl.constexpr, ORIGIN_W: gl.constexpr, TILE_N: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, PAIRS: gl.constexpr, D_PARTS: gl.constexpr, X_PARTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """N x OUT_H x OUT_W pixels in SPLIT_K parts; ROWS and CHANNELS: output and input channels of a group."""
    d_ring = gl.allocate_shared_memory(d.dtype, [STAGES * PARTS * BLOCK_M // 64] + d.block_type.shape, d.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS * UNITS * BLOCK_N // 64] + x.block_type.shape, x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                wgrad_consumer_0,
                (
                    out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS,
                    SPLIT_K, GROUPS, R, S, TILE_N, TILE_H, TILE_W, BLOCK_M, BLOCK_N, UNITS, STAGES,
                    PARTS, PAIRS, D_PARTS, X_PARTS, CHUNK,
                ),
            ),
            (
                wgrad_consumer_1,
                (
                    out, out_strides, stride_part, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS,
                    SPLIT_K, GROUPS, R, S, TILE_N, TILE_H, TILE_W, BLOCK_M, BLOCK_N, UNITS, STAGES,
                    PARTS, PAIRS, D_PARTS, X_PARTS, CHUNK,
                ),
            ),
            (
                wgrad_producer,
                (
                    d, x, d_ring, x_ring, full, empty, N, OUT_H, OUT_W, ROWS, CHANNELS, SPLIT_K, stride_remainder,
                    units, GROUPS, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, SPLIT_H, SPLIT_W,
                    TAP_STEP_H, TAP_STEP_W, ORIGIN_H, ORIGIN_W, TILE_N, TILE_H, TILE_W, BLOCK_M, BLOCK_N, UNITS, STAGES,
                    PARTS,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


KNOWN = ("R", "S", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W", "DILATION_H", "DILATION_W", "SPLIT_H", "SPLIT_W",
         "TAP_STEP_H", "TAP_STEP_W", "ORIGIN_H", "ORIGIN_W")  # fmt: skip
"""What the kernel takes of a convolution's geometry."""

PARTS_PRECISIONS = ("bf16x3", "bf16x6")

MOST_CUT = 1024
"""Products of fp32 numbers' parts that tensor cores add up one by one: each step cuts about 4e-8 of the sum."""


def product_launch(x, d_out, weight, geometry, groups, knobs, target, parts=1, pairs=(1, 0, 0)):
    """The launch that writes the gradient of a weight with the sizes of `weight`, [K, C/groups, R, S], to target: (a
    tensor, the strides of the gradient in it, the stride of its parts). parts, pairs: see `parts_of`."""
    if parts == 1:
        x, d_out = pixel_lines(x, d_out, geometry)
    tile = (knobs["block_k"] // (knobs["tile_h"] * knobs["tile_w"]), knobs["tile_h"], knobs["tile_w"])
    sizes, strides, viewed = image_view(x, geometry)
    box = [*tile, 64] if len(sizes) == 4 else [tile[0], tile[1], 1, tile[2], 64]
    block_m, block_n, units = (knobs[name] for name in ("block_m", "block_n", "column_blocks"))
    rows, (channels, r, s) = weight.shape[0] // groups, weight.shape[1:]
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(r * s * triton.cdiv(channels, block_n), units) * groups
    programs = tiles * knobs["split_k"]
    if x.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(x.device).multi_processor_count)
    d_view = d_out.permute(0, 2, 3, 1)
    args = (
        box_descriptor(d_out, list(d_view.shape), list(d_view.stride()), [*tile, 64]),
        box_descriptor(viewed, sizes, strides, box),
        *target, d_view.shape[0] // parts, *d_view.shape[1:3], rows, channels, knobs["split_k"], x.stride(3), units,
        groups, *(geometry[name] for name in KNOWN), *tile, block_m, block_n, units, knobs["num_stages"],
        parts, *pairs, 0 if parts == 1 else max(1, MOST_CUT // (pairs[0] * knobs["block_k"])),
    )  # fmt: skip
    return conv_weight_gradient_warp_specialized, (programs,), args, {"num_warps": 4}


def plan_packed(x, d_out, out, knobs, attributes):
    """`plan` where x has few channels: rows lie beside each other, the taps of a row are channels of one tap."""
    (k, _, r, s), step = out.shape, attributes["stride_h"]
    packed, sizes, strides, depth, launch = packed_image(x, (r, s), d_out.shape[2:], attributes)
    n, lines, columns, line = sizes
    view = packed.as_strided((n, line, lines, columns), (strides[0], 1, *strides[1:3]))
    d_out, copies = boxes_of(d_out, (1, 1), knobs["repack"])
    # only its sizes are looked at
    wide = torch.empty((k, line, triton.cdiv(r, step), 1), device="meta")
    plain = {**attributes, "stride_h": 1, "stride_w": 1, "pad_h": 0, "pad_w": 0}
    parts = torch.empty((knobs["split_k"], k * wide.shape[2], line), dtype=torch.float32, device=out.device)
    target = parts, part_strides(wide), parts.stride(0)
    main = product_launch(view, d_out, wide, conv_geometry(wide, plain), 1, knobs, target)
    return [launch, *copies, main, sum_weight_parts_launch(parts, out, step, depth)]


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the gradient of the weight to out [K, C/groups, R, S], from inputs x [N, C, H, W] and d_out
    [N, K, P, Q]."""
    if not knobs["span"]:
        return plan_packed(inputs["x"], inputs["d_out"], out, knobs, attributes)
    span, split_k = knobs["span"], knobs["split_k"]
    (rows, channels, r, s), each = out.shape, out.shape[0] // attributes["groups"]
    geometry = conv_geometry(out, attributes)
    steps = [geometry[f"STRIDE_{axis}"] if geometry[f"SPLIT_{axis}"] else 1 for axis in "HW"]
    divided = (1, (1, 0, 0))
    if knobs["precision"] in PARTS_PRECISIONS:
        _, *divided = parts_of(knobs["precision"])
        x, *copies = stacked_parts(inputs["x"], divided[0], steps)
        d_out, *d_copies = stacked_parts(inputs["d_out"], divided[0], (1, 1))
    else:
        x, copies = boxes_of(inputs["x"], steps, knobs["repack"])
        d_out, d_copies = boxes_of(inputs["d_out"], (1, 1), knobs["repack"])
    target, tail = (out, out.stride(), 0), []
    # only its sizes are looked at: merged groups have each other's channels, too
    wide = torch.empty((rows, span * channels, r, s), device="meta")
    if split_k > 1 or span > 1:
        parts = torch.empty((split_k, rows * r * s, span * channels), dtype=torch.float32, device=out.device)
        target = parts, part_strides(wide), parts.stride(0)
        tail = [sum_weight_parts_launch(parts, out, span=span, each=each)]
    main = product_launch(x, d_out, wide, geometry, attributes["groups"] // span, knobs, target, *divided)
    return [*copies, *d_copies, main, *tail]
