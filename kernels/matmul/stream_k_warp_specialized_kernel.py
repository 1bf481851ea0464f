"""Matmul by specialised warps (Hopper) for tiles that do not fill whole waves of programs.

One warp loads tiles by TMA into a ring, two warpgroups multiply them, each half of a tile's rows. Two things even out
the work. Tiles may be 144, 160 or 192 columns wide: a wide piece, a power of two, and a narrow one beside it, each
with an accumulator of its own. And the steps along K of the last tiles may be shared out (stream-K, as in
`stream_k_kernel`): the part of a tile that a later program finishes goes to a workspace, and the parts are added in the
order of the programs, always the same bits.
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

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, tile_of
from kernelwright.kernels.matmul.shared_parts_kernel import (
    result_descriptor,
    sharing_programs,
    sk_finish,
    sk_piece,
    sk_places,
    sk_prefetch,
    sk_program_of,
    sk_share,
    sk_wait,
)
from kernelwright.kernels.matmul.short_epilogue_kernel import is_long
from kernelwright.kernels.matmul.stream_k_kernel import streamed_tiles
from kernelwright.kernels.matmul.warp_specialized_kernel import (
    gluon_barrier,
    panel_descriptor,
    ws_load,
    ws_operand,
    ws_programs,
)


@gluon.jit
def sk_producer(
    a, b, b_rest, a_ring, b_ring, rest_ring, full, empty, M, N, K, stream_tiles, share, longer,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    LINE: gl.constexpr = a_ring.shape[2]
    A_PANELS: gl.constexpr = 1 if A_ROW else BLOCK_M // LINE
    B_PANELS: gl.constexpr = (BLOCK_N - REST) // LINE if B_ROW else 1
    REST_PANELS: gl.constexpr = REST // LINE if B_ROW else 1
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * 128
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    k_steps = gl.cdiv(K, BLOCK_K)
    begin, end, newest, shared, items = sk_share(
        M, N, k_steps, stream_tiles, share, longer, BLOCK_M, BLOCK_N, STREAM
    )  # fmt: skip
    turn = 0
    for item in range(items):
        tile, first, last = sk_piece(item, shared, newest, begin, end, k_steps, stream_tiles, STREAM)
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        for step in range(first, last + 1):
            k = step * BLOCK_K
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            if A_ROW:
                ws_load(a, a_ring, stage * A_PANELS, ready, row, k, A_PANELS, LINE)
            else:
                ws_load(a, a_ring, stage * A_PANELS, ready, k, row, A_PANELS, LINE)
            if B_ROW:
                ws_load(b, b_ring, stage * B_PANELS, ready, k, col, B_PANELS, LINE)
            else:
                ws_load(b, b_ring, stage * B_PANELS, ready, col, k, B_PANELS, LINE)
            if REST > 0:
                beside = col + BLOCK_N - REST
                if B_ROW:
                    ws_load(b_rest, rest_ring, stage * REST_PANELS, ready, k, beside, REST_PANELS, LINE)
                else:
                    ws_load(b_rest, rest_ring, stage * REST_PANELS, ready, beside, k, REST_PANELS, LINE)
            turn += 1


@gluon.jit
def sk_multiply(
    a_tiles, b_tiles, rest_tiles, which, full, empty, turn, count, acc, rest,
    STAGES: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Multiply the next `count` stages of the ring; every stage but the last is handed back. The last stage's products
    are in flight when this returns."""
    for step in range(count):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        x = a_tiles.index(stage * 2 + which)
        y = b_tiles.index(stage)
        if not A_ROW:
            x = x.permute((1, 0))
        if not B_ROW:
            y = y.permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=step > 0, is_async=True)
        if REST > 0:
            z = rest_tiles.index(stage)
            if not B_ROW:
                z = z.permute((1, 0))
            rest = warpgroup_mma(x, z, rest, use_acc=step > 0, is_async=True)
            acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
            rest = warpgroup_mma_init(rest)
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        acc = warpgroup_mma_init(acc)
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    return acc, rest


@gluon.jit
def sk_multiply_held(
    a_tiles, b_tiles, rest_tiles, which, full, empty, turn, count, acc, rest,
    STAGES: gl.constexpr, B_ROW: gl.constexpr, A_WIDE: gl.constexpr, A_REST: gl.constexpr,
):  # fmt: skip
    """As `sk_multiply`, but a is brought to registers first, in the layouts A_WIDE and A_REST, so that shared memory is
    read once for both pieces; while a stage is multiplied, a of the next one is fetched. Hands back every stage."""
    ROWS: gl.constexpr = a_tiles.shape[1]
    DEPTH: gl.constexpr = a_tiles.shape[2]
    x = gl.zeros((ROWS, DEPTH), a_tiles.dtype, A_WIDE)
    if count > 0:
        mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
        x = a_tiles.index(turn % STAGES * 2 + which).load(A_WIDE)
    for step in range(count):
        stage = turn % STAGES
        y = b_tiles.index(stage)
        z = rest_tiles.index(stage)
        if not B_ROW:
            y = y.permute((1, 0))
            z = z.permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=step > 0, is_async=True)
        rest = warpgroup_mma(gl.convert_layout(x, A_REST), z, rest, use_acc=step > 0, is_async=True)
        # after the last stage it is that stage's again
        ahead = gl.minimum(turn + 1, turn + count - 1 - step)
        mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
        x = a_tiles.index(ahead % STAGES * 2 + which).load(A_WIDE)
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        acc = warpgroup_mma_init(acc)
        rest = warpgroup_mma_init(rest)
        mbarrier.arrive(empty.index(stage), count=1)
        turn += 1
    return acc, rest


@gluon.jit
def sk_consumer(
    WHICH: gl.constexpr, c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring, full, empty,
    M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, A_HELD: gl.constexpr, SUBTILE: gl.constexpr,
    STREAM: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // 2
    WIDE: gl.constexpr = BLOCK_N - REST
    SLOT: gl.constexpr = BLOCK_M * BLOCK_N
    BITS: gl.constexpr = a_ring.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 256 // BITS]
    )
    a_tiles = a_ring._reinterpret(
        a_ring.dtype, [STAGES * 2, ROWS, BLOCK_K] if A_ROW else [STAGES * 2, BLOCK_K, ROWS], a_ring.layout
    )
    b_tiles = b_ring._reinterpret(
        b_ring.dtype, [STAGES, BLOCK_K, WIDE] if B_ROW else [STAGES, WIDE, BLOCK_K], b_ring.layout
    )
    rest_tiles = b_tiles
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, max(REST, 16), 256 // BITS]
    )
    a_wide: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2) if A_HELD else None
    a_rest: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=rest_layout, k_width=2) if A_HELD else None
    if REST > 0:
        rest_tiles = rest_ring._reinterpret(
            rest_ring.dtype, [STAGES, BLOCK_K, REST] if B_ROW else [STAGES, REST, BLOCK_K], rest_ring.layout
        )
        # the narrow piece's result passes through the same buffer
        PART: gl.constexpr = min(REST, WIDE // SUBTILE)
        REST_LINE: gl.constexpr = min(PART, c_ring.shape[2])
        REST_C: gl.constexpr = gl.NVMMASharedLayout(
            REST_LINE * c_ring.dtype.primitive_bitwidth // 8, c_ring.dtype.primitive_bitwidth, 2
        )
        rest_c_ring = c_ring._reinterpret(c_ring.dtype, [PART // REST_LINE, ROWS, REST_LINE], REST_C)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    k_steps = gl.cdiv(K, BLOCK_K)
    begin, end, newest, shared, items = sk_share(
        M, N, k_steps, stream_tiles, share, longer, BLOCK_M, BLOCK_N, STREAM
    )  # fmt: skip
    program = gl.program_id(0)
    turn = 0
    # a long epilogue's instructions are brought from memory by a first run on a part of a tile that does not exist
    for item in range(-1 if is_long(STEPS) else 0, items):
        tile, first, last = sk_piece(
            gl.maximum(item, 0), shared, newest, begin, end, k_steps, stream_tiles, STREAM
        )  # fmt: skip
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M + WHICH * ROWS
        col = tile_n * BLOCK_N
        count = last - first + 1
        written = subtiles
        if item < 0:
            row, col, first, last, count, written = tiles_m * BLOCK_M, 0, 0, k_steps - 1, 0, 1
        if STEPS != "":
            C_LINE: gl.constexpr = c_ring.shape[2]
            sk_prefetch(operands, row, col, M, N, ROWS, WIDE, C_LINE, STEPS)
            if REST > 0:
                sk_prefetch(operands, row, col + WIDE, M, N, ROWS, max(REST, C_LINE), C_LINE, STEPS)
        acc = warpgroup_mma_init(gl.zeros((ROWS, WIDE), gl.float32, layout))
        rest = 0
        if REST > 0:
            rest = warpgroup_mma_init(gl.zeros((ROWS, REST), gl.float32, rest_layout))
        if A_HELD:
            acc, rest = sk_multiply_held(
                a_tiles, b_tiles, rest_tiles, WHICH, full, empty, turn, count, acc, rest, STAGES, B_ROW, a_wide, a_rest
            )  # fmt: skip
        else:
            acc, rest = sk_multiply(
                a_tiles, b_tiles, rest_tiles, WHICH, full, empty, turn, count, acc, rest, STAGES, A_ROW, B_ROW, REST
            )  # fmt: skip
        if REST > 0:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        turn += count
        if not A_HELD:
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=item >= 0)
        if STREAM and last < k_steps - 1:
            part = parts + program * SLOT + WHICH * (SLOT // 2)
            gl.store(part + sk_places(acc, 0, WIDE), acc)
            if REST > 0:
                gl.store(part + ROWS * WIDE + sk_places(rest, 0, REST), rest)
            # every thread's stores must be done before the flag goes up
            gluon_barrier()
            gl.atomic_xchg(flags + 2 * program + WHICH, 1, sem="release")
        else:
            helper = program
            arrived = program
            own_parts = parts
            if STREAM:
                if first > 0:
                    helper = sk_program_of(tile * k_steps, share, longer)
                arrived = sk_wait(flags, helper, program, WHICH)
                own_parts = parts + WHICH * (SLOT // 2)
            sk_finish(
                acc, written, c, c_ring, out, operands, own_parts, helper, arrived, row, col, M, N,
                stride_cm, stride_cn, SLOT, WIDE, SUBTILE, STREAM, STORE, STEPS,
            )  # fmt: skip
            if REST > 0:
                rest_parts = own_parts
                if STREAM:
                    rest_parts += ROWS * WIDE
                sk_finish(
                    rest, gl.minimum(written, REST // PART), c_rest, rest_c_ring, out, operands, rest_parts,
                    helper, arrived, row, col + WIDE, M, N, stride_cm, stride_cn,
                    SLOT, REST, REST // PART, STREAM, STORE, STEPS,
                )  # fmt: skip
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit
def sk_consumer_0(
    c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring, full, empty,
    M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, A_HELD: gl.constexpr, SUBTILE: gl.constexpr,
    STREAM: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    sk_consumer(
        0, c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring, full, empty,
        M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, REST, STAGES, GROUP_M, A_ROW, B_ROW, A_HELD, SUBTILE, STREAM, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def sk_consumer_1(
    c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring, full, empty,
    M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, A_HELD: gl.constexpr, SUBTILE: gl.constexpr,
    STREAM: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    sk_consumer(
        1, c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring, full, empty,
        M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
        BLOCK_M, BLOCK_N, BLOCK_K, REST, STAGES, GROUP_M, A_ROW, B_ROW, A_HELD, SUBTILE, STREAM, STORE, STEPS,
    )  # fmt: skip


@gluon.jit
def matmul_stream_k_warp_specialized(
    a, b, b_rest, c, c_rest, out, operands, parts, flags, M, N, K, stream_tiles, share, longer, subtiles,
    stride_cm, stride_cn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, A_ROW: gl.constexpr, B_ROW: gl.constexpr, A_HELD: gl.constexpr, SUBTILE: gl.constexpr,
    STREAM: gl.constexpr, STORE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    LINE: gl.constexpr = 1024 // a.dtype.primitive_bitwidth
    WIDE: gl.constexpr = BLOCK_N - REST
    ROWS: gl.constexpr = BLOCK_M // 2
    A_BOX: gl.constexpr = BLOCK_M if A_ROW else BLOCK_K
    B_BOX: gl.constexpr = BLOCK_K if B_ROW else WIDE
    C_LINE: gl.constexpr = 1024 // out.dtype.element_ty.primitive_bitwidth
    c_layout: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.element_ty.primitive_bitwidth, 2)
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * BLOCK_M * BLOCK_K // (A_BOX * LINE), A_BOX, LINE], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * WIDE * BLOCK_K // (B_BOX * LINE), B_BOX, LINE], b.layout)
    rest_ring = b_ring
    if REST > 0:
        REST_BOX: gl.constexpr = BLOCK_K if B_ROW else REST
        rest_ring = gl.allocate_shared_memory(
            b.dtype, [STAGES * REST * BLOCK_K // (REST_BOX * LINE), REST_BOX, LINE], b_rest.layout
        )
    c_ring_0 = gl.allocate_shared_memory(out.dtype.element_ty, [WIDE // SUBTILE // C_LINE, ROWS, C_LINE], c_layout)
    c_ring_1 = gl.allocate_shared_memory(out.dtype.element_ty, [WIDE // SUBTILE // C_LINE, ROWS, C_LINE], c_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                sk_consumer_0,
                (
                    c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring_0, full, empty,
                    M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
                    BLOCK_M, BLOCK_N, BLOCK_K, REST, STAGES, GROUP_M, A_ROW, B_ROW, A_HELD,
                    SUBTILE, STREAM, STORE, STEPS,
                ),
            ),
            (
                sk_consumer_1,
                (
                    c, c_rest, out, operands, parts, flags, a_ring, b_ring, rest_ring, c_ring_1, full, empty,
                    M, N, K, stream_tiles, share, longer, subtiles, stride_cm, stride_cn,
                    BLOCK_M, BLOCK_N, BLOCK_K, REST, STAGES, GROUP_M, A_ROW, B_ROW, A_HELD,
                    SUBTILE, STREAM, STORE, STEPS,
                ),
            ),
            (
                sk_producer,
                (
                    a, b, b_rest, a_ring, b_ring, rest_ring, full, empty, M, N, K, stream_tiles, share, longer,
                    BLOCK_M, BLOCK_N, BLOCK_K, REST, STAGES, GROUP_M, A_ROW, B_ROW, STREAM,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N] and the epilogue's operands."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k, subtile = (knobs[name] for name in ("block_m", "block_n", "block_k", "subtile"))
    wide = 1 << (block_n.bit_length() - 1)
    rest = block_n - wide
    a_row, a_desc, a_launches = ws_operand(a, block_m, block_k, knobs["repack"])
    b_row, b_desc, b_launches = ws_operand(b, block_k, wide, knobs["repack"])
    # the narrow piece is read from where the wide one is, a copy if there is one
    rest_desc = panel_descriptor(b_desc.base, block_k if b_row else rest) if rest else None
    # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
    whole = all(x * out.element_size() % 16 == 0 for x in (n, out.stride(0))) and out.data_ptr() % 16 == 0
    store = "col" if out.stride(1) != 1 else "tma" if whole else "row"
    c_desc = result_descriptor(out, block_m // 2, wide // subtile) if store == "tma" else None
    c_rest = result_descriptor(out, block_m // 2, min(rest, wide // subtile)) if store == "tma" and rest else None
    tiles, k_steps = triton.cdiv(m, block_m) * triton.cdiv(n, block_n), triton.cdiv(k, block_k)
    waves = knobs["stream_waves"]
    programs, stream_tiles, share, longer, parts, flags = ws_programs(a, tiles), 0, 0, 0, None, None
    if waves:
        programs = sharing_programs(tiles, k_steps, ws_programs(a, tiles * k_steps))
        stream_tiles = streamed_tiles(tiles, programs, waves)
        share, longer = divmod(stream_tiles * k_steps, programs)
        parts = torch.empty((programs, block_m * block_n), dtype=torch.float32, device=a.device)
        flags = torch.zeros((programs, 2), dtype=torch.int32, device=a.device)
    steps, operands = chain_of(inputs, epilogue)
    args = (
        a_desc, b_desc, rest_desc, c_desc, c_rest, out, operands, parts, flags, m, n, k, stream_tiles, share, longer,
        subtile, *out.stride(), block_m, block_n, block_k, rest, knobs["num_stages"], knobs["group_m"], a_row, b_row,
        bool(knobs["a_held"]), subtile, waves > 0, store, steps,
    )  # fmt: skip
    main = (matmul_stream_k_warp_specialized, (programs,), args, {"num_warps": 4})
    return [*a_launches, *b_launches, main]
