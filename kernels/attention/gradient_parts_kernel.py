"""Gradients of keys or values whose queries were divided over programs: the parts in fp32, added up."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_parts(parts, out, rows, H, S, step, out_strides, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
              SPLITS: tl.constexpr):  # fmt: skip
    """BLOCK rows of out [B, H, S, D], the sum of SPLITS parts [B * H * S, D] that lie `step` apart, in their order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (dims < D)[None, :]
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * step + row[:, None] * D + dims[None, :], mask=inside, other=0.0)
    batch = row // (H * S)
    places = batch * out_strides[0] + row // S % H * out_strides[1] + row % S * out_strides[2]
    spots = out + places[:, None] + dims.to(tl.int64)[None, :] * out_strides[3]
    tl.store(spots, total.to(out.dtype.element_ty), mask=inside)


def gradient_parts(splits, tensor):
    """Where a kernel writes the gradient `tensor` [B, H, S, D]: there, or in parts [splits * B, H, S, D] of fp32."""
    if splits == 1:
        return tensor
    batch, *rest = tensor.shape
    return torch.empty((splits * batch, *rest), dtype=torch.float32, device=tensor.device)


def parts_launch(parts, out):
    """The launch that adds parts up to out."""
    batch, heads, length, width = out.shape
    rows, block_d = batch * heads * length, max(16, triton.next_power_of_2(width))
    block = max(1, 1024 // block_d)
    args = (
        parts, out, rows, heads, length, out.numel(), out.stride(), width, block_d, block,
        parts.shape[0] // batch,
    )  # fmt: skip
    return add_parts, (triton.cdiv(rows, block),), args, {"num_warps": 4}
