"""Convolution with stride 1 whose weights stay in shared memory, NHWC, by specialised warps (Hopper, Gluon): for layers
that read more pixels than weights. Grouped convolutions, first layers and gradients of the input are brought into this
form by `resident_arrange_kernel`.

Each of two warpgroups has a loading warp and a ring of its own. A box of pixels is TILE_H + TAIL lines of TILE_W pixels
of 128 bytes: all R taps of a column find their pixels in it, moved by whole lines, so that it is loaded once for them.
A set is a group's BLOCK_N result channels: its weights are loaded when a program begins with it.
"""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places
from kernelwright.kernels.conv2d.resident_arrange_kernel import arranged
from kernelwright.kernels.conv2d.tma_operand_kernel import stored_by_tma
from kernelwright.kernels.conv2d.tma_view_kernel import result_view, safe_strides
from kernelwright.kernels.matmul.warp_specialized_kernel import (
    gluon_barrier,
    tma_load,
    tma_store,
    ws_halves,
    ws_programs,
)


@gluon.jit
def resident_share(N, OUT_H, OUT_W, COLS, GROUPS, TILE_H: gl.constexpr, TILE_W: gl.constexpr, BLOCK_N: gl.constexpr):
    """(tiles of a set, this program's first tile, the one after its last); tiles of a set are neighbours."""
    tiles = N * gl.cdiv(OUT_H, TILE_H) * gl.cdiv(OUT_W, TILE_W)
    items = tiles * gl.cdiv(COLS, BLOCK_N) * GROUPS
    # programs have equal shares, but for the rest of the division
    share = items // gl.num_programs(0)
    rest = items % gl.num_programs(0)
    first = gl.program_id(0) * share + min(gl.program_id(0), rest)
    return tiles, first, first + share + (gl.program_id(0) < rest).to(gl.int32)


@gluon.jit
def resident_place(tile, OUT_H, OUT_W, TILE_H: gl.constexpr, TILE_W: gl.constexpr):
    """(image, first row, first column) of a tile."""
    tiles_h = gl.cdiv(OUT_H, TILE_H)
    tiles_w = gl.cdiv(OUT_W, TILE_W)
    return tile // (tiles_w * tiles_h), tile // tiles_w % tiles_h * TILE_H, tile % tiles_w * TILE_W


@gluon.jit
def resident_producer(
    WHICH: gl.constexpr, x, x_tail, w, x_ring, w_lines, full, empty, w_full, w_empty,
    N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS, R: gl.constexpr, S: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr,
    TILE_H: gl.constexpr, TILE_W: gl.constexpr, TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load the boxes of every second tile of this program; the first of two loads the weights, too."""
    LINES: gl.constexpr = (TILE_H + TAIL) * TILE_W
    tiles, first, last = resident_share(N, OUT_H, OUT_W, COLS, GROUPS, TILE_H, TILE_W, BLOCK_N)
    turn = 0
    for part in range(first // tiles, gl.cdiv(last, tiles)):
        group = part // gl.cdiv(COLS, BLOCK_N)
        if WHICH == 0:
            row = group * COLS + part % gl.cdiv(COLS, BLOCK_N) * BLOCK_N
            mbarrier.wait(w_empty, ((part - first // tiles) & 1) ^ 1)
            mbarrier.expect(w_full, R * S * BLOCKS * BLOCK_N * 128)
            for place in range(R * S * BLOCKS):
                panel = w_lines.index(place * (BLOCK_N // 8))._reinterpret(w.dtype, w.block_type.shape, w.layout)
                tma_load(w, [row, place // BLOCKS, place % BLOCKS * 64], w_full, panel)
        for tile in range(max(first - part * tiles, 0) + WHICH, min(last - part * tiles, tiles), 2):
            n, i, j = resident_place(tile, OUT_H, OUT_W, TILE_H, TILE_W)
            for s in range(S):
                for block in range(BLOCKS):
                    stage = turn % STAGES
                    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                    ready = full.index(stage)
                    mbarrier.expect(ready, LINES * 128)
                    c = group * CHANNELS + block * 64
                    box = x_ring.index(stage * (LINES // 8))._reinterpret(x.dtype, x.block_type.shape, x.layout)
                    tma_load(x, [n, i - PAD_H, j + s - PAD_W, c], ready, box)
                    if TAIL > 0:
                        after = x_ring.index(stage * (LINES // 8) + TILE_H * TILE_W // 8)
                        after = after._reinterpret(x.dtype, x_tail.block_type.shape, x_tail.layout)
                        tma_load(x_tail, [n, i + TILE_H - PAD_H, j + s - PAD_W, c], ready, after)
                    turn += 1


@gluon.jit
def resident_multiply(
    x_ring, w_lines, full, empty, turn, acc, R: gl.constexpr, S: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply the boxes of a tile; every stage but the last is handed back."""
    LINES: gl.constexpr = (TILE_H + TAIL) * TILE_W
    BITS: gl.constexpr = x_ring.dtype.primitive_bitwidth
    lines: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    for step in range(S * BLOCKS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        for r in gl.static_range(R):
            x = x_ring.index(stage * (LINES // 8) + r * TILE_W // 8)
            x = x._reinterpret(x_ring.dtype, [TILE_H * TILE_W, 64], lines)
            place = r * S * BLOCKS + step
            w = w_lines.index(place * (BLOCK_N // 8))._reinterpret(x_ring.dtype, [BLOCK_N, 64], lines)
            acc = warpgroup_mma(x, w.permute((1, 0)), acc, use_acc=True if r > 0 else step > 0, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(R, deps=(acc,)))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    return acc


@gluon.jit
def resident_finish(
    acc, out_desc, out_ring, out, operands, out_strides, n, i, j, k, OUT_H, OUT_W, LAST,
    TILE_H: gl.constexpr, TILE_W: gl.constexpr, SUBTILE: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a tile whose first element is (n, i, j) of channel k, in SUBTILE parts. LAST: the channel
    after the group's last."""
    if SUBTILE > 1:
        left, right = ws_halves(acc)
        resident_finish(
            left, out_desc, out_ring, out, operands, out_strides, n, i, j, k, OUT_H, OUT_W, LAST, TILE_H, TILE_W,
            SUBTILE // 2, STORE, STEPS,
        )  # fmt: skip
        resident_finish(
            right, out_desc, out_ring, out, operands, out_strides, n, i, j, k + left.shape[1], OUT_H, OUT_W, LAST,
            TILE_H, TILE_W, SUBTILE // 2, STORE, STEPS,
        )  # fmt: skip
    else:
        rows = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        ks = k + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        p = i + rows // TILE_W
        q = j + rows % TILE_W
        row_inside = (p < OUT_H) & (q < OUT_W)
        done = finish_conv(acc, operands, n + rows * 0, p, q, ks, row_inside, ks < LAST, STEPS)
        if STORE == "tma":
            WIDTH: gl.constexpr = out_ring.shape[4]
            layout: gl.constexpr = gl.NVMMASharedLayout(128, out_ring.dtype.primitive_bitwidth, 2)
            # only the thread that started the copies waits for them
            tma.store_wait(0)
            gluon_barrier()
            buffer = out_ring._reinterpret(out_ring.dtype, [acc.shape[0], acc.shape[1]], layout)
            buffer.store(done.to(out_ring.dtype))
            fence_async_shared()
            gluon_barrier()
            for panel in gl.static_range(acc.shape[1] // WIDTH):
                tma_store(out_desc, [n, i, j, k + panel * WIDTH], out_ring.index(panel))
        else:
            places = out + image_places(n + rows * 0, p, q, ks, out_strides)
            gl.store(places, done.to(out.dtype.element_ty), mask=row_inside[:, None] & (ks < LAST)[None, :])


@gluon.jit
def resident_consumer(
    WHICH: gl.constexpr, out_desc, out, operands, out_strides, x_ring, w_lines, out_ring, full, empty, w_full, w_empty,
    N, OUT_H, OUT_W, COLS, GROUPS, R: gl.constexpr, S: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SUBTILE: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    BITS: gl.constexpr = x_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // BITS]
    )
    tiles, first, last = resident_share(N, OUT_H, OUT_W, COLS, GROUPS, TILE_H, TILE_W, BLOCK_N)
    turn = 0
    for part in range(first // tiles, gl.cdiv(last, tiles)):
        group = part // gl.cdiv(COLS, BLOCK_N)
        k = group * COLS + part % gl.cdiv(COLS, BLOCK_N) * BLOCK_N
        mbarrier.wait(w_full, (part - first // tiles) & 1)
        for tile in range(max(first - part * tiles, 0) + WHICH, min(last - part * tiles, tiles), 2):
            n, i, j = resident_place(tile, OUT_H, OUT_W, TILE_H, TILE_W)
            acc = warpgroup_mma_init(gl.zeros((TILE_H * TILE_W, BLOCK_N), gl.float32, layout))
            acc = resident_multiply(
                x_ring, w_lines, full, empty, turn, acc, R, S, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES
            )
            turn += S * BLOCKS
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
            resident_finish(
                acc, out_desc, out_ring, out, operands, out_strides, n, i, j, k, OUT_H, OUT_W, group * COLS + COLS,
                TILE_H, TILE_W, SUBTILE, STORE, STEPS,
            )  # fmt: skip
        mbarrier.arrive(w_empty, count=1)
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def conv_resident_weights(
    x, x_tail, w, out_desc, out, operands, out_strides, N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS,
    R: gl.constexpr, S: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    SUBTILE: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """COLS and CHANNELS: of result and operand in a group; BLOCKS: steps of 64 channels."""
    atoms: gl.constexpr = gl.NVMMASharedLayout(128, x.dtype.primitive_bitwidth, 2)
    LINES: gl.constexpr = (TILE_H + TAIL) * TILE_W
    x_ring_0 = gl.allocate_shared_memory(x.dtype, [STAGES * LINES // 8, 8, 64], atoms)
    x_ring_1 = gl.allocate_shared_memory(x.dtype, [STAGES * LINES // 8, 8, 64], atoms)
    w_lines = gl.allocate_shared_memory(w.dtype, [R * S * BLOCKS * BLOCK_N // 8, 8, 64], atoms)
    BITS: gl.constexpr = out.dtype.element_ty.primitive_bitwidth
    WIDTH: gl.constexpr = 1024 // BITS
    PANELS: gl.constexpr = BLOCK_N // SUBTILE // WIDTH if STORE == "tma" else 1
    BOX: gl.constexpr = [1, TILE_H, TILE_W, WIDTH] if STORE == "tma" else [1, 1, 1, WIDTH]
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 4)
    out_ring_0 = gl.allocate_shared_memory(out.dtype.element_ty, [PANELS] + BOX, out_layout)
    out_ring_1 = gl.allocate_shared_memory(out.dtype.element_ty, [PANELS] + BOX, out_layout)
    full_0 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_0 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_0.index(i), count=1)
        mbarrier.init(full_1.index(i), count=1)
        mbarrier.init(empty_0.index(i), count=1)
        mbarrier.init(empty_1.index(i), count=1)
    mbarrier.init(w_full, count=1)
    mbarrier.init(w_empty, count=2)
    gl.warp_specialize(
        [
            (
                resident_consumer_0,
                (
                    out_desc, out, operands, out_strides, x_ring_0, w_lines, out_ring_0, full_0, empty_0, w_full,
                    w_empty, N, OUT_H, OUT_W, COLS, GROUPS, R, S, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
                    SUBTILE, STORE, STEPS,
                ),
            ),
            (
                resident_consumer_1,
                (
                    out_desc, out, operands, out_strides, x_ring_1, w_lines, out_ring_1, full_1, empty_1, w_full,
                    w_empty, N, OUT_H, OUT_W, COLS, GROUPS, R, S, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
                    SUBTILE, STORE, STEPS,
                ),
            ),
            (
                resident_producer_0,
                (
                    x, x_tail, w, x_ring_0, w_lines, full_0, empty_0, w_full, w_empty, N, OUT_H, OUT_W, COLS,
                    CHANNELS, GROUPS, R, S, PAD_H, PAD_W, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
                ),
            ),
            (
                resident_producer_1,
                (
                    x, x_tail, w, x_ring_1, w_lines, full_1, empty_1, w_full, w_empty, N, OUT_H, OUT_W, COLS,
                    CHANNELS, GROUPS, R, S, PAD_H, PAD_W, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
                ),
            ),
        ],
        [4, 1, 1],
        [216, 24, 24],
    )  # fmt: skip


@gluon.jit
def resident_consumer_0(
    out_desc, out, operands, out_strides, x_ring, w_lines, out_ring, full, empty, w_full, w_empty,
    N, OUT_H, OUT_W, COLS, GROUPS, R: gl.constexpr, S: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SUBTILE: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    resident_consumer(
        0, out_desc, out, operands, out_strides, x_ring, w_lines, out_ring, full, empty, w_full, w_empty,
        N, OUT_H, OUT_W, COLS, GROUPS, R, S, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES, SUBTILE, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def resident_consumer_1(
    out_desc, out, operands, out_strides, x_ring, w_lines, out_ring, full, empty, w_full, w_empty,
    N, OUT_H, OUT_W, COLS, GROUPS, R: gl.constexpr, S: gl.constexpr, TILE_H: gl.constexpr, TILE_W: gl.constexpr,
    TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, SUBTILE: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    resident_consumer(
        1, out_desc, out, operands, out_strides, x_ring, w_lines, out_ring, full, empty, w_full, w_empty,
        N, OUT_H, OUT_W, COLS, GROUPS, R, S, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES, SUBTILE, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def resident_producer_0(
    x, x_tail, w, x_ring, w_lines, full, empty, w_full, w_empty, N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS,
    R: gl.constexpr, S: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    resident_producer(
        0, x, x_tail, w, x_ring, w_lines, full, empty, w_full, w_empty, N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS,
        R, S, PAD_H, PAD_W, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
    )  # fmt: skip


@gluon.jit
def resident_producer_1(
    x, x_tail, w, x_ring, w_lines, full, empty, w_full, w_empty, N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS,
    R: gl.constexpr, S: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, TILE_H: gl.constexpr,
    TILE_W: gl.constexpr, TAIL: gl.constexpr, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    resident_producer(
        1, x, x_tail, w, x_ring, w_lines, full, empty, w_full, w_empty, N, OUT_H, OUT_W, COLS, CHANNELS, GROUPS,
        R, S, PAD_H, PAD_W, TILE_H, TILE_W, TAIL, BLOCK_N, BLOCKS, STAGES,
    )  # fmt: skip


def swizzled_box(tensor, sizes, strides, box):
    """A descriptor for boxes whose rows are swizzled lines of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), len(box))
    return GluonDescriptor(tensor, sizes, safe_strides(sizes, strides, tensor.element_size()), box, layout)


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the convolution to out [N, K, P, Q], or the gradient of the input to out [N, C, H, W].

    inputs: "x" (for a gradient "d_out"), "w" and what the epilogue reads. attributes: all of the workload's.
    """
    if out.numel() == 0:
        return []
    form, launches = arranged(inputs, out, knobs["span"], attributes)
    height, width, block_n = knobs["tile_h"], knobs["tile_w"], knobs["block_n"]
    r, s = form.taps
    tail = triton.next_power_of_2(r - 1) if r > 1 else 0
    tensor, sizes, strides = form.image
    groups, cols = form.groups, out.shape[1] // form.groups
    store, out_desc = "pointer", None
    if stored_by_tma(out):
        store, (out_sizes, out_strides) = "tma", result_view(out)
        out_desc = swizzled_box(out, out_sizes, out_strides, [1, height, width, 128 // out.element_size()])
    tail_box = swizzled_box(tensor, sizes, strides, [1, tail, width, 64]) if tail else None
    weight = form.weight
    chain, operands = conv_chain(inputs, epilogue)
    args = (
        swizzled_box(tensor, sizes, strides, [1, height, width, 64]), tail_box,
        swizzled_box(weight, list(weight.shape), list(weight.stride()), [block_n, 1, 64]),
        out_desc, out, operands, out.stride(), out.shape[0], *out.shape[2:], cols, weight.shape[2], groups,
        r, s, *form.pad, height, width, tail, block_n, triton.cdiv(weight.shape[2], 64), knobs["num_stages"],
        knobs["subtile"], store, chain,
    )  # fmt: skip
    items = out.shape[0] * triton.cdiv(out.shape[2], height) * triton.cdiv(out.shape[3], width)
    items *= groups * triton.cdiv(cols, block_n)
    return [*launches, (conv_resident_weights, (ws_programs(out, items),), args, {"num_warps": 4})]
