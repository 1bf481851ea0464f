"""The second pass of a weight's gradient whose sum over pixels is split: add up the parts, always in the same order."""

import triton
import triton.language as tl

MOST_PARTS = 32
"""Parts that are read at once."""


@triton.jit
def sum_weight_parts(
    parts_ptr, out_ptr, out_strides, COUNT, CHANNELS, R, S, PARTS, stride_part,
    STEP: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [K, C, R, S], of COUNT elements, = sum of PARTS dense fp32 tensors, of which ROWS are read at once: [K, R, S,
    (group, c)], where the groups are SPAN neighbours of EACH output channels, of which only an output channel's own
    counts; or where STEP is not 0 [K, row of taps // STEP, (s, row % STEP, c)] with DEPTH places for c."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < COUNT
    rows = tl.arange(0, ROWS)
    c = places % CHANNELS
    s = places // CHANNELS % S
    r = places // CHANNELS // S % R
    k = places // CHANNELS // S // R
    if STEP > 0:
        lies = ((k * tl.cdiv(R, STEP) + r // STEP) * S + s) * (STEP * DEPTH) + r % STEP * DEPTH + c
    else:
        lies = ((k * R + r) * S + s) * (SPAN * CHANNELS) + k // EACH % SPAN * CHANNELS + c
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, PARTS, ROWS):
        parts = first + rows
        sources = parts_ptr + (parts.to(tl.int64) * stride_part)[:, None] + lies[None, :]
        acc += tl.load(sources, mask=(parts < PARTS)[:, None] & inside[None, :], other=0.0)
    targets = out_ptr + (k * out_strides[0] + c * out_strides[1] + r * out_strides[2] + s * out_strides[3])
    tl.store(targets, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=inside)


def sum_weight_parts_launch(parts, out, step=0, depth=0, span=1, each=1):
    """The launch that turns parts in fp32 into out [K, C, R, S]: [parts, K * R * S, C], packed with a step and a depth,
    or of `span` merged groups of `each` output channels."""
    count, (_, channels, r, s) = out.numel(), out.shape
    rows = min(MOST_PARTS, triton.next_power_of_2(parts.shape[0]))
    block = 4096 // rows
    # a few programs a multiprocessor, and lines of 512 bytes
    while block > 128 and triton.cdiv(count, block) < 512:
        block //= 2
    args = (
        parts,
        out,
        out.stride(),
        count,
        channels,
        r,
        s,
        parts.shape[0],
        parts.stride(0),
        step,
        depth,
        span,
        each,
        rows,
        block,
    )
    return sum_weight_parts, (triton.cdiv(count, block),), args, {"num_warps": 4 if rows * block <= 2048 else 8}
