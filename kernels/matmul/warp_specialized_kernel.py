"""Matmul by specialised warps (Hopper): one warp loads tiles by TMA into a ring, two warpgroups multiply them.

"cooperative": both warpgroups share a tile, each has half of its rows. "pingpong": each has tiles of its own and they
take turns on the tensor cores, so that one's epilogue runs beside the other's products.

A tensor whose rows are not multiples of 16 bytes apart is taken in classes: rows i, i + classes, i + 2 * classes, ...
are 16-byte multiples apart and make a legal TMA tensor of their own, from the aligned address at or below the first
element on; what lies between the two is skipped by the inner coordinate. A tile of such rows comes class by class, so
that its position p stands for row (p % (rows / classes)) * classes + p // (rows / classes).
"""

import math

import torch
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

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, tile_of
from kernelwright.kernels.matmul.gluon_names_kernel import gluon_barrier, tma_load, tma_store

MOST_CLASSES = 8


@gluon.jit
def ws_load(
    descriptors, start, step, ring, slot, barrier, outer, inner,
    CLASSES: gl.constexpr, PANELS: gl.constexpr, WIDTH: gl.constexpr, PER_16: gl.constexpr,
):  # fmt: skip
    """Start the copies of one operand's tile: panels of 128 bytes, each class by class."""
    for panel in gl.static_range(PANELS):
        for i in gl.static_range(CLASSES):
            place = [outer // CLASSES, inner + panel * WIDTH + (start + i * step) % PER_16]
            tma_load(descriptors[i], place, barrier, ring.index(slot + panel * CLASSES + i))


@gluon.jit
def ws_producer(
    a, b, b_right, a_align, b_align, right_align, a_ring, b_ring, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, A_CLASSES: gl.constexpr, B_CLASSES: gl.constexpr,
    PAIRED: gl.constexpr, PER_16: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if PAIRED else 1
    WIDTH: gl.constexpr = 8 * PER_16
    A_PANELS: gl.constexpr = 1 if A_ROW else BLOCK_M // WIDTH
    B_PANELS: gl.constexpr = BLOCK_N // HALVES // WIDTH if B_ROW else 1
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * 128
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N // HALVES)
    k_steps = gl.cdiv(K, BLOCK_K)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * (BLOCK_N // HALVES)
        for step in range(k_steps):
            k = step * BLOCK_K
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            slot = stage * (A_PANELS * A_CLASSES)
            if A_ROW:
                ws_load(a, a_align[0], a_align[1], a_ring, slot, ready, row, k, A_CLASSES, A_PANELS, WIDTH, PER_16)
            else:
                ws_load(a, a_align[0], a_align[1], a_ring, slot, ready, k, row, A_CLASSES, A_PANELS, WIDTH, PER_16)
            slot = stage * (HALVES * B_PANELS * B_CLASSES)
            if B_ROW:
                ws_load(b, b_align[0], b_align[1], b_ring, slot, ready, k, col, B_CLASSES, B_PANELS, WIDTH, PER_16)
            else:
                ws_load(b, b_align[0], b_align[1], b_ring, slot, ready, col, k, B_CLASSES, B_PANELS, WIDTH, PER_16)
            if PAIRED:
                slot += B_PANELS * B_CLASSES
                start = right_align[0]
                pitch = right_align[1]
                if B_ROW:
                    ws_load(b_right, start, pitch, b_ring, slot, ready, k, col, B_CLASSES, B_PANELS, WIDTH, PER_16)
                else:
                    ws_load(b_right, start, pitch, b_ring, slot, ready, col, k, B_CLASSES, B_PANELS, WIDTH, PER_16)
            turn += 1


@gluon.jit
def ws_multiply(
    a_tiles, b_tiles, a_slot, a_slots, full, empty, turn, k_steps, acc,
    STAGES: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr,
):  # fmt: skip
    """Multiply the next k_steps stages of the ring; every stage but the last is handed back. One product is in flight
    when this returns."""
    for step in range(k_steps):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        x = a_tiles.index(stage * a_slots + a_slot)
        y = b_tiles.index(stage)
        if not A_ROW:
            x = x.permute((1, 0))
        if not B_ROW:
            y = y.permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    return acc


@gluon.jit
def ws_halves(x):
    """The left and the right half of a tile's columns."""
    parts = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1))
    return gl.split(parts)


@gluon.jit
def ws_in_order(x, CLASSES: gl.constexpr):
    """A tile whose columns come class by class, with its columns in their order."""
    if CLASSES > 1:
        x = x.reshape((x.shape[0], CLASSES, x.shape[1] // CLASSES)).permute((0, 2, 1))
        x = x.reshape((x.shape[0], x.shape[1] * CLASSES))
    return x


@gluon.jit
def ws_rows(row, layout: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr, BLOCK_M: gl.constexpr,
            CLASSES: gl.constexpr):  # fmt: skip
    """Matrix rows of the positions FIRST, FIRST + 1, ... of the tile at `row`."""
    position = FIRST + gl.arange(0, ROWS, layout)
    PER_CLASS: gl.constexpr = BLOCK_M // CLASSES
    return row + (position % PER_CLASS) * CLASSES + position // PER_CLASS


@gluon.jit
def ws_store(
    x, c, c_align, c_ring, out, row, col, M, N, stride_cm, stride_cn,
    FIRST: gl.constexpr, BLOCK_M: gl.constexpr, M_CLASSES: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Write a finished fp32 tile: positions FIRST, ... of the tile at (row, col), through this warpgroup's buffer."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
    PER_CLASS: gl.constexpr = BLOCK_M // M_CLASSES
    SLICE: gl.constexpr = PER_CLASS if PER_CLASS < ROWS else ROWS
    WIDTH: gl.constexpr = c_ring.shape[2]
    buffer = c_ring._reinterpret(c_ring.dtype, [ROWS, COLS], c_ring.layout)
    if STORE == "tma":
        # only the thread that started the copies waits for them
        tma.store_wait(0)
        gluon_barrier()
        buffer.store(x.to(c_ring.dtype))
        fence_async_shared()
        gluon_barrier()
        for panel in gl.static_range(COLS // WIDTH):
            for part in gl.static_range(ROWS // SLICE):
                shift = (c_align[0] + (FIRST + part * SLICE) // PER_CLASS * c_align[1]) % (WIDTH // 8)
                place = [row // M_CLASSES + (FIRST + part * SLICE) % PER_CLASS, col + panel * WIDTH + shift]
                target = c[(FIRST + part * SLICE) // PER_CLASS]
                tma_store(target, place, c_ring.index(panel * (ROWS // SLICE) + part))
    else:
        buffer.store(x.to(c_ring.dtype))
        if STORE == "row":
            layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        else:
            layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        tile = buffer.load(layout)
        rows = ws_rows(row, gl.SliceLayout(1, layout), ROWS, FIRST, BLOCK_M, M_CLASSES)[:, None]
        cols = (col + gl.arange(0, COLS, gl.SliceLayout(0, layout)))[None, :]
        places = out + rows.to(gl.int64) * stride_cm + cols.to(gl.int64) * stride_cn
        gl.store(places, tile, mask=(rows < M) & (cols < N))


@gluon.jit
def ws_finish(
    x, c, c_align, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn,
    FIRST: gl.constexpr, BLOCK_M: gl.constexpr, M_CLASSES: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of one tile without a pair step."""
    layout: gl.constexpr = x.type.layout
    rows = ws_rows(row, gl.SliceLayout(1, layout), x.shape[0], FIRST, BLOCK_M, M_CLASSES)
    cols = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    x = finish(x, operands, 0, rows, cols, M, N, STEPS)
    ws_store(x, c, c_align, c_ring, out, row, col, M, N, stride_cm, stride_cn, FIRST, BLOCK_M, M_CLASSES, STORE)


@gluon.jit
def ws_epilogue(
    acc, c, c_align, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn,
    FIRST: gl.constexpr, BLOCK_M: gl.constexpr, M_CLASSES: gl.constexpr, N_CLASSES: gl.constexpr,
    SUBTILE: gl.constexpr, PAIRED: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's accumulator, in SUBTILE parts."""
    if PAIRED:
        left, right = ws_halves(acc)
        left = ws_in_order(left, N_CLASSES)
        right = ws_in_order(right, N_CLASSES)
        layout: gl.constexpr = left.type.layout
        rows = ws_rows(row, gl.SliceLayout(1, layout), left.shape[0], FIRST, BLOCK_M, M_CLASSES)
        cols = col + gl.arange(0, left.shape[1], gl.SliceLayout(0, layout))
        x = finish_pair(left, right, operands, 0, rows, cols, M, N, STEPS)
        ws_store(x, c, c_align, c_ring, out, row, col, M, N, stride_cm, stride_cn, FIRST, BLOCK_M, M_CLASSES, STORE)
    else:
        acc = ws_in_order(acc, N_CLASSES)
        if SUBTILE == 1:
            ws_finish(
                acc, c, c_align, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn,
                FIRST, BLOCK_M, M_CLASSES, STORE, STEPS,
            )  # fmt: skip
        else:
            left, right = ws_halves(acc)
            ws_epilogue(
                left, c, c_align, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn,
                FIRST, BLOCK_M, M_CLASSES, 1, SUBTILE // 2, False, STORE, STEPS,
            )  # fmt: skip
            ws_epilogue(
                right, c, c_align, c_ring, out, operands, row, col + left.shape[1], M, N, stride_cm, stride_cn,
                FIRST, BLOCK_M, M_CLASSES, 1, SUBTILE // 2, False, STORE, STEPS,
            )  # fmt: skip


@gluon.jit
def ws_consumer(
    WHICH: gl.constexpr, c, c_align, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K,
    stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, M_CLASSES: gl.constexpr, N_CLASSES: gl.constexpr,
    PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    SHARE: gl.constexpr = 1 if PINGPONG else 2
    ROWS: gl.constexpr = BLOCK_M // SHARE
    FIRST: gl.constexpr = 0 if PINGPONG else WHICH * ROWS
    COLS: gl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    BITS: gl.constexpr = a_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // BITS]
    )
    a_tiles = a_ring._reinterpret(
        a_ring.dtype, [STAGES * SHARE, ROWS, BLOCK_K] if A_ROW else [STAGES * SHARE, BLOCK_K, ROWS], a_ring.layout
    )
    b_tiles = b_ring._reinterpret(
        b_ring.dtype, [STAGES, BLOCK_K, BLOCK_N] if B_ROW else [STAGES, BLOCK_N, BLOCK_K], b_ring.layout
    )
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, COLS)
    k_steps = gl.cdiv(K, BLOCK_K)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    turn = 0
    if PINGPONG:
        first += WHICH * stride
        stride *= 2
        turn = WHICH * k_steps
    mine = 0
    for tile in range(first, tiles_m * tiles_n, stride):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_N), gl.float32, layout))
        if PINGPONG:
            # the other must have met all of its stages first: a barrier tells only odd phases from even ones
            mbarrier.wait(order.index(WHICH), (mine & 1) ^ (1 - WHICH))
        acc = ws_multiply(a_tiles, b_tiles, FIRST // ROWS, SHARE, full, empty, turn, k_steps, acc, STAGES, A_ROW, B_ROW)
        if PINGPONG:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((turn + k_steps - 1) % STAGES), count=1)
        ws_epilogue(
            acc, c, c_align, c_ring, out, operands, tile_m * BLOCK_M, tile_n * COLS, M, N, stride_cm, stride_cn,
            FIRST, BLOCK_M, M_CLASSES, N_CLASSES, SUBTILE, PAIRED, STORE, STEPS,
        )  # fmt: skip
        turn += k_steps * (2 if PINGPONG else 1)
        mine += 1
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def ws_consumer_0(
    c, c_align, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, M_CLASSES: gl.constexpr, N_CLASSES: gl.constexpr,
    PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ws_consumer(
        0, c, c_align, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, M_CLASSES, N_CLASSES,
        PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def ws_consumer_1(
    c, c_align, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, M_CLASSES: gl.constexpr, N_CLASSES: gl.constexpr,
    PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ws_consumer(
        1, c, c_align, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, M_CLASSES, N_CLASSES,
        PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def matmul_warp_specialized(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, r0, r1, r2, r3, r4, r5, r6, r7,
    c0, c1, c2, c3, c4, c5, c6, c7, a_align, b_align, right_align, c_align, out, operands, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, M_CLASSES: gl.constexpr, N_CLASSES: gl.constexpr,
    K_CLASSES: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """a0, ..., b0, ..., r0, ..., c0, ... are the classes of a, b, b's right half (paired) and out; N counts out's
    columns."""
    A_CLASSES: gl.constexpr = M_CLASSES if A_ROW else K_CLASSES
    B_CLASSES: gl.constexpr = K_CLASSES if B_ROW else N_CLASSES
    PER_16: gl.constexpr = 128 // a0.dtype.primitive_bitwidth
    WIDTH: gl.constexpr = 8 * PER_16
    A_BOX: gl.constexpr = (BLOCK_M if A_ROW else BLOCK_K) // A_CLASSES
    B_BOX: gl.constexpr = (BLOCK_K if B_ROW else BLOCK_N // 2 if PAIRED else BLOCK_N) // B_CLASSES
    ROWS: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    C_BOX: gl.constexpr = BLOCK_M // M_CLASSES if BLOCK_M // M_CLASSES < ROWS else ROWS
    C_WIDTH: gl.constexpr = 1024 // out.dtype.element_ty.primitive_bitwidth
    C_COLS: gl.constexpr = (BLOCK_N // 2 if PAIRED else BLOCK_N) // SUBTILE
    C_SLOTS: gl.constexpr = ROWS * C_COLS // (C_BOX * C_WIDTH)
    c_layout: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.element_ty.primitive_bitwidth, 2)
    a_ring = gl.allocate_shared_memory(
        a0.dtype, [STAGES * BLOCK_M * BLOCK_K // (A_BOX * WIDTH), A_BOX, WIDTH], a0.layout
    )
    b_ring = gl.allocate_shared_memory(
        b0.dtype, [STAGES * BLOCK_N * BLOCK_K // (B_BOX * WIDTH), B_BOX, WIDTH], b0.layout
    )
    c_ring_0 = gl.allocate_shared_memory(out.dtype.element_ty, [C_SLOTS, C_BOX, C_WIDTH], c_layout)
    c_ring_1 = gl.allocate_shared_memory(out.dtype.element_ty, [C_SLOTS, C_BOX, C_WIDTH], c_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1 if PINGPONG else 2)
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    a = (a0, a1, a2, a3, a4, a5, a6, a7)
    b = (b0, b1, b2, b3, b4, b5, b6, b7)
    b_right = (r0, r1, r2, r3, r4, r5, r6, r7)
    c = (c0, c1, c2, c3, c4, c5, c6, c7)
    gl.warp_specialize(
        [
            (
                ws_consumer_0,
                (
                    c, c_align, out, operands, a_ring, b_ring, c_ring_0, full, empty, order, M, N, K,
                    stride_cm, stride_cn, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW,
                    M_CLASSES, N_CLASSES, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
                ),
            ),
            (
                ws_consumer_1,
                (
                    c, c_align, out, operands, a_ring, b_ring, c_ring_1, full, empty, order, M, N, K,
                    stride_cm, stride_cn, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW,
                    M_CLASSES, N_CLASSES, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
                ),
            ),
            (
                ws_producer,
                (
                    a, b, b_right, a_align, b_align, right_align, a_ring, b_ring, full, empty, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, A_CLASSES, B_CLASSES, PAIRED, PER_16,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def classes_of(tensor):
    """Into how many classes of rows [R, C] (unit stride in C) must fall for each to be a legal TMA tensor."""
    per_16 = 16 // tensor.element_size()
    return per_16 // math.gcd(tensor.stride(0), per_16)


def class_views(tensor, classes):
    """(views, start, step) of a tensor [R, C] with unit stride in C: view i begins at the aligned address at or below
    row i's first element, (start + i * step) % per_16 elements before it, and holds rows i, i + classes, ..."""
    rows, columns = tensor.shape
    per_16 = 16 // tensor.element_size()
    # meta tensors have no address
    start = (tensor.data_ptr() // tensor.element_size() or tensor.storage_offset()) % per_16
    step = tensor.stride(0) % per_16
    views = []
    for i in range(classes):
        shift = (start + i * step) % per_16
        size = (triton.cdiv(rows - i, classes), columns + shift)
        offset = tensor.storage_offset() + i * tensor.stride(0) - shift
        views.append(tensor.as_strided(size, (classes * tensor.stride(0), 1), offset))
    return views, start, step


def descriptors(tensor, classes, box_rows):
    """(eight descriptors, None for those beyond `classes`; (start, step) of their shifts) of a tensor [R, C], for
    boxes of box_rows rows of 128 bytes."""
    views, start, step = class_views(tensor, classes)
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), 2)
    box = [box_rows, 128 // tensor.element_size()]
    made = [GluonDescriptor(v, list(v.shape), list(v.stride()), box, layout) for v in views]
    return made + [None] * (MOST_CLASSES - classes), (start, step)


def ws_programs(tensor, tiles):
    """Programs to launch: one a multiprocessor, and no more than there are tiles."""
    if not tensor.is_cuda:
        return 1
    return min(tiles, torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N] and the epilogue's operands."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    block_m, block_n, block_k = (knobs[name] for name in ("block_m", "block_n", "block_k"))
    a_row, b_row, paired, pingpong = (
        a.stride(1) == 1,
        b.stride(1) == 1,
        is_paired(epilogue),
        knobs["mode"] == "pingpong",
    )
    a_lines, b_lines = a if a_row else a.T, b if b_row else b.T
    m_classes = max(classes_of(a_lines) if a_row else 1, classes_of(out) if out.stride(1) == 1 else 1)
    n_classes = 1 if b_row else classes_of(b_lines)
    k_classes = max(1 if a_row else classes_of(a_lines), classes_of(b_lines) if b_row else 1)
    a_box = block_m // m_classes if a_row else block_k // k_classes
    b_box = block_k // k_classes if b_row else block_n // (2 if paired else 1) // n_classes
    a_parts, a_align = descriptors(a_lines, m_classes if a_row else k_classes, a_box)
    lefts = (b[:, :n], b[:, n:]) if paired else (b,)
    b_parts = [descriptors(x if b_row else x.T, k_classes if b_row else n_classes, b_box) for x in lefts]
    right, right_align = b_parts[1] if paired else ([None] * MOST_CLASSES, (0, 0))
    rows = block_m if pingpong else block_m // 2
    store = "tma" if out.stride(1) == 1 else "col"
    c_parts, c_align = [None] * MOST_CLASSES, (0, 0)
    if store == "tma":
        c_parts, c_align = descriptors(out, m_classes, min(rows, block_m // m_classes))
    steps, operands = chain_of(inputs, epilogue)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n // (2 if paired else 1))
    args = (
        *a_parts, *b_parts[0][0], *right, *c_parts, a_align, b_parts[0][1], right_align, c_align, out, operands,
        m, n, k, *out.stride(), block_m, block_n, block_k, knobs["num_stages"], knobs["group_m"], a_row, b_row,
        m_classes, n_classes, k_classes, pingpong, knobs["subtile"], paired, store, steps,
    )  # fmt: skip
    return [(matmul_warp_specialized, (ws_programs(a, tiles),), args, {"num_warps": 4})]
