"""The second pass of convolutions whose sums are split: add up the parts in a fixed order and run the epilogue."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.conv2d.conv_epilogue_kernel import conv_chain, finish_conv, image_places


@triton.jit
def conv_reduce_parts(
    parts_ptr, out_ptr, operands, out_strides, PIXELS, CHANNELS, HEIGHT, WIDTH, stride_part,
    PARTS: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = epilogue(sum of PARTS tensors [PIXELS, CHANNELS]); pixels are (n, p, q), images HEIGHT x WIDTH."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, col_inside = rows < PIXELS, k < CHANNELS
    inside = row_inside[:, None] & col_inside[None, :]
    places = parts_ptr + rows[:, None] * CHANNELS + k[None, :]
    acc = tl.load(places, mask=inside, other=0)
    for _ in range(PARTS - 1):
        places += stride_part
        acc += tl.load(places, mask=inside, other=0)
    q = rows % WIDTH
    p = rows // WIDTH % HEIGHT
    n = rows // WIDTH // HEIGHT
    if STEPS != "":
        acc = finish_conv(acc.to(tl.float32), operands, n, p, q, k, row_inside, col_inside, STEPS)
    tl.store(out_ptr + image_places(n, p, q, k, out_strides), acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def conv_fill_zeros(ptr, COUNT, BLOCK: tl.constexpr):
    """Zero the COUNT elements of a dense tensor."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ptr + places, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=places < COUNT)


def conv_zeros_launch(tensor):
    """The launch that fills a dense tensor with zeros."""
    return conv_fill_zeros, (triton.cdiv(tensor.numel(), 4096),), (tensor, tensor.numel(), 4096), {"num_warps": 4}


def conv_parts(out, parts, dtype):
    """Workspace for sums of a result [N, K, P, Q]: [parts, N * P * Q, K] in dtype."""
    n, k, p, q = out.shape
    return torch.empty((parts, n * p * q, k), dtype=dtype, device=out.device)


def part_strides(out):
    """Strides of a dense workspace [N, P, Q, K], in the order of a result [N, K, P, Q]."""
    _, k, p, q = out.shape
    return p * q * k, 1, q * k, k


def reach_of(tensor):
    """The largest offset that an element of the tensor has, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)


def conv_reduce_launch(parts, out, inputs, epilogue):
    """The launch that turns parts [parts, N * P * Q, K] into out [N, K, P, Q]."""
    count, pixels, channels = parts.shape
    block_n = max(16, min(128, triton.next_power_of_2(channels)))
    block_m = max(1, min(2048 // block_n, triton.next_power_of_2(pixels)))
    grid = (triton.cdiv(pixels, block_m), triton.cdiv(channels, block_n))
    steps, operands = conv_chain(inputs, epilogue)
    args = (
        parts, out, operands, out.stride(), pixels, channels, *out.shape[2:], parts.stride(0),
        count, steps, block_m, block_n,
    )  # fmt: skip
    return conv_reduce_parts, grid, args, {"num_warps": 4}
