"""Matmul by specialised warps (Hopper): one warp loads tiles by TMA into a ring, two warpgroups multiply them.

"cooperative": both warpgroups share a tile, each has half of its rows. "pingpong": each has tiles of its own and they
take turns on the tensor cores, so that one's epilogue runs beside the other's products.
"""

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
from kernelwright.kernels.matmul.pack_kernel import packed

# triton 3.6 has the second name of each pair, 3.8 the first
gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def ws_load(desc, ring, slot, barrier, outer, inner, PANELS: gl.constexpr, WIDTH: gl.constexpr):
    """Start the copies of one operand's tile: panels of 128 bytes."""
    for panel in gl.static_range(PANELS):
        tma_load(desc, [outer, inner + panel * WIDTH], barrier, ring.index(slot + panel))


@gluon.jit
def ws_producer(
    a, b, a_ring, b_ring, full, empty, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 if PAIRED else 1
    WIDTH: gl.constexpr = a_ring.shape[2]
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
            if A_ROW:
                ws_load(a, a_ring, stage * A_PANELS, ready, row, k, A_PANELS, WIDTH)
            else:
                ws_load(a, a_ring, stage * A_PANELS, ready, k, row, A_PANELS, WIDTH)
            for half in gl.static_range(HALVES):
                slot = (stage * HALVES + half) * B_PANELS
                if B_ROW:
                    ws_load(b, b_ring, slot, ready, k, half * N + col, B_PANELS, WIDTH)
                else:
                    ws_load(b, b_ring, slot, ready, half * N + col, k, B_PANELS, WIDTH)
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
def ws_store(x, c, c_ring, out, row, col, M, N, stride_cm, stride_cn, STORE: gl.constexpr):
    """Write a finished fp32 tile at (row, col) through this warpgroup's buffer."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1]
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
            tma_store(c, [row, col + panel * WIDTH], c_ring.index(panel))
    else:
        gluon_barrier()
        buffer.store(x.to(c_ring.dtype))
        gluon_barrier()
        if STORE == "row":
            layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        else:
            layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        tile = buffer.load(layout)
        rows = (row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)))[:, None]
        cols = (col + gl.arange(0, COLS, gl.SliceLayout(0, layout)))[None, :]
        places = out + rows.to(gl.int64) * stride_cm + cols.to(gl.int64) * stride_cn
        gl.store(places, tile, mask=(rows < M) & (cols < N))


@gluon.jit
def ws_epilogue(
    acc, c, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn,
    SUBTILE: gl.constexpr, PAIRED: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Epilogue and store of a warpgroup's accumulator at (row, col), in SUBTILE parts."""
    if PAIRED:
        left, right = ws_halves(acc)
        rows = row + gl.arange(0, left.shape[0], gl.SliceLayout(1, left.type.layout))
        cols = col + gl.arange(0, left.shape[1], gl.SliceLayout(0, left.type.layout))
        x = finish_pair(left, right, operands, 0, rows, cols, M, N, STEPS)
        ws_store(x, c, c_ring, out, row, col, M, N, stride_cm, stride_cn, STORE)
    elif SUBTILE == 1:
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        cols = col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        x = finish(acc, operands, 0, rows, cols, M, N, STEPS)
        ws_store(x, c, c_ring, out, row, col, M, N, stride_cm, stride_cn, STORE)
    else:
        left, right = ws_halves(acc)
        ws_epilogue(
            left, c, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn, SUBTILE // 2, False, STORE, STEPS
        )  # fmt: skip
        ws_epilogue(
            right, c, c_ring, out, operands, row, col + left.shape[1], M, N, stride_cm, stride_cn,
            SUBTILE // 2, False, STORE, STEPS,
        )  # fmt: skip


@gluon.jit
def ws_consumer(
    WHICH: gl.constexpr, c, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K,
    stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
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
            mbarrier.wait(order.index(WHICH), mine ^ (1 - WHICH))
        acc = ws_multiply(a_tiles, b_tiles, FIRST // ROWS, SHARE, full, empty, turn, k_steps, acc, STAGES, A_ROW, B_ROW)
        if PINGPONG:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((turn + k_steps - 1) % STAGES), count=1)
        ws_epilogue(
            acc, c, c_ring, out, operands, tile_m * BLOCK_M + FIRST, tile_n * COLS, M, N, stride_cm, stride_cn,
            SUBTILE, PAIRED, STORE, STEPS,
        )  # fmt: skip
        turn += k_steps * (2 if PINGPONG else 1)
        mine ^= 1
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def ws_consumer_0(
    c, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ws_consumer(
        0, c, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def ws_consumer_1(
    c, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ws_consumer(
        1, c, out, operands, a_ring, b_ring, c_ring, full, empty, order, M, N, K, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def matmul_warp_specialized(
    a, b, c, out, operands, M, N, K, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, PINGPONG: gl.constexpr, SUBTILE: gl.constexpr, PAIRED: gl.constexpr,
    STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """N counts out's columns; the right half of a gated product's b begins there."""
    WIDTH: gl.constexpr = 1024 // a.dtype.primitive_bitwidth
    A_BOX: gl.constexpr = BLOCK_M if A_ROW else BLOCK_K
    B_BOX: gl.constexpr = BLOCK_K if B_ROW else BLOCK_N // 2 if PAIRED else BLOCK_N
    ROWS: gl.constexpr = BLOCK_M if PINGPONG else BLOCK_M // 2
    C_WIDTH: gl.constexpr = 1024 // out.dtype.element_ty.primitive_bitwidth
    C_COLS: gl.constexpr = (BLOCK_N // 2 if PAIRED else BLOCK_N) // SUBTILE
    c_layout: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.element_ty.primitive_bitwidth, 2)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCK_M * BLOCK_K // (A_BOX * WIDTH), A_BOX, WIDTH], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * BLOCK_N * BLOCK_K // (B_BOX * WIDTH), B_BOX, WIDTH], b.layout)
    c_ring_0 = gl.allocate_shared_memory(out.dtype.element_ty, [C_COLS // C_WIDTH, ROWS, C_WIDTH], c_layout)
    c_ring_1 = gl.allocate_shared_memory(out.dtype.element_ty, [C_COLS // C_WIDTH, ROWS, C_WIDTH], c_layout)
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
                ws_consumer_0,
                (
                    c, out, operands, a_ring, b_ring, c_ring_0, full, empty, order, M, N, K, stride_cm, stride_cn,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
                ),
            ),
            (
                ws_consumer_1,
                (
                    c, out, operands, a_ring, b_ring, c_ring_1, full, empty, order, M, N, K, stride_cm, stride_cn,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, PINGPONG, SUBTILE, PAIRED, STORE, STEPS,
                ),
            ),
            (
                ws_producer,
                (
                    a, b, a_ring, b_ring, full, empty, M, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, A_ROW, B_ROW, PAIRED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def panel_descriptor(tensor, rows):
    """A descriptor of a tensor [R, C] with unit stride in C, for boxes of `rows` rows of 128 bytes."""
    layout = gl.NVMMASharedLayout(128, 8 * tensor.element_size(), 2)
    return GluonDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, 128 // tensor.element_size()], layout
    )


def ws_operand(tensor, rows, columns, repack):
    """(is row-major, descriptor, launches) of an operand of which tiles are rows x columns."""
    launches = []
    row_major = tensor.stride(1) == 1
    lines, outer = (tensor, rows) if row_major else (tensor.T, columns)
    if repack and (lines.stride(0) * lines.element_size() % 16 or lines.data_ptr() % 16):
        lines, launch = packed(lines)
        launches.append(launch)
    return row_major, panel_descriptor(lines, outer), launches


def ws_programs(tensor, tiles):
    """Programs to launch: one a multiprocessor, and no more than there are tiles."""
    if not tensor.is_cuda:
        return 1
    return min(tiles, torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N] and the epilogue's operands."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k = (knobs[name] for name in ("block_m", "block_n", "block_k"))
    paired, pingpong = is_paired(epilogue), knobs["mode"] == "pingpong"
    halves = 2 if paired else 1
    a_row, a_desc, a_launches = ws_operand(a, block_m, block_k, knobs["repack"])
    b_row, b_desc, b_launches = ws_operand(b, block_k, block_n, knobs["repack"])
    # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
    whole = all(x * out.element_size() % 16 == 0 for x in (n, out.stride(0))) and out.data_ptr() % 16 == 0
    store = "col" if out.stride(1) != 1 else "tma" if whole else "row"
    c_desc = panel_descriptor(out, block_m if pingpong else block_m // 2) if store == "tma" else None
    steps, operands = chain_of(inputs, epilogue)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    args = (
        a_desc, b_desc, c_desc, out, operands, m, n, k, *out.stride(), block_m, halves * block_n, block_k,
        knobs["num_stages"], knobs["group_m"], a_row, b_row, pingpong, knobs["subtile"], paired, store, steps,
    )  # fmt: skip
    main = (matmul_warp_specialized, (ws_programs(a, tiles),), args, {"num_warps": 4})
    return [*a_launches, *b_launches, main]
