"""Matmul by plain pointers: any strides, any sizes, any GPU."""

import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import finish, tile_of
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer, reduce_launch


@triton.jit
def matmul_pointer(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cs, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    split = tl.program_id(1)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = split * BLOCK_K + tl.arange(0, BLOCK_K)
    if WIDE:
        rows, cols, ks = rows.to(tl.int64), cols.to(tl.int64), ks.to(tl.int64)
    a = a_ptr + rows[:, None] * stride_am + ks[None, :] * stride_ak
    b = b_ptr + ks[:, None] * stride_bk + cols[None, :] * stride_bn
    row_mask = rows[:, None] < M
    col_mask = cols[None, :] < N
    step = BLOCK_K * SPLIT_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(split * BLOCK_K, K, step):
        if EVEN_K:
            x = tl.load(a, mask=row_mask, other=0.0)
            y = tl.load(b, mask=col_mask, other=0.0)
        else:
            left = K - k
            x = tl.load(a, mask=row_mask & (tl.arange(0, BLOCK_K)[None, :] < left), other=0.0)
            y = tl.load(b, mask=col_mask & (tl.arange(0, BLOCK_K)[:, None] < left), other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
        a += step * stride_ak
        b += step * stride_bk
    if SPLIT_K == 1:
        acc = finish(acc, bias_ptr, cols, N, HAS_BIAS, ACTIVATION)
    else:
        c_ptr += split.to(tl.int64) * stride_cs
    c = c_ptr + rows[:, None] * stride_cm + cols[None, :] * stride_cn
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=row_mask & col_mask)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N], bias [N] when epilogue has "bias"."""
    a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return []
    activation = epilogue[-1] if epilogue and epilogue[-1] != "bias" else ""
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    target = out if split_k == 1 else partial_buffer(out, split_k)
    split_stride, stride_m, stride_n = (0, *out.stride()) if split_k == 1 else target.stride()
    wide = max(_reach(t) for t in (a, b, out)) + block_k * split_k * max(*a.stride(), *b.stride()) >= 2**31
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), split_k)
    args = (
        a, b, bias, target, m, n, k, *a.stride(), *b.stride(), split_stride, stride_m, stride_n,
        block_m, block_n, block_k, knobs["group_m"], split_k, k % (block_k * split_k) == 0, wide or m * n >= 2**31,
        knobs["precision"] if knobs["precision"] in ("tf32", "ieee") else None, bias is not None, activation,
    )  # fmt: skip
    launch = (matmul_pointer, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})
    return [launch] if split_k == 1 else [launch, reduce_launch(target, bias, out, split_k, activation)]


def _reach(tensor):
    """The largest offset from the base that an element of the tensor has, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)
