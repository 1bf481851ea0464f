"""Which rows belong to which expert: the output tiles of a grouped matmul, worked out on the GPU from the row ends."""

import triton
import triton.language as tl

PAST_ALL_ROWS = tl.constexpr(2147483647)


@triton.jit
def group_tiles(offsets_ptr, G, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """For all groups, the row at which each ends, and how many tiles of BLOCK_M rows there are up to its end."""
    groups = tl.arange(0, BLOCK_G)
    ends = tl.load(offsets_ptr + groups, mask=groups < G, other=PAST_ALL_ROWS)
    starts = tl.load(offsets_ptr + groups - 1, mask=(groups > 0) & (groups <= G), other=0)
    counts = tl.where(groups < G, tl.cdiv(ends - starts, BLOCK_M), 0)
    return ends, tl.cumsum(counts, 0)


@triton.jit
def group_of(tile, ends, tile_ends):
    """(group, its first row, its last row plus 1, tiles before it, tiles up to its end) of row tile number `tile`."""
    before = tile_ends <= tile
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    last = tl.min(tl.where(before, PAST_ALL_ROWS, ends), 0)
    tiles_before = tl.max(tl.where(before, tile_ends, 0), 0)
    tiles_after = tl.min(tl.where(before, PAST_ALL_ROWS, tile_ends), 0)
    return group, first, last, tiles_before, tiles_after
