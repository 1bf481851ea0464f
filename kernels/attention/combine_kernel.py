"""What a decode does with finished rows: parts of a divided softmax are weighed and added, and rows written.

A tile stands rows by head dimensions, or turned.
"""

import triton
import triton.language as tl

from kernelwright.kernels.attention.scores_kernel import LN_OF_2, LOG2_OF_E, finite_or_zero


@triton.jit
def by_row(x, TURNED: tl.constexpr):
    """A vector over query rows, laid along the rows of a tile, or along the columns of a turned one."""
    if TURNED:
        laid = x[None, :]
    else:
        laid = x[:, None]
    return laid


@triton.jit
def by_column(x, TURNED: tl.constexpr):
    """A vector over keys or head dimensions, across `by_row`."""
    if TURNED:
        laid = x[:, None]
    else:
        laid = x[None, :]
    return laid


@triton.jit
def write_rows(acc, logarithm, out, lse, places, lse_places, exist, sink, v_scale, stride_d, DV: tl.constexpr,
               BLOCK_DV: tl.constexpr, FIRST, TURNED: tl.constexpr):  # fmt: skip
    """Write finished rows: a sink (base 2, a row, or None) takes its part of the weights, then lse becomes natural."""
    if sink is not None:
        highest = tl.maximum(logarithm, sink)
        top = finite_or_zero(highest)
        both = tl.exp2(logarithm - top) + tl.exp2(sink - top)
        with_sink = highest + tl.log2(tl.where(both > 0, both, 1.0))
        acc = acc * by_row(tl.exp2(logarithm - finite_or_zero(with_sink)), TURNED)
        logarithm = with_sink
    if v_scale is not None:
        acc = acc * v_scale
    dims = FIRST + tl.arange(0, BLOCK_DV)
    inside = by_row(exist, TURNED) & by_column(dims < DV, TURNED)
    at = by_row(places, TURNED) + by_column(dims.to(tl.int64) * stride_d, TURNED)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + lse_places, logarithm * LN_OF_2, mask=exist & (FIRST == 0))


@triton.jit
def weighed_parts(parts, part_logs, row_places, exist, step, FIRST, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
                  SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """The parts of BLOCK_M rows as one: the highest logarithm first, then the weighted sum, both in the parts' order.

    row_places: number of each row. step: rows of a part.
    """
    logs = part_logs + row_places
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for split in range(SPLITS):
        log = tl.load(logs + split * step, mask=exist, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, log)
    shift = finite_or_zero(highest)
    if TURNED:
        acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    dims = FIRST + tl.arange(0, BLOCK_DV)
    inside = by_row(exist, TURNED) & by_column(dims < DV, TURNED)
    for split in range(SPLITS):
        weight = tl.exp2(tl.load(logs + split * step, mask=exist, other=float("-inf"), cache_modifier=".cg") - shift)
        at = by_row((row_places + split * step) * DV, TURNED) + by_column(dims, TURNED)
        acc += by_row(weight, TURNED) * tl.load(parts + at, mask=inside, other=0.0, cache_modifier=".cg")
        total += weight
    some = total > 0
    acc = acc * by_row(tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0), TURNED)
    return acc, highest + tl.log2(tl.where(some, total, 1.0))


@triton.jit
def attention_combine(
    parts, part_logs, out, lse, sinks, scales, rows_of_all, Hkv, out_strides, lse_strides,
    SQ: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of out by BLOCK_DV columns from the parts of all splits."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = rows < rows_of_all
    first = tl.program_id(1) * BLOCK_DV
    acc, logarithm = weighed_parts(
        parts, part_logs, rows, exist, rows_of_all.to(tl.int64), first, DV, BLOCK_DV, SPLITS, BLOCK_M, False
    )
    ROWS: tl.constexpr = SQ * GROUP
    group = rows // ROWS
    query = rows % ROWS // GROUP
    batch = group // Hkv
    head = group % Hkv * GROUP + rows % GROUP
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exist, other=0.0) * LOG2_OF_E
    v_scale = None
    if scales is not None:
        v_scale = tl.load(scales[2])
    write_rows(
        acc, logarithm, out, lse,
        batch * out_strides[0] + head * out_strides[1] + query * out_strides[2],
        batch * lse_strides[0] + head * lse_strides[1] + query * lse_strides[2],
        exist, sink, v_scale, out_strides[3], DV, BLOCK_DV, first, False,
    )  # fmt: skip


def combine_launch(parts, part_logs, out, lse, sinks, scales, lse_strides, kv_heads, group):
    """The launch that puts parts [splits, rows, Dv] together as out [B, Hq, Sq, Dv], and writes lse."""
    splits, rows, dv = parts.shape
    columns = min(128, max(16, triton.next_power_of_2(dv)))
    args = (
        parts, part_logs, out, lse, sinks, scales, rows, kv_heads, out.stride(), lse_strides,
        out.shape[2], group, dv, columns, 1, splits,
    )  # fmt: skip
    return attention_combine, (rows, triton.cdiv(dv, columns)), args, {"num_warps": 1}
