"""Matmul by the bulk tensor copy engine (TMA), a program for each output tile: for small products, where a persistent
program's bookkeeping takes longer than what it saves."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, tile_of
from kernelwright.kernels.matmul.persistent_tma_kernel import operand, unaligned
from kernelwright.kernels.matmul.product_kernel import dot_precision, product
from kernelwright.kernels.matmul.short_epilogue_kernel import short_finish


@triton.jit
def matmul_tile_tma(
    a_desc, b_desc, c_desc, c_ptr, operands, M, N, K, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,
    SHORT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """SHORT: run the epilogue in fewer instructions, which the interpreter cannot."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        if A_ROW:
            x = a_desc.load([row, k])
        else:
            x = a_desc.load([k, row]).T
        if B_ROW:
            y = b_desc.load([k, col])
        else:
            y = b_desc.load([col, k]).T
        acc = product(x, y, acc, PRECISION)
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    result = acc.to(tl.float32)
    if SHORT:
        result = short_finish(result, operands, 0, rows, cols, M, N, STEPS)
    else:
        result = finish(result, operands, 0, rows, cols, M, N, STEPS)
    if STORE == "tma":
        c_desc.store([row, col], result.to(c_desc.dtype))
    else:
        places = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
        tl.store(places, result.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out: a [M, K], b [K, N]."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k = (knobs[name] for name in ("block_m", "block_n", "block_k"))
    # the tensor cores take 16-bit operands in either order, others only along K
    wide = a.element_size() != 2
    a_row, a_desc, _, a_launches = operand(a, (block_m, block_k), knobs["repack"], wide and a.stride(1) != 1)
    b_row, b_desc, _, b_launches = operand(b, (block_k, block_n), knobs["repack"], wide and b.stride(1) == 1)
    # TMA writes whole pieces of 16 bytes: at the end of a row that is no such multiple it would run over
    whole = n * out.element_size() % 16 == 0
    store = "tma" if out.stride(1) == 1 and whole and not unaligned(out) else "pointer"
    c_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), [block_m, block_n]) if store == "tma" else None
    steps, operands = chain_of(inputs, epilogue)
    args = (
        a_desc, b_desc, c_desc, out, operands, m, n, k, *out.stride(), block_m, block_n, block_k, knobs["group_m"],
        a_row, b_row, store, dot_precision(knobs["precision"], a), tl.float32,
        not triton.knobs.runtime.interpret, steps,
    )  # fmt: skip
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [*a_launches, *b_launches, (matmul_tile_tma, grid, args, options)]
