"""Matmul by the bulk tensor copy engine (TMA): one program a multiprocessor walks over the output tiles."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import finish, tile_of
from kernelwright.kernels.matmul.pack_kernel import packed
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer, reduce_launch


@triton.jit
def store_part(
    acc, c_desc, c_ptr, bias_ptr, row, col, split, M, N, stride_cs, stride_cm, stride_cn,
    STORE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write one fp32 tile at (row, col): "tma" and "pointer" after the epilogue, "partial" as it is."""
    cols = col + tl.arange(0, acc.shape[1])
    if STORE != "partial":
        acc = finish(acc, bias_ptr, cols, N, HAS_BIAS, ACTIVATION)
    if STORE == "tma":
        c_desc.store([row, col], acc.to(c_desc.dtype))
    else:
        rows = (row + tl.arange(0, acc.shape[0])).to(tl.int64)
        c = c_ptr + split * stride_cs + rows[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def matmul_persistent_tma(
    a_desc, b_desc, c_desc, c_ptr, bias_ptr, M, N, K, stride_cs, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, SUBTILE: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    k_tiles = tl.cdiv(K, BLOCK_K * SPLIT_K)
    for item in tl.range(tl.program_id(0), tiles * SPLIT_K, tl.num_programs(0), flatten=True):
        split = item // tiles
        tile_m, tile_n = tile_of(item % tiles, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(k_tiles):
            k = (split * k_tiles + step) * BLOCK_K
            if A_ROW:
                x = a_desc.load([row, k])
            else:
                x = a_desc.load([k, row]).T
            if B_ROW:
                y = b_desc.load([k, col])
            else:
                y = b_desc.load([col, k]).T
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        if SUBTILE == 1:
            store_part(
                acc, c_desc, c_ptr, bias_ptr, row, col, split.to(tl.int64), M, N, stride_cs, stride_cm, stride_cn,
                STORE, HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        else:
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            store_part(
                left, c_desc, c_ptr, bias_ptr, row, col, split.to(tl.int64), M, N, stride_cs, stride_cm, stride_cn,
                STORE, HAS_BIAS, ACTIVATION,
            )  # fmt: skip
            store_part(
                right, c_desc, c_ptr, bias_ptr, row, col + BLOCK_N // 2, split.to(tl.int64), M, N,
                stride_cs, stride_cm, stride_cn, STORE, HAS_BIAS, ACTIVATION,
            )  # fmt: skip


def operand(tensor, block, repack):
    """(is row-major, descriptor, launches): the tensor for TMA, copied to an aligned buffer first when `repack`."""
    launches = []
    row_major = tensor.stride(1) == 1
    if not row_major:
        tensor, block = tensor.T, block[::-1]
    if repack and (tensor.stride(0) * tensor.element_size() % 16 or tensor.data_ptr() % 16):
        tensor, launch = packed(tensor)
        launches.append(launch)
    return row_major, TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block)), launches


def multiprocessors(tensor):
    """How many programs fill the GPU that holds the tensor; 1 where there is none."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N], bias [N] when epilogue has "bias"."""
    a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return []
    activation = epilogue[-1] if epilogue and epilogue[-1] != "bias" else ""
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    a_row, a_desc, a_launches = operand(a, (block_m, block_k), knobs["repack"])
    b_row, b_desc, b_launches = operand(b, (block_k, block_n), knobs["repack"])
    target = out if split_k == 1 else partial_buffer(out, split_k)
    by_tma = split_k == 1 and out.stride(1) == 1 and out.stride(0) * out.element_size() % 16 == 0
    store = "partial" if split_k > 1 else "tma" if by_tma else "pointer"
    c_block = [block_m, block_n // knobs["subtile"]]
    c_desc = TensorDescriptor(out, list(out.shape), list(out.stride()), c_block) if store == "tma" else None
    c_strides = (0, *out.stride()) if split_k == 1 else target.stride()
    items = triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * split_k
    per_sm = knobs["blocks_per_sm"]
    args = (
        a_desc, b_desc, c_desc, target, bias, m, n, k, *c_strides,
        block_m, block_n, block_k, knobs["group_m"], split_k, knobs["subtile"], a_row, b_row, store,
        knobs["precision"] if knobs["precision"] in ("tf32", "ieee") else None, bias is not None, activation,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    main = (matmul_persistent_tma, (min(items, multiprocessors(a) * per_sm),), args, options)
    tail = [reduce_launch(target, bias, out, split_k, activation)] if split_k > 1 else []
    return [*a_launches, *b_launches, main, *tail]
