"""Matmul by the bulk tensor copy engine (TMA): one program a multiprocessor walks over the output tiles."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, strides3, tile_of
from kernelwright.kernels.matmul.pack_kernel import packed, packed_transposed
from kernelwright.kernels.matmul.product_kernel import dot_precision, product
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer, reduce_launch, zeros_launch


@triton.jit
def load_tile(desc, batch, outer, inner, ROWS: tl.constexpr, COLS: tl.constexpr, BATCHED: tl.constexpr):
    """The tile [ROWS, COLS] at (outer, inner) of a descriptor of a matrix, or of matrix `batch` of several."""
    if BATCHED:
        tile = desc.load([batch, outer, inner]).reshape(ROWS, COLS)
    else:
        tile = desc.load([outer, inner])
    return tile


@triton.jit
def store_part(
    acc, c_desc, c_ptr, operands, batch, row, col, split, M, N, stride_cs, stride_cb, stride_cm, stride_cn,
    STORE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write one tile at (row, col): "tma" and "pointer" after the epilogue; "partial" as it is, beside other parts;
    "add" and "add_tma" onto the other parts."""
    cols = col + tl.arange(0, acc.shape[1])
    rows = row + tl.arange(0, acc.shape[0])
    if STORE == "tma" or STORE == "pointer":
        acc = finish(acc.to(tl.float32), operands, batch, rows, cols, M, N, STEPS)
    if STORE == "tma":
        c_desc.store([row, col], acc.to(c_desc.dtype))
    elif STORE == "add_tma":
        c_desc.atomic_add([row, col], acc)
    else:
        c = c_ptr + split.to(tl.int64) * stride_cs + batch.to(tl.int64) * stride_cb
        c += rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        if STORE == "add":
            tl.atomic_add(c, acc, mask=inside, sem="relaxed")
        else:
            tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_pair(
    left, right, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
    STORE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write the tile at (row, col) that a gated unit makes of two."""
    cols = col + tl.arange(0, left.shape[1])
    rows = row + tl.arange(0, left.shape[0])
    acc = finish_pair(left.to(tl.float32), right.to(tl.float32), operands, batch, rows, cols, M, N, STEPS)
    if STORE == "tma":
        c_desc.store([row, col], acc.to(c_desc.dtype))
    else:
        c = c_ptr + batch.to(tl.int64) * stride_cb
        c += rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def matmul_persistent_tma(
    a_desc, b_desc, c_desc, c_ptr, operands, BATCH, M, N, K, stride_cs, stride_cb, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SUBTILE: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr,
    A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    SUM: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    k_tiles = tl.cdiv(K, BLOCK_K * SPLIT_K)
    for item in tl.range(tl.program_id(0), BATCH * tiles * SPLIT_K, tl.num_programs(0), flatten=True):
        batch = item // (tiles * SPLIT_K)
        split = item // tiles % SPLIT_K
        tile_m, tile_n = tile_of(item % tiles, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        if PAIRED:
            right = tl.zeros((BLOCK_M, BLOCK_N), SUM)
        for step in range(k_tiles):
            k = (split * k_tiles + step) * BLOCK_K
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
        if PAIRED:
            store_pair(
                acc, right, c_desc, c_ptr, operands, batch, row, col, M, N, stride_cb, stride_cm, stride_cn,
                STORE, STEPS,
            )  # fmt: skip
        elif SUBTILE == 1:
            store_part(
                acc, c_desc, c_ptr, operands, batch, row, col, split, M, N, stride_cs, stride_cb, stride_cm, stride_cn,
                STORE, STEPS,
            )  # fmt: skip
        else:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            store_part(
                first, c_desc, c_ptr, operands, batch, row, col, split, M, N,
                stride_cs, stride_cb, stride_cm, stride_cn, STORE, STEPS,
            )  # fmt: skip
            store_part(
                second, c_desc, c_ptr, operands, batch, row, col + BLOCK_N // 2, split, M, N,
                stride_cs, stride_cb, stride_cm, stride_cn, STORE, STEPS,
            )  # fmt: skip


def unaligned(tensor):
    """Whether TMA cannot read a tensor with unit stride in its last dimension as it lies."""
    size = tensor.element_size()
    return any(stride * size % 16 for stride in tensor.stride()[:-1]) or tensor.data_ptr() % 16 != 0


def descriptor(tensor, block):
    """A TMA descriptor of a matrix or a batch of them; a batch that repeats one matrix is that matrix."""
    if tensor.dim() == 3 and tensor.stride(0) == 0:
        tensor = tensor[0]
    block = [1, *block] if tensor.dim() == 3 else list(block)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block), tensor.dim() == 3


def operand(tensor, block, repack, turned):
    """(is row-major, descriptor, is batched, launches) of a [rows, columns] tensor, or a batch of them.

    repack: copy it to an aligned buffer first where TMA needs that; and, when `turned`, to the other order.
    """
    launches = []
    row_major = tensor.stride(-1) == 1
    if not row_major:
        tensor, block = tensor.mT, block[::-1]
    if repack and turned:
        tensor, launch = packed_transposed(tensor)
        launches.append(launch)
        row_major, block = not row_major, block[::-1]
    elif repack and unaligned(tensor):
        tensor, launch = packed(tensor)
        launches.append(launch)
    return row_major, *descriptor(tensor, block), launches


def multiprocessors(tensor):
    """How many programs fill the GPU that holds the tensor; 1 where there is none."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def destination(a, b, out, knobs):
    """(tensor that tiles go to, its four strides, how they get there, whether it must be zero first)."""
    split_k = knobs["split_k"]
    if split_k == 1:
        # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
        whole = out.shape[-1] * out.element_size() % 16 == 0
        by_tma = out.dim() == 2 and out.stride(1) == 1 and whole and not unaligned(out)
        return out, (0, *strides3(out)), "tma" if by_tma else "pointer", False
    if knobs["combine"] == "parts":
        target = partial_buffer(a, b, split_k)
        return target, target.stride(), "partial", False
    target = partial_buffer(a, b, 1)
    by_tma = out.dim() == 2 and not unaligned(target[0, 0]) and not triton.knobs.runtime.interpret
    return target, (0, *target.stride()[1:]), "add_tma" if by_tma else "add", True


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out: a [M, K], b [K, N], or both with a batch before."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape[-2:], out.shape[-1]
    if out.numel() == 0:
        return []
    paired = is_paired(epilogue)
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    # the tensor cores take 16-bit operands in either order, others only along K
    wide = a.element_size() != 2
    a_row, a_desc, a_batched, a_launches = operand(a, (block_m, block_k), knobs["repack"], wide and a.stride(-1) != 1)
    b_row, b_desc, b_batched, b_launches = operand(b, (block_k, block_n), knobs["repack"], wide and b.stride(-1) == 1)
    target, c_strides, store, added = destination(a, b, out, knobs)
    c_block = [block_m, block_n // knobs["subtile"]]
    by_tma = store in ("tma", "add_tma")
    matrix = target if split_k == 1 else target[0, 0]
    c_desc = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), c_block) if by_tma else None
    batch = out.shape[0] if out.dim() == 3 else 1
    items = batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * split_k
    steps, operands = chain_of(inputs, epilogue) if split_k == 1 else ("", ())
    args = (
        a_desc, b_desc, c_desc, target, operands, batch, m, n, k, *c_strides,
        block_m, block_n, block_k, knobs["group_m"], split_k, knobs["subtile"], a_row, b_row, a_batched, b_batched,
        store, dot_precision(knobs["precision"], a), tl.int32 if a.dtype == torch.int8 else tl.float32, paired, steps,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    programs = min(items, multiprocessors(a) * knobs["blocks_per_sm"])
    main = (matmul_persistent_tma, (programs,), args, options)
    tail = [reduce_launch(target, out, inputs, epilogue)] if split_k > 1 else []
    return [*a_launches, *b_launches, *([zeros_launch(target)] if added else []), main, *tail]
