"""Matmul for few rows: operands swapped, so that b (the weight) stands on the tensor cores' wide side, with split-K.

The tile product is b_tile^T [BLOCK_N, BLOCK_K] @ a_tile^T [BLOCK_K, BLOCK_M]. With split-K every program leaves its
part in a workspace, and the last to arrive at a tile sums the parts in a fixed order: one launch, and always the same
bits.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import activate
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer


@triton.jit
def matmul_skinny(
    a_desc, b_desc, bias_ptr, c_ptr, partial_ptr, arrived_ptr, M, N, K, stride_ps, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    B_ROW: tl.constexpr, PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K * SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(steps):
        k = (split * steps + step) * BLOCK_K
        if B_ROW:
            w = b_desc.load([k, tile_n * BLOCK_N]).T
        else:
            w = b_desc.load([tile_n * BLOCK_N, k])
        x = a_desc.load([tile_m * BLOCK_M, k])
        acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (cols[:, None] < N) & (rows[None, :] < M)
    is_last = True
    if SPLIT_K > 1:
        places = partial_ptr + rows.to(tl.int64)[None, :] * N + cols[:, None]
        tl.store(places + split.to(tl.int64) * stride_ps, acc, mask=inside)
        # every thread's stores must be done before this program counts as arrived
        tl.debug_barrier()
        arrived = arrived_ptr + tile_m * tl.num_programs(0) + tile_n
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for _ in range(SPLIT_K):
                acc += tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
                places += stride_ps
            # the counter goes back to zero for the next launch
            tl.atomic_xchg(arrived, 0, sem="relaxed")
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[:, None]
        acc = activate(acc, ACTIVATION)
        c = c_ptr + rows.to(tl.int64)[None, :] * stride_cm + cols.to(tl.int64)[:, None] * stride_cn
        tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out. inputs: a [M, K], b [K, N], bias [N] when epilogue has "bias"."""
    a, b, bias = inputs["a"], inputs["b"], inputs.get("bias")
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return []
    activation = epilogue[-1] if epilogue and epilogue[-1] != "bias" else ""
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    b_row = b.stride(1) == 1
    weight, b_block = (b, [block_k, block_n]) if b_row else (b.T, [block_n, block_k])
    grid = (triton.cdiv(n, block_n), triton.cdiv(m, block_m), split_k)
    partial, arrived = None, None
    if split_k > 1:
        partial = partial_buffer(out, split_k)
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=out.device)
    args = (
        TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k]),
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), b_block),
        bias, out, partial, arrived, m, n, k, m * n, *out.stride(), block_m, block_n, block_k, split_k,
        b_row, knobs["precision"] if knobs["precision"] in ("tf32", "ieee") else None, bias is not None, activation,
    )  # fmt: skip
    return [(matmul_skinny, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]
