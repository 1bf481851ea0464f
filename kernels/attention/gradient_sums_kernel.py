"""Sums of dq in fp32, to which many programs add: what a backward in one pass needs before it, and after it."""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.attention.backward_kernel import sequence, statistic_strides
from kernelwright.kernels.attention.rows_kernel import strides_of
from kernelwright.kernels.attention.scores_kernel import LOG2_OF_E, finite_or_zero


@triton.jit
def sums_start(
    out, d_out, lse, logs, deltas, sums, cu_q, H, Sq, padded, out_strides, d_out_strides, lse_strides, facts_strides,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each query the base-2 logarithm of its denominator, delta = sum(d_out * out), and BLOCK_D sums of zero. Rows
    behind the queries, up to `padded`, get infinity and 0, so that they weigh nothing."""
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    first, queries = sequence(cu_q, batch, Sq)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    written = rows < tl.maximum(queries, padded)
    dims = tl.arange(0, BLOCK_DV).to(tl.int64)
    inside = (rows < queries)[:, None] & (dims < DV)[None, :]
    at = first + rows
    x = tl.load(
        out + batch * out_strides[0] + head * out_strides[1] + at[:, None] * out_strides[2] + dims * out_strides[3],
        mask=inside, other=0.0,
    )  # fmt: skip
    y = tl.load(
        d_out + batch * d_out_strides[0] + head * d_out_strides[1] + at[:, None] * d_out_strides[2]
        + dims * d_out_strides[3],
        mask=inside, other=0.0,
    )  # fmt: skip
    log = tl.load(
        lse + batch * lse_strides[0] + head * lse_strides[1] + at * lse_strides[2], mask=rows < queries,
        other=float("inf"),
    )  # fmt: skip
    places = batch * facts_strides[0] + head * facts_strides[1] + at * facts_strides[2]
    tl.store(logs + places, finite_or_zero(log * LOG2_OF_E), mask=written)
    tl.store(deltas + places, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1), mask=written)
    columns = tl.arange(0, BLOCK_D)
    zeros = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    tl.store(sums + places[:, None] * BLOCK_D + columns[None, :], zeros, mask=written[:, None])


@triton.jit
def sums_end(
    sums, dq, cu_q, H, Sq, scale, facts_strides, dq_strides,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq, the sums times the scale."""
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    first, queries = sequence(cu_q, batch, Sq)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < queries)[:, None] & (columns < D)[None, :]
    at = first + rows
    places = batch * facts_strides[0] + head * facts_strides[1] + at * facts_strides[2]
    found = tl.load(sums + places[:, None] * BLOCK_D + columns[None, :], mask=inside, other=0.0)
    spots = dq + batch * dq_strides[0] + head * dq_strides[1] + at[:, None] * dq_strides[2]
    tl.store(spots + columns.to(tl.int64)[None, :] * dq_strides[3], (found * scale).to(dq.dtype.element_ty), inside)


def sums_space(shape, width, device):
    """(logs, deltas, sums) for rows [B, H, S] or packed [H, T] and sums of `width` columns."""
    logs, deltas = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    return logs, deltas, torch.empty((*shape, width), dtype=torch.float32, device=device)


def sums_grid(tensor, cu_q, rows, width):
    """(programs, rows of each) that go through `rows` queries of every sequence and head of a tensor."""
    batches = cu_q.shape[0] - 1 if cu_q is not None else tensor.shape[0]
    block = max(1, min(64, 8192 // width))
    return (batches * tensor.shape[1], triton.cdiv(rows, block)), block


def start_launch(inputs, space, sq, padded):
    """The launch that fills `space`; padded: rows of each head, or 0 for as many as queries."""
    out, d_out, lse, cu_q = (inputs.get(name) for name in ("out", "d_out", "lse", "cu_q"))
    logs, deltas, sums = space
    width, block_d = out.shape[-1], sums.shape[-1]
    block_dv = max(16, triton.next_power_of_2(width))
    grid, block = sums_grid(out, cu_q, max(sq, padded), max(block_d, block_dv))
    args = (
        out, d_out, lse, logs, deltas, sums, cu_q, out.shape[1], sq, padded, strides_of(out), strides_of(d_out),
        statistic_strides(lse), statistic_strides(logs), width, block_dv, block_d, block,
    )  # fmt: skip
    return sums_start, grid, args, {"num_warps": 4}


def end_launch(inputs, space, dq, sq, scale):
    """The launch that writes dq."""
    cu_q, (logs, _, sums) = inputs.get("cu_q"), space
    grid, block = sums_grid(dq, cu_q, sq, sums.shape[-1])
    args = (
        sums, dq, cu_q, dq.shape[1], sq, scale, statistic_strides(logs), strides_of(dq), dq.shape[-1], sums.shape[-1],
        block,
    )  # fmt: skip
    return sums_end, grid, args, {"num_warps": 4}
