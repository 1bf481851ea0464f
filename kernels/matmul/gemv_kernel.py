"""Products with few rows or few columns by plain multiply-adds: blocks of outputs summed along K without tensor cores.

The long side of the product (columns of b, or rows of a) is called outputs, the short side vectors. Sums stay apart in
each thread until the end of K. With split-K every program leaves its part in a workspace, and the last to arrive at a
block adds the parts in a fixed order: one launch, and always the same bits.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, strides3
from kernelwright.kernels.matmul.pointer_kernel import reach


@triton.jit
def sum_in_order(places, inside, stride_ps, SPLIT_K: tl.constexpr, SUM: tl.constexpr):
    """The sum of all parts at `places`."""
    acc = tl.zeros(places.shape, SUM)
    for _ in range(SPLIT_K):
        acc += tl.load(places, mask=inside, other=0, cache_modifier=".cg")
        places += stride_ps
    return acc


@triton.jit
def matmul_gemv(
    w_ptr, v_ptr, c_ptr, operands, partial_ptr, arrived_ptr, OUTPUTS, VECTORS, K, M, N,
    stride_wb, stride_wo, stride_wk, stride_vb, stride_vv, stride_vk, stride_cb, stride_cm, stride_cn,
    stride_ps, stride_pb, stride_pr, second_w, second_v,
    BLOCK_O: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, VECTORS_ARE_ROWS: tl.constexpr,
    SUM: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(OUTPUTS, BLOCK_O)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    outputs = tl.program_id(0) % blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    vectors = tl.arange(0, BLOCK_V)
    begin = split * (tl.cdiv(K, BLOCK_K * SPLIT_K) * BLOCK_K)
    end = tl.minimum(begin + tl.cdiv(K, BLOCK_K * SPLIT_K) * BLOCK_K, K)
    # tiles are [vectors, outputs, K]: one place in the dimensions that an operand lacks
    o, v, k = outputs[None, :, None], vectors[:, None, None], begin + tl.arange(0, BLOCK_K)[None, None, :]
    o_mask, v_mask = o < OUTPUTS, v < VECTORS
    if WIDE:
        o, k = o.to(tl.int64), k.to(tl.int64)
    w = w_ptr + batch * stride_wb + o * stride_wo + k * stride_wk
    x = v_ptr + batch * stride_vb + v * stride_vv + k * stride_vk
    acc = tl.zeros((BLOCK_V, BLOCK_O, BLOCK_K), SUM)
    right = acc
    for at in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        w_mask, x_mask = o_mask, v_mask
        if not EVEN_K:
            left = tl.arange(0, BLOCK_K)[None, None, :] < end - at
            w_mask, x_mask = o_mask & left, v_mask & left
        weight = tl.load(w, mask=w_mask, other=0.0).to(SUM)
        vector = tl.load(x, mask=x_mask, other=0.0).to(SUM)
        acc += weight * vector
        if PAIRED:
            # the right half of a gated product: further columns of b, which are the weights or the vectors
            if VECTORS_ARE_ROWS:
                weight = tl.load(w + second_w, mask=w_mask, other=0.0).to(SUM)
            else:
                vector = tl.load(x + second_v, mask=x_mask, other=0.0).to(SUM)
            right += weight * vector
        w += BLOCK_K * stride_wk
        x += BLOCK_K * stride_vk
    total = tl.sum(acc, 2)
    second = total
    if PAIRED:
        second = tl.sum(right, 2)
    is_last = True
    if SPLIT_K > 1:
        inside = (vectors[:, None] < VECTORS) & (outputs[None, :] < OUTPUTS)
        places = partial_ptr + batch * stride_pb + vectors.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
        mine = places + split.to(tl.int64) * stride_ps
        tl.store(mine, total, mask=inside)
        if PAIRED:
            tl.store(mine + stride_pr, second, mask=inside)
        # every thread's stores must be done before this program counts as arrived
        tl.debug_barrier()
        arrived = arrived_ptr + tl.program_id(0)
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT_K - 1
        if is_last:
            total = sum_in_order(places, inside, stride_ps, SPLIT_K, SUM)
            if PAIRED:
                second = sum_in_order(places + stride_pr, inside, stride_ps, SPLIT_K, SUM)
            # the counter goes back to zero for the next launch
            tl.atomic_xchg(arrived, 0, sem="relaxed")
    if is_last:
        if VECTORS_ARE_ROWS:
            rows, cols, first, other = vectors, outputs, total.to(tl.float32), second.to(tl.float32)
        else:
            rows, cols, first, other = outputs, vectors, total.to(tl.float32).T, second.to(tl.float32).T
        if PAIRED:
            result = finish_pair(first, other, operands, batch, rows, cols, M, N, STEPS)
        else:
            result = finish(first, operands, batch, rows, cols, M, N, STEPS)
        c = c_ptr + batch * stride_cb + rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
        tl.store(c, result.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def workspace(out, sum_dtype, split_k, halves, blocks):
    """(partial sums, arrival counters, strides of a part, a matrix and a half) for outputs summed in several parts."""
    if split_k == 1:
        return None, None, 0, 0, 0
    batch, length = out.shape[0] if out.dim() == 3 else 1, out.shape[-2] * out.shape[-1]
    partial = torch.empty(split_k * batch * halves * length, dtype=sum_dtype, device=out.device)
    arrived = torch.zeros(batch * blocks, dtype=torch.int32, device=out.device)
    return partial, arrived, batch * halves * length, halves * length, length


def plan(inputs, out, knobs, epilogue):
    """The launch that writes epilogue(a @ b) to out: a [M, K], b [K, N], or both with a batch before."""
    a, b = inputs["a"], inputs["b"]
    (m, k), n = a.shape[-2:], out.shape[-1]
    if out.numel() == 0:
        return []
    by_rows, paired = m <= n, is_paired(epilogue)
    block_o, block_v = (knobs["block_n"], knobs["block_m"]) if by_rows else (knobs["block_m"], knobs["block_n"])
    weights, vectors = (b.mT, a) if by_rows else (a, b.mT)
    block_k, split_k = knobs["block_k"], knobs["split_k"]
    outputs = max(m, n)
    blocks, batch = triton.cdiv(outputs, block_o), out.shape[0] if out.dim() == 3 else 1
    whole = a.dtype == torch.int8
    parts = workspace(out, torch.int32 if whole else torch.float32, split_k, 2 if paired else 1, blocks)
    steps, operands = chain_of(inputs, epilogue)
    slack = block_k * (split_k + 1) * max(a.stride(-1), b.stride(-2))
    half = n * b.stride(-1) if paired else 0
    args = (
        weights, vectors, out, operands, *parts[:2], outputs, min(m, n), k, m, n,
        *strides3(weights), *strides3(vectors), *strides3(out), *parts[2:], half, half,
        block_o, block_v, block_k, split_k, knobs["num_stages"], k % block_k == 0,
        max(reach(a), reach(b)) + slack >= 2**31, by_rows, tl.int32 if whole else tl.float32, paired, steps,
    )  # fmt: skip
    return [(matmul_gemv, (batch * blocks, split_k), args, {"num_warps": knobs["num_warps"]})]
