"""Matmul with 4-bit weights: a 16-bit [M, K], b int4 or fp4 with scales for groups along K.

Operands are swapped as in `skinny_kernel`, so that the weight stands on the tensor cores' wide side. A byte holds an
even and an odd k: the low halves of a tile of bytes meet the even columns of a, the high halves the odd ones, in two
products. Where a step holds one group, its scale multiplies the step's fp32 sums; otherwise the 16-bit weights.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired
from kernelwright.kernels.matmul.skinny_kernel import arrived_last
from kernelwright.kernels.matmul.split_k_kernel import partial_buffer


@triton.jit
def widened(nibbles, kind: tl.constexpr, FP4: tl.constexpr):
    """Numbers in kind (fp16 or bf16) of 4-bit codes in uint16: an int4 less 8, or an e2m1."""
    if FP4:
        # exponent and mantissa moved to where kind has them; a multiplication then mends the exponent's bias
        if kind == tl.float16:
            bits = ((nibbles & 7) << 9) | ((nibbles & 8) << 12)
            numbers = bits.to(kind, bitcast=True) * tl.full((), 16384.0, kind)
        else:
            bits = ((nibbles & 7) << 6) | ((nibbles & 8) << 12)
            numbers = bits.to(kind, bitcast=True) * tl.full((), 8.507059173023462e37, kind)
    elif kind == tl.float16:
        # 1024 + code, whose last place is 1
        numbers = (nibbles | 0x6400).to(kind, bitcast=True) - tl.full((), 1032.0, kind)
    else:
        numbers = (nibbles | 0x4300).to(kind, bitcast=True) - tl.full((), 136.0, kind)
    return numbers


@triton.jit
def stored_scales(s_ptr, cols, last, k, K, stride_sk, stride_sn, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """Scales as stored, [columns of b, COUNT], of the groups from k on; zero for columns from `last` on."""
    groups = k // GROUP + tl.arange(0, COUNT)
    inside = (cols[:, None] < last) & (groups[None, :] < K // GROUP)
    places = s_ptr + cols.to(tl.int64)[:, None] * stride_sn + groups.to(tl.int64)[None, :] * stride_sk
    # a zero of the pointer's own type: the interpreter cannot make a fp8 out of a number
    return tl.load(places, mask=inside, other=tl.zeros(places.shape, s_ptr.dtype.element_ty))


@triton.jit
def fp32_scales(scales):
    """What stored scales mean; bytes are powers of two (e8m0)."""
    if scales.dtype == tl.uint8:
        # the least power of two is below fp32's normal numbers
        bits = tl.where(scales == 0, 0x400000, scales.to(tl.int32) << 23)
        scales = bits.to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@triton.jit
def scaled_weights(weights, scales, BLOCK_N: tl.constexpr, HALF: tl.constexpr, COUNT: tl.constexpr):
    """weights [BLOCK_N, HALF] times scales [BLOCK_N, COUNT], each for HALF // COUNT neighbours."""
    grouped = tl.reshape(weights, (BLOCK_N, COUNT, HALF // COUNT)) * scales.to(weights.dtype)[:, :, None]
    return tl.reshape(grouped, (BLOCK_N, HALF))


@triton.jit
def weight_product(
    acc, w_desc, stored, even, odd, col, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the product of one step's weights, columns of b from `col` on."""
    HALF: tl.constexpr = BLOCK_K // 2
    COUNT: tl.constexpr = BLOCK_K // GROUP
    packed = w_desc.load([col, k // 2])
    low = widened((packed & 15).to(tl.uint16), even.dtype, FP4)
    high = widened((packed >> 4).to(tl.uint16), even.dtype, FP4)
    scales = fp32_scales(stored)
    if COUNT == 1:
        part = tl.dot(low, even)
        part = tl.dot(high, odd, part)
        acc += part * scales
    else:
        acc = tl.dot(scaled_weights(low, scales, BLOCK_N, HALF, COUNT), even, acc)
        acc = tl.dot(scaled_weights(high, scales, BLOCK_N, HALF, COUNT), odd, acc)
    return acc


@triton.jit
def matmul_weight_only(
    a_desc, w_desc, s_ptr, c_ptr, operands, partial_ptr, arrived_ptr, M, N, K, stride_sk, stride_sn,
    stride_ps, stride_pm, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GROUP: tl.constexpr, FP4: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    split = tl.program_id(2)
    steps = tl.cdiv(K, BLOCK_K * SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    right = acc
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    COUNT: tl.constexpr = BLOCK_K // GROUP
    first = split * steps * BLOCK_K
    # scales are asked for a step ahead: the compiler hurries only what goes straight into a product
    stored = stored_scales(s_ptr, cols, N, first, K, stride_sk, stride_sn, GROUP, COUNT)
    stored_right = stored
    if PAIRED:
        stored_right = stored_scales(s_ptr, cols + N, 2 * N, first, K, stride_sk, stride_sn, GROUP, COUNT)
    for step in range(steps):
        k = first + step * BLOCK_K
        coming = stored_scales(s_ptr, cols, N, k + BLOCK_K, K, stride_sk, stride_sn, GROUP, COUNT)
        x = a_desc.load([tile_m * BLOCK_M, k])
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
        acc = weight_product(
            acc, w_desc, stored, even.T, odd.T, tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, GROUP, FP4
        )  # fmt: skip
        stored = coming
        if PAIRED:
            coming = stored_scales(s_ptr, cols + N, 2 * N, k + BLOCK_K, K, stride_sk, stride_sn, GROUP, COUNT)
            right = weight_product(
                right, w_desc, stored_right, even.T, odd.T, N + tile_n * BLOCK_N, k, BLOCK_N, BLOCK_K, GROUP, FP4
            )  # fmt: skip
            stored_right = coming
    inside = (cols[:, None] < N) & (rows[None, :] < M)
    is_last = True
    if SPLIT_K > 1:
        places = partial_ptr + rows.to(tl.int64)[None, :] * stride_pm + cols[:, None]
        arrived = arrived_ptr + tile_m * tl.num_programs(0) + tile_n
        is_last, acc, right = arrived_last(
            acc, right, places, inside, N, split, stride_ps, arrived, SPLIT_K, PAIRED
        )  # fmt: skip
    if is_last:
        if PAIRED:
            done = finish_pair(acc.T, right.T, operands, 0, rows, cols, M, N, STEPS).T
        else:
            done = finish(acc.T, operands, 0, rows, cols, M, N, STEPS).T
        c = c_ptr + rows.to(tl.int64)[None, :] * stride_cm + cols.to(tl.int64)[:, None] * stride_cn
        tl.store(c, done.to(c_ptr.dtype.element_ty), mask=inside)


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out [M, N]: a [M, K], b packed [K/2, N], b_scale as the scaling says."""
    a, weight, scale = inputs["a"], inputs["b"].T, inputs["b_scale"]
    (m, k), n = a.shape, out.shape[1]
    if out.numel() == 0:
        return []
    block_m, block_n, block_k, split_k = (knobs[x] for x in ("block_m", "block_n", "block_k", "split_k"))
    is_int4 = scale.dtype == a.dtype
    # scales of int4 lie [K/group, N], of fp4 [N, K/group]
    by_group = scale if is_int4 else scale.T
    grid = (triton.cdiv(n, block_n), triton.cdiv(m, block_m), split_k)
    partial, arrived, part_strides = None, None, (0, 0)
    if split_k > 1:
        partial = partial_buffer(a, inputs["b"], split_k)
        part_strides = (partial.stride(0), partial.stride(2))
        arrived = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=out.device)
    # chain_of takes one-dimensional scales as its own; these are not
    steps, operands = chain_of({name: tensor for name, tensor in inputs.items() if name != "b_scale"}, epilogue)
    args = (
        TensorDescriptor(a, list(a.shape), list(a.stride()), [block_m, block_k]),
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [block_n, block_k // 2]),
        scale, out, operands, partial, arrived, m, n, k, *by_group.stride(), *part_strides, *out.stride(),
        block_m, block_n, block_k, split_k,
        k // by_group.shape[0], not is_int4, is_paired(epilogue), steps,
    )  # fmt: skip
    return [(matmul_weight_only, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]
