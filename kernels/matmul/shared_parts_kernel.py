"""What programs that share tiles out have to do with each other: who computes what, parts of tiles that one leaves and
another fetches, and the way of a finished tile out (Hopper, for `stream_k_warp_specialized_kernel`)."""

import triton
import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import operation_of, step_at, step_count, where_of
from kernelwright.kernels.matmul.short_epilogue_kernel import short_finish
from kernelwright.kernels.matmul.warp_specialized_kernel import ws_halves, ws_store


@gluon.jit
def sk_share(
    M, N, k_steps, stream_tiles, share, longer,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STREAM: gl.constexpr,
):  # fmt: skip
    """This program's work: (first and last + 1 of its steps of those that are shared out, their newest tile, tiles they
    touch, all tiles it has to do with). A share is `share` steps, one more for the first `longer` programs."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = 0
    end = 0
    newest = 0
    shared = 0
    if STREAM:
        begin = sk_start(program, share, longer)
        end = sk_start(program + 1, share, longer)
        if begin < end:
            newest = (end - 1) // k_steps
            shared = newest - begin // k_steps + 1
    whole = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) - stream_tiles - program
    return begin, end, newest, shared, shared + (whole + programs - 1) // programs


@gluon.jit
def sk_start(program, share, longer):
    """First step of a program's share."""
    return program * share + gl.minimum(program, longer)


@gluon.jit
def sk_program_of(step, share, longer):
    """The program in whose share a step lies."""
    before = longer * (share + 1)
    program = step // (share + 1)
    if step >= before:
        program = longer + (step - before) // gl.maximum(share, 1)
    return program


@gluon.jit
def sk_piece(item, shared, newest, begin, end, k_steps, stream_tiles, STREAM: gl.constexpr):
    """(tile, first and last step along K) of a program's item: its share from behind, then whole tiles."""
    tile = stream_tiles + gl.program_id(0) + (item - shared) * gl.num_programs(0)
    first = 0
    last = k_steps - 1
    if STREAM:
        is_shared = item < shared
        if is_shared:
            tile = newest - item
            first = gl.maximum(begin - tile * k_steps, 0)
            last = gl.minimum(end - tile * k_steps, k_steps) - 1
    return tile, first, last


@gluon.jit
def sk_places(x, column, COLUMNS: gl.constexpr):
    """Offsets in the workspace of a part's numbers x, columns `column` and on of COLUMNS: blocks of 8 x 8, of which
    each thread of a warp holds two neighbours, lie one after the other."""
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    cols = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]
    return ((rows // 8) * (COLUMNS // 8) + cols // 8) * 64 + (rows % 8) * 8 + cols % 8


@gluon.jit
def sk_wait(flags, first, program, which):
    """Wait for the parts of programs first to program - 1, and take their flags down for the next launch; returns
    `program`, by way of the flags, so that what needs it comes after the waiting."""
    helper = first
    while helper < program:
        helper += gl.atomic_cas(flags + 2 * helper + which, 1, 0, sem="acquire")
    return helper


@gluon.jit
def sk_prefetch_lines(places):
    """Ask for lines of memory to be brought to the second-level cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def sk_prefetch(
    operands, row, col, M, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LINE: gl.constexpr, STEPS: gl.constexpr
):
    """Ask for what the epilogue of the tile [ROWS, COLUMNS] at (row, col) will read, as long as products are made.
    LINE: elements of 128 bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    # one of each line suffices; what lies beyond the end is asked for at the end
    rows = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), M - 1).to(gl.int64)[:, None]
    lines = gl.arange(0, COLUMNS // LINE, gl.SliceLayout(0, layout)) * LINE
    cols = gl.minimum(col + lines, N - 1).to(gl.int64)[None, :]
    for i in gl.static_range(step_count(STEPS)):
        if operation_of(step_at(STEPS, i)) != "":
            if where_of(step_at(STEPS, i)) == "n":
                sk_prefetch_lines(operands[i][0] + cols * operands[i][3])
            elif where_of(step_at(STEPS, i)) == "m":
                sk_prefetch_lines(operands[i][0] + rows * operands[i][2])
            elif where_of(step_at(STEPS, i)) == "mn":
                sk_prefetch_lines(operands[i][0] + rows * operands[i][2] + cols * operands[i][3])


@gluon.jit
def sk_add_parts(x, parts, first, program, column, SLOT: gl.constexpr, COLUMNS: gl.constexpr):
    """x, columns `column` and on of a piece of COLUMNS columns, and what programs first to program - 1 have left."""
    places = sk_places(x, column, COLUMNS)
    for helper in range(first, program):
        x += gl.load(parts + helper * SLOT + places, cache_modifier=".cg")
    return x


@gluon.jit
def sk_finish_part(
    x, c, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn, STORE: gl.constexpr, STEPS: gl.constexpr
):
    """Run the epilogue and store the tile at (row, col)."""
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    cols = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    x = short_finish(x, operands, 0, rows, cols, M, N, STEPS)
    ws_store(x, c, c_ring, out, row, col, M, N, stride_cm, stride_cn, STORE)


@gluon.jit
def sk_finish(
    x, count, c, c_ring, out, operands, parts, first, program, row, col, M, N, stride_cm, stride_cn,
    SLOT: gl.constexpr, COLUMNS: gl.constexpr, PARTS: gl.constexpr, STREAM: gl.constexpr, STORE: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """Add to a piece of COLUMNS columns what programs first to program - 1 have left, and finish the first `count` of
    its PARTS parts. They run through the same instructions, which take longer to come from memory than to execute
    where a program has one tile."""
    WIDTH: gl.constexpr = COLUMNS // PARTS
    if PARTS <= 2:
        if STREAM:
            x = sk_add_parts(x, parts, first, program, 0, SLOT, COLUMNS)
        if PARTS == 1:
            sk_finish_part(x, c, c_ring, out, operands, row, col, M, N, stride_cm, stride_cn, STORE, STEPS)
        else:
            part, other = ws_halves(x)
            for i in range(count):
                sk_finish_part(
                    part, c, c_ring, out, operands, row, col + i * WIDTH, M, N, stride_cm, stride_cn, STORE, STEPS
                )  # fmt: skip
                part = other
    else:
        left, right = ws_halves(x)
        if STREAM:
            # half of the piece at once: as many loads are under way as there are registers for
            left = sk_add_parts(left, parts, first, program, 0, SLOT, COLUMNS)
            right = sk_add_parts(right, parts, first, program, COLUMNS // 2, SLOT, COLUMNS)
        part, second = ws_halves(left)
        third, fourth = ws_halves(right)
        for i in range(count):
            sk_finish_part(
                part, c, c_ring, out, operands, row, col + i * WIDTH, M, N, stride_cm, stride_cn, STORE, STEPS
            )  # fmt: skip
            part, second, third = second, third, fourth


def sharing_programs(tiles, k_steps, most):
    """How many programs, of at most `most`, share out the steps of tiles that are fewer than these: no more than are
    needed for the longest share to be as short as it can be, so that shares tend to begin and end with tiles."""
    if tiles >= most:
        return most
    return triton.cdiv(tiles * k_steps, triton.cdiv(tiles * k_steps, most))


def result_descriptor(out, rows, columns):
    """A descriptor of out [M, N] for boxes of `rows` rows of up to `columns` columns, at most 128 bytes of each."""
    line = min(columns * out.element_size(), 128)
    layout = gl.NVMMASharedLayout(line, 8 * out.element_size(), 2)
    return GluonDescriptor(out, list(out.shape), list(out.stride()), [rows, line // out.element_size()], layout)
