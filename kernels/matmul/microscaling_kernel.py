"""Matmul of operands that both hold 8-bit or 4-bit numbers with a scale for every 32 or 16 neighbours along K.

Numbers times scales are exact in bf16 (16-bit floats have more digits than both together): they are widened in
registers and multiplied there, on any GPU. A byte of fp4 holds an even and an odd k; where an operand is packed so,
even and odd columns make a product each.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.matmul.epilogue_kernel import chain_of, finish, finish_pair, is_paired, tile_of
from kernelwright.kernels.matmul.weight_only_kernel import fp32_scales, scaled_weights, stored_scales, widened


@triton.jit
def numbers_at(ptr, rows, last, k, K, stride_r, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr):
    """Bytes [ROWS, BLOCK // PER] as stored, of k from `k` on, PER of them a byte; zero past the ends."""
    places = k // PER + tl.arange(0, BLOCK // PER)
    inside = (rows[:, None] < last) & (places[None, :] < K // PER)
    at = ptr + rows.to(tl.int64)[:, None] * stride_r + places[None, :]
    # a zero of the pointer's own type: the interpreter cannot make a fp8 out of a number
    return tl.load(at, mask=inside, other=tl.zeros(at.shape, ptr.dtype.element_ty))


@triton.jit
def fp4_numbers(codes, COMPUTE: tl.constexpr):
    """Numbers of e2m1 codes in uint8."""
    # fp16 holds them as exactly, and `widened` makes 16-bit numbers only
    return widened(codes.to(tl.uint16), tl.float16 if COMPUTE.is_fp32() else COMPUTE, True).to(COMPUTE)


@triton.jit
def exact_scales(s_ptr, rows, last, k, K, stride_sk, stride_sr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """fp32 scales [rows, COUNT] of the groups from k on; the greatest byte of e8m0 is NaN."""
    stored = stored_scales(s_ptr, rows, last, k, K, stride_sk, stride_sr, GROUP, COUNT)
    scales = fp32_scales(stored)
    if stored.dtype == tl.uint8:
        scales = tl.where(stored == 255, float("nan"), scales)
    return scales


@triton.jit
def scaled_halves(
    ptr, s_ptr, rows, last, k, K, stride_r, stride_sr, stride_sk,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Even and odd columns [ROWS, BLOCK_K // 2] of an operand times their scales."""
    COUNT: tl.constexpr = BLOCK_K // GROUP
    HALF: tl.constexpr = BLOCK_K // 2
    scales = exact_scales(s_ptr, rows, last, k, K, stride_sk, stride_sr, GROUP, COUNT)
    if PACKED:
        packed = numbers_at(ptr, rows, last, k, K, stride_r, ROWS, BLOCK_K, 2)
        even = fp4_numbers(packed & 15, COMPUTE)
        odd = fp4_numbers(packed >> 4, COMPUTE)
    else:
        whole = numbers_at(ptr, rows, last, k, K, stride_r, ROWS, BLOCK_K, 1).to(COMPUTE)
        even, odd = tl.split(tl.reshape(whole, (ROWS, HALF, 2)))
    return scaled_weights(even, scales, ROWS, HALF, COUNT), scaled_weights(odd, scales, ROWS, HALF, COUNT)


@triton.jit
def scaled_whole(
    ptr, s_ptr, rows, last, k, K, stride_r, stride_sr, stride_sk,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The tile [ROWS, BLOCK_K] of an 8-bit operand times its scales."""
    COUNT: tl.constexpr = BLOCK_K // GROUP
    scales = exact_scales(s_ptr, rows, last, k, K, stride_sk, stride_sr, GROUP, COUNT)
    whole = numbers_at(ptr, rows, last, k, K, stride_r, ROWS, BLOCK_K, 1).to(COMPUTE)
    return scaled_weights(whole, scales, ROWS, BLOCK_K, COUNT)


@triton.jit
def matmul_microscaling(
    a_ptr, b_ptr, as_ptr, bs_ptr, c_ptr, operands, M, N, K,
    stride_am, stride_bn, stride_sm, stride_sk, stride_tn, stride_tk, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    GROUP: tl.constexpr, A_PACKED: tl.constexpr, B_PACKED: tl.constexpr, COMPUTE: tl.constexpr,
    PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    right = acc
    for k in range(0, K, BLOCK_K):
        if A_PACKED or B_PACKED:
            x, x_odd = scaled_halves(
                a_ptr, as_ptr, rows, M, k, K, stride_am, stride_sm, stride_sk,
                BLOCK_M, BLOCK_K, GROUP, A_PACKED, COMPUTE,
            )  # fmt: skip
            y, y_odd = scaled_halves(
                b_ptr, bs_ptr, cols, N, k, K, stride_bn, stride_tn, stride_tk,
                BLOCK_N, BLOCK_K, GROUP, B_PACKED, COMPUTE,
            )  # fmt: skip
            acc = tl.dot(x, y.T, acc)
            acc = tl.dot(x_odd, y_odd.T, acc)
            if PAIRED:
                # N counts the result's columns: the other half of the gated product begins there
                z, z_odd = scaled_halves(
                    b_ptr, bs_ptr, cols + N, 2 * N, k, K, stride_bn, stride_tn, stride_tk,
                    BLOCK_N, BLOCK_K, GROUP, B_PACKED, COMPUTE,
                )  # fmt: skip
                right = tl.dot(x, z.T, right)
                right = tl.dot(x_odd, z_odd.T, right)
        else:
            x = scaled_whole(
                a_ptr, as_ptr, rows, M, k, K, stride_am, stride_sm, stride_sk, BLOCK_M, BLOCK_K, GROUP, COMPUTE
            )  # fmt: skip
            y = scaled_whole(
                b_ptr, bs_ptr, cols, N, k, K, stride_bn, stride_tn, stride_tk, BLOCK_N, BLOCK_K, GROUP, COMPUTE
            )  # fmt: skip
            acc = tl.dot(x, y.T, acc)
            if PAIRED:
                z = scaled_whole(
                    b_ptr, bs_ptr, cols + N, 2 * N, k, K, stride_bn, stride_tn, stride_tk,
                    BLOCK_N, BLOCK_K, GROUP, COMPUTE,
                )  # fmt: skip
                right = tl.dot(x, z.T, right)
    if PAIRED:
        acc = finish_pair(acc, right, operands, 0, rows, cols, M, N, STEPS)
    else:
        acc = finish(acc, operands, 0, rows, cols, M, N, STEPS)
    c = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols.to(tl.int64)[None, :] * stride_cn
    tl.store(c, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def plan(inputs, out, knobs, epilogue):
    """Launches that write epilogue(a @ b) to out [M, N]: a [M, K] and b [K, N] dense along K, or packed there."""
    a, b, a_scale, b_scale = (inputs[name] for name in ("a", "b", "a_scale", "b_scale"))
    (m, n), block_m, block_n = out.shape, knobs["block_m"], knobs["block_n"]
    if out.numel() == 0:
        return []
    a_packed, b_packed = a.dtype == torch.uint8, b.dtype == torch.uint8
    # the scales' type tells "mx" from "nvfp4"; they are no steps of the chain, whatever their shape
    group = 32 if a_scale.dtype == torch.uint8 else 16
    steps, operands = chain_of({name: x for name, x in inputs.items() if not name.endswith("_scale")}, epilogue)
    # the interpreter gets bf16 products wrong
    compute = tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    args = (
        a, b, a_scale, b_scale, out, operands, m, n, a.shape[1] * (2 if a_packed else 1),
        a.stride(0), b.stride(1), *a_scale.stride(), *b_scale.stride(), *out.stride(),
        block_m, block_n, knobs["block_k"], knobs["group_m"], group, a_packed, b_packed, compute,
        is_paired(epilogue), steps,
    )  # fmt: skip
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    return [(matmul_microscaling, grid, args, {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]})]
