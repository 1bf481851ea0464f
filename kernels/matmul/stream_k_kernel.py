"""Matmul by TMA for tiles that do not fill whole waves of programs (stream-K): the steps along K of the tiles left over
are shared out evenly, so that every program works equally long.

A program walks through its share backwards: first the tile that a later program finishes, whose partial sum goes to a
workspace, last the tile that earlier programs began. So nobody waits before it has left what others wait for, and
programs wait only for those before them. The parts are added in the order of the programs: always the same bits. A part
that is taken has its flag taken down, so that the next launch finds all flags down.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, is_paired, strides3, tile_of
from kernelwright.kernels.matmul.persistent_tma_kernel import (
    load_tile,
    multiprocessors,
    operand,
    store_pair,
    store_part,
    unaligned,
)
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def share_start(program, steps, programs):
    """First step of a program's share; the first shares are one step longer where the steps do not come out even."""
    return program * (steps // programs) + tl.minimum(program, steps % programs)


@triton.jit
def program_of(step, steps, programs):
    """The program in whose share a step lies."""
    short = steps // programs
    longer = (steps % programs) * (short + 1)
    return tl.where(step < longer, step // (short + 1), steps % programs + (step - longer) // tl.maximum(short, 1))


@triton.jit
def piece_of(item, shared, newest, begin, end, k_tiles, stream_tiles):
    """(tile, first and last step along K) of a program's item: its share from behind, then whole tiles."""
    tile, first, last = newest - item, 0, k_tiles - 1
    if item < shared:
        first = tl.maximum(begin - tile * k_tiles, 0)
        last = tl.minimum(end - tile * k_tiles, k_tiles) - 1
    else:
        tile = stream_tiles + tl.program_id(0) + (item - shared) * tl.num_programs(0)
    return tile, first, last


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def part_places(x):
    """Offsets of a partial tile's elements in its slot: in the order in which the threads of a warp hold them.

    A warp's wgmma accumulators are blocks of 8 x 8, of which thread t holds columns 2 * (t % 4) and 2 * (t % 4) + 1 of
    row t // 4; so each of a thread's numbers goes to whole lines of memory with those of its neighbours.
    """
    rows = tl.arange(0, x.shape[0])[:, None]
    cols = tl.arange(0, x.shape[1])[None, :]
    block = (rows // 8) * (x.shape[1] // 8) + cols // 8
    return block * 64 + (cols % 2) * 32 + (rows % 8) * 4 + (cols % 8) // 2


@triton.jit
def put_part(ptr, x, INLINE: tl.constexpr):
    """Store a partial tile; `INLINE` (not in the interpreter) leaves the numbers in the threads that hold them."""
    places = ptr + part_places(x)
    if INLINE:
        bits = x.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r,~{memory}", [places.to(tl.int64), bits], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(places, x)


@triton.jit
def add_parts(acc, ptr, first, last, SLOT: tl.constexpr, INLINE: tl.constexpr):
    """acc and the parts that programs first to last - 1 have left, past the first-level cache."""
    program = first
    while program < last:
        places = ptr + program * SLOT + part_places(acc)
        if INLINE:
            bits = tl.inline_asm_elementwise(
                "ld.global.cg.b32 $0, [$1];", "=r,l", [places.to(tl.int64)], tl.int32, is_pure=True, pack=1
            )
            acc += bits.to(acc.dtype, bitcast=True)
        else:
            acc += tl.load(places)
        program += 1
    return acc


@triton.jit
def leave(acc, right, part_ptr, flag_ptr, PAIRED: tl.constexpr, INLINE: tl.constexpr):
    """Leave this program's part of a tile (two of a pair) to the program that finishes it."""
    put_part(part_ptr, acc, INLINE)
    if PAIRED:
        put_part(part_ptr + acc.shape[0] * acc.shape[1], right, INLINE)
    # every thread's stores must be done before the flag goes up; triton does not pipeline loops with a debug_barrier
    up = 1
    if INLINE:
        up = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r,~{memory}", [1], tl.int32, is_pure=False, pack=1
        )
    tl.atomic_xchg(flag_ptr, up, sem="release")


@triton.jit
def wait(flags_ptr, first, last):
    """Wait for the parts of programs first to last - 1, and take their flags down for the next launch; returns `last`,
    by way of the flags, so that nothing that needs it can be moved before the waiting."""
    program = first
    while program < last:
        program += tl.atomic_cas(flags_ptr + program, 1, 0, sem="acquire")
    return program


@triton.jit
def write(
    acc, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
    PIECES: tl.constexpr, STORE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Run the epilogue and write a tile, one piece of its columns after another."""
    if PIECES > 1:
        left, right = halves(acc)
        write(
            left, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
            PIECES // 2, STORE, STEPS,
        )  # fmt: skip
        write(
            right, c_desc, c_ptr, operands, batch, row, col + left.shape[1], M, N, stride_cb, stride_cm, stride_cn,
            PIECES // 2, STORE, STEPS,
        )  # fmt: skip
    else:
        store_part(
            acc, c_desc, c_ptr, operands, batch, row, col, batch, M, N, 0, stride_cb, stride_cm, stride_cn,
            STORE, STEPS,
        )  # fmt: skip


@triton.jit
def matmul_stream_k(
    a_desc, b_desc, c_desc, c_ptr, operands, parts_ptr, flags_ptr, BATCH, M, N, K, stream_tiles,
    stride_cb, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILE: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr,
    STORE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
    INLINE: tl.constexpr,
):  # fmt: skip
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N * (2 if PAIRED else 1)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    k_tiles = tl.cdiv(K, BLOCK_K)
    steps = stream_tiles * k_tiles
    begin = share_start(program, steps, programs)
    end = share_start(program + 1, steps, programs)
    newest = (end - 1) // k_tiles
    shared = tl.where(begin < end, newest - begin // k_tiles + 1, 0)
    whole = (BATCH * tiles - stream_tiles) // programs
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    right = acc
    item, tile, batch, row, col = -1, 0, 0, 0, 0
    at, first_step, last_step = -1, 0, -1
    # one loop over all tiles keeps the copies going from a tile to the next
    for _ in range(end - begin + whole * k_tiles):
        at += 1
        if at > last_step:
            item += 1
            tile, at, last_step = piece_of(item, shared, newest, begin, end, k_tiles, stream_tiles)
            first_step = at
            batch = tile // tiles
            tile_m, tile_n = tile_of(tile % tiles, tiles_m, tiles_n, GROUP_M)
            row = tile_m * BLOCK_M
            col = tile_n * BLOCK_N
        k = at * BLOCK_K
        if A_ROW:
            x = load_tile(a_desc, batch, row, k, BLOCK_M, BLOCK_K, A_BATCHED)
        else:
            x = load_tile(a_desc, batch, k, row, BLOCK_K, BLOCK_M, A_BATCHED).T
        if B_ROW:
            y = load_tile(b_desc, batch, k, col, BLOCK_K, BLOCK_N, B_BATCHED)
        else:
            y = load_tile(b_desc, batch, col, k, BLOCK_N, BLOCK_K, B_BATCHED).T
        acc = product(x, y, acc, PRECISION)
        if PAIRED:
            # N counts the result's columns: the other half of the gated product begins there
            if B_ROW:
                z = load_tile(b_desc, batch, k, N + col, BLOCK_K, BLOCK_N, B_BATCHED)
            else:
                z = load_tile(b_desc, batch, N + col, k, BLOCK_N, BLOCK_K, B_BATCHED).T
            right = product(x, z, right, PRECISION)
        if at == last_step:
            if at < k_tiles - 1:
                leave(acc, right, parts_ptr + program * SLOT, flags_ptr + program, PAIRED, INLINE)
            else:
                if first_step > 0:
                    first = program_of(tile * k_tiles, steps, programs)
                    helpers = program - first
                    first = wait(flags_ptr, first, program) - helpers
                    acc = add_parts(acc, parts_ptr, first, program, SLOT, INLINE)
                    if PAIRED:
                        right = add_parts(right, parts_ptr + BLOCK_M * BLOCK_N, first, program, SLOT, INLINE)
                if PAIRED:
                    store_pair(
                        acc, right, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
                        STORE, STEPS,
                    )  # fmt: skip
                else:
                    write(
                        acc, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
                        SUBTILE, STORE, STEPS,
                    )  # fmt: skip
            acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
            if PAIRED:
                right = tl.zeros((BLOCK_M, BLOCK_N), SUM)


def streamed_tiles(tiles, programs, waves):
    """How many tiles are shared out: the last, unfilled wave, and waves - 1 full ones before it."""
    return min(tiles, tiles % programs + (waves - 1) * programs)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out: a [M, K], b [K, N], or both with a batch before."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape[-2:], out.shape[-1]
    if out.numel() == 0:
        return []
    paired = is_paired(epilogue)
    block_m, block_n, block_k, subtile = (knobs[x] for x in ("block_m", "block_n", "block_k", "subtile"))
    # the tensor cores take 16-bit operands in either order, others only along K
    wide = a.element_size() != 2
    a_row, a_desc, a_batched, a_launches = operand(a, (block_m, block_k), knobs["repack"], wide and a.stride(-1) != 1)
    b_row, b_desc, b_batched, b_launches = operand(b, (block_k, block_n), knobs["repack"], wide and b.stride(-1) == 1)
    # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
    whole = out.shape[-1] * out.element_size() % 16 == 0
    store = "tma" if out.dim() == 2 and out.stride(1) == 1 and whole and not unaligned(out) else "pointer"
    c_block = [block_m, block_n // (1 if paired else subtile)]
    c_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), c_block) if store == "tma" else None
    batch = out.shape[0] if out.dim() == 3 else 1
    tiles = batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    programs = min(tiles * triton.cdiv(k, block_k), multiprocessors(a) * knobs["blocks_per_sm"])
    total = tl.int32 if a.dtype == torch.int8 else tl.float32
    parts = torch.empty(
        (programs, 2 if paired else 1, block_m, block_n),
        dtype=torch.int32 if total is tl.int32 else torch.float32,
        device=a.device,
    )
    flags = torch.zeros(programs, dtype=torch.int32, device=a.device)
    steps, operands = chain_of(inputs, epilogue)
    args = (
        a_desc, b_desc, c_desc, out, operands, parts, flags, batch, m, n, k,
        streamed_tiles(tiles, programs, knobs["stream_waves"]), *strides3(out),
        block_m, block_n, block_k, knobs["group_m"], subtile, a_row, b_row, a_batched, b_batched, store,
        dot_precision(knobs["precision"], a), total, paired, steps, not triton.knobs.runtime.interpret,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    if knobs["blocks_per_sm"] > 1:
        # all programs must be on the device at once, whatever the compiler would like
        options["maxnreg"] = 65536 // (32 * knobs["num_warps"] * knobs["blocks_per_sm"])
    return [*a_launches, *b_launches, (matmul_stream_k, (programs,), args, options)]
