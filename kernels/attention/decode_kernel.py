"""Attention of a few queries over many keys: the query heads that share a key head stand together in one tile, and the
keys are divided over programs.

A program keeps the softmax of its keys in base 2: the highest score, the sum and the weighted values. With splits each
leaves its result, already divided by its sum, and the logarithm of that sum; a second launch, or whichever program of a
tile arrives last, weighs the parts in a fixed order, so that the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl

from kernelwright.kernels.attention.combine_kernel import (
    by_column,
    by_row,
    combine_launch,
    weighed_parts,
    write_rows,
)
from kernelwright.kernels.attention.rows_kernel import bulk_tiles, places_of, row_tile
from kernelwright.kernels.attention.scores_kernel import LOG2_OF_E, capped_scores, finite_or_zero, seen_scores
from kernelwright.kernels.matmul.product_kernel import dot_precision, product


@triton.jit
def query_tile(q, row_places, rows_exist, stride_d, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
               TURNED: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH of the query rows: [rows, WIDTH], turned [WIDTH, rows]."""
    dims = FIRST + tl.arange(0, WIDTH)
    exist = by_row(rows_exist, TURNED) & by_column(dims < D, TURNED)
    places = by_row(row_places, TURNED) + by_column(dims.to(tl.int64) * stride_d, TURNED)
    return tl.load(q + places, mask=exist, other=0.0).to(TYPE)


@triton.jit
def pages_of(table, start, local, last, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys start + local, one number where all lie in one page. Entries of the table behind the key `last`
    are not read."""
    if PAGE == 0:
        pages = 0
    elif PAGE % BLOCK_N == 0:
        pages = tl.load(table + start // PAGE, mask=start < last, other=0)
    else:
        keys = start + local
        pages = tl.load(table + keys // PAGE, mask=keys < last, other=0)
    return pages


@triton.jit
def key_places_of(start, local, pages, strides, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, FAR: tl.constexpr):
    """Offsets of the keys start + local in their pages. strides: of a page (or 0) and of a key."""
    if PAGE == 0:
        places = places_of(start, local, strides[1], FAR)
    elif PAGE % BLOCK_N == 0:
        places = pages.to(tl.int64) * strides[0] + places_of(start % PAGE, local, strides[1], FAR)
    else:
        places = pages.to(tl.int64) * strides[0] + ((start + local) % PAGE).to(tl.int64) * strides[1]
    return places


@triton.jit
def cache_tile(base, descriptor, start, local, exist, pages, batch, kv_head, strides, FIRST: tl.constexpr,
               WIDTH: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BULK: tl.constexpr,
               FAR: tl.constexpr):  # fmt: skip
    """Columns FIRST .. FIRST + WIDTH of the keys (or values) start + local, [BLOCK_N, WIDTH].

    BULK: by the descriptor, whose blocks begin with column FIRST where the tile does; otherwise by the pointer base.
    """
    if BULK and PAGE > 0:
        tile = descriptor.load([pages, start % PAGE, kv_head.to(tl.int32), FIRST]).reshape((BLOCK_N, WIDTH))
    elif BULK:
        tile = descriptor.load([batch.to(tl.int32), kv_head.to(tl.int32), start, FIRST]).reshape((BLOCK_N, WIDTH))
    else:
        places = key_places_of(start, local, pages, strides, PAGE, BLOCK_N, FAR)
        tile = row_tile(base, places, exist, strides[2], FIRST, WIDTH, D, FAR)
    return tile


@triton.jit
def attend_keys(
    acc, highest, total, q_main, q_rest, k, v, k_desc, k_rest_desc, v_desc, mask, slopes, mask_places, queries,
    rows_exist, table, batch, kv_head, first, last, scale, k_strides, v_strides, mask_stride_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr,
    BULK: tl.constexpr, FAR: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the keys first .. last into a running softmax. WHOLE: they are whole blocks.

    highest and total: of each row, its highest score so far and the sum of weights; acc: the sum of weighted values.
    """
    local = tl.arange(0, BLOCK_N)
    ALONG: tl.constexpr = 0 if TURNED else 1
    HIDES: tl.constexpr = CAUSAL or WINDOW > 0 or MASK != "" or not WHOLE
    if TURNED:
        none = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        none = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # pages are looked up a block ahead, so that no load of keys waits for another load
    pages = pages_of(table, first, local, last, PAGE, BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        keys = start + local
        exist = None
        inside = by_row(rows_exist, TURNED)
        if not WHOLE:
            exist = keys < last
            inside = inside & by_column(exist, TURNED)
        key = cache_tile(
            k, k_desc, start, local, exist, pages, batch, kv_head, k_strides, 0, D_MAIN, D, PAGE, BLOCK_N, BULK, FAR
        ).to(TYPE)
        if TURNED:
            products = product(key, q_main, none, PRECISION)
        else:
            products = product(q_main, key.T, none, PRECISION)
        if D_REST > 0:
            key_rest = cache_tile(
                k, k_rest_desc, start, local, exist, pages, batch, kv_head, k_strides, D_MAIN, D_REST, D, PAGE,
                BLOCK_N, BULK, FAR,
            ).to(TYPE)  # fmt: skip
            if TURNED:
                products = product(key_rest, q_rest, products, PRECISION)
            else:
                products = product(q_rest, key_rest.T, products, PRECISION)
        scores = seen_scores(
            capped_scores(products, scale, CAP), by_row(queries, TURNED), by_column(keys, TURNED), inside, slopes, mask,
            by_row(mask_places, TURNED) + by_column(keys.to(tl.int64) * mask_stride_k, TURNED),
            CAUSAL, WINDOW, MASK, HIDES,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(scores, ALONG))
        shift = higher
        if HIDES:
            shift = finite_or_zero(higher)
        weights = tl.exp2(scores - by_row(shift, TURNED))
        fading = tl.exp2(highest - shift)
        total = total * fading + tl.sum(weights, ALONG)
        acc = acc * by_row(fading, TURNED)
        highest = higher
        if SHARED:
            value = key
        else:
            value = cache_tile(
                v, v_desc, start, local, exist, pages, batch, kv_head, v_strides, 0, BLOCK_DV, DV, PAGE, BLOCK_N, BULK,
                FAR,
            ).to(TYPE)  # fmt: skip
        if TURNED:
            acc = product(value.T, weights.to(TYPE), acc, PRECISION)
        else:
            acc = product(weights.to(TYPE), value, acc, PRECISION)
        if PAGE > 0:
            pages = pages_of(table, start + BLOCK_N, local, last, PAGE, BLOCK_N)
    return acc, highest, total


@triton.jit
def key_range(length, first_query, last_query, split, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
              CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """(first, last) key of a split, of those that queries first_query .. last_query may see: whole blocks, evenly."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    last = length
    if CAUSAL:
        last = tl.minimum(length, last_query + 1)
    if SPLITS > 1:
        blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_N)
        share = tl.cdiv(blocks, SPLITS)
        first += split * share * BLOCK_N
        last = tl.minimum(last, first + share * BLOCK_N)
    return first, last


@triton.jit
def attention_decode(
    q, k, v, k_desc, k_rest_desc, v_desc, out, lse, mask, alibi, sinks, table, lengths, scales, parts, part_logs,
    arrived, Hkv, Skv, table_stride, q_strides, k_strides, v_strides, out_strides, lse_strides, mask_strides, scale,
    SQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    LAST: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, SHARED: tl.constexpr, TURNED: tl.constexpr, BULK: tl.constexpr,
    PEEL: tl.constexpr, FAR: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of query rows over one split of the keys. Row r is query r // GROUP of the group's head r % GROUP.

    strides of q, out, mask: batch, head, query, then head dimension (mask: key); of k and v: batch, page, key, head
    dimension, head.
    """
    ROWS: tl.constexpr = SQ * GROUP
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    split = tl.program_id(1)
    batch = (group // Hkv).to(tl.int64)
    kv_head = (group % Hkv).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exist = rows < ROWS
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    length = Skv
    if lengths is not None:
        length = tl.load(lengths + batch)
    shift = 0
    if BOTTOM_RIGHT:
        shift = length - SQ
    last_row = tl.minimum(tile * BLOCK_M + BLOCK_M, ROWS) - 1
    first, last = key_range(
        length, tile * BLOCK_M // GROUP + shift, last_row // GROUP + shift, split, SPLITS, BLOCK_N, CAUSAL, WINDOW
    )
    slopes = None
    if alibi is not None:
        slopes = by_row(tl.load(alibi + head, mask=exist, other=0.0), TURNED)
    v_scale = None
    if scales is not None:
        scale = scale * tl.load(scales[0]) * tl.load(scales[1])
        v_scale = tl.load(scales[2])
    if PAGE > 0:
        table += batch * table_stride
    q += batch * q_strides[0]
    q_places = head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    mask_places = batch * mask_strides[0] + head * mask_strides[1] + query.to(tl.int64) * mask_strides[2]
    q_main = query_tile(q, q_places, exist, q_strides[3], 0, D_MAIN, D, TURNED, TYPE)
    q_rest = q_main
    if D_REST > 0:
        q_rest = query_tile(q, q_places, exist, q_strides[3], D_MAIN, D_REST, D, TURNED, TYPE)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if TURNED:
        acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    k += batch * k_strides[0] + kv_head * k_strides[4]
    v += batch * v_strides[0] + kv_head * v_strides[4]
    whole_until = first
    if PEEL:
        whole_until += tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
        acc, highest, total = attend_keys(
            acc, highest, total, q_main, q_rest, k, v, k_desc, k_rest_desc, v_desc, mask, slopes, mask_places,
            query + shift, exist, table, batch, kv_head, first, whole_until, scale, k_strides[1:4], v_strides[1:4],
            mask_strides[3], BLOCK_M, BLOCK_N, D, D_MAIN, D_REST, DV, BLOCK_DV, PAGE, CAUSAL, WINDOW, CAP, MASK,
            SHARED, TURNED, True, BULK, FAR, TYPE, PRECISION, STAGES,
        )  # fmt: skip
    # peeled off, the end of the keys goes by plain loads: what lies behind it in a page may be anything
    acc, highest, total = attend_keys(
        acc, highest, total, q_main, q_rest, k, v, k_desc, k_rest_desc, v_desc, mask, slopes, mask_places,
        query + shift, exist, table, batch, kv_head, whole_until, last, scale, k_strides[1:4], v_strides[1:4],
        mask_strides[3], BLOCK_M, BLOCK_N, D, D_MAIN, D_REST, DV, BLOCK_DV, PAGE, CAUSAL, WINDOW, CAP, MASK, SHARED,
        TURNED, False, BULK and not PEEL, FAR, TYPE, PRECISION, 1 if PEEL else STAGES,
    )  # fmt: skip
    # a row without a visible key has no weights: zeros, and -inf as logarithm
    some = total > 0
    acc = acc * by_row(tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0), TURNED)
    logarithm = highest + tl.log2(tl.where(some, total, 1.0))
    finished = True
    if SPLITS > 1:
        row_places = group.to(tl.int64) * ROWS + rows
        step = (tl.num_programs(0) // TILES).to(tl.int64) * ROWS
        places = row_places + split * step
        dims = tl.arange(0, BLOCK_DV)
        inside = by_row(exist, TURNED) & by_column(dims < DV, TURNED)
        tl.store(parts + by_row(places * DV, TURNED) + by_column(dims, TURNED), acc, mask=inside)
        tl.store(part_logs + places, logarithm, mask=exist)
        finished = False
        if LAST:
            # every thread's stores must be done before this program counts as arrived
            tl.debug_barrier()
            counter = arrived + tl.program_id(0)
            finished = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
            if finished:
                acc, logarithm = weighed_parts(
                    parts, part_logs, row_places, exist, step, 0, DV, BLOCK_DV, SPLITS, BLOCK_M, TURNED
                )
                # the counter goes back to zero for the next launch
                tl.atomic_xchg(counter, 0, sem="relaxed")
    if finished:
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + head, mask=exist, other=0.0) * LOG2_OF_E
        write_rows(
            acc, logarithm, out, lse,
            batch * out_strides[0] + head * out_strides[1] + query.to(tl.int64) * out_strides[2],
            batch * lse_strides[0] + head * lse_strides[1] + query.to(tl.int64) * lse_strides[2],
            exist, sink, v_scale, out_strides[3], DV, BLOCK_DV, 0, TURNED,
        )  # fmt: skip


def widths(head_dim):
    """(main, rest): powers of two that hold a head dimension; rest is 0 unless two parts waste less than one."""
    whole = max(16, triton.next_power_of_2(head_dim))
    rest = max(16, triton.next_power_of_2(head_dim - whole // 2))
    return (whole, 0) if head_dim <= 16 or whole // 2 + rest >= whole else (whole // 2, rest)


def cache_strides(tensor, paged):
    """Strides of keys or values: batch, page, key, head dimension, head."""
    if paged:
        page, key, head, dim = tensor.stride()
        return 0, page, key, dim, head
    batch, head, key, dim = tensor.stride()
    return batch, 0, key, dim, head


def cache_block(page, block_n, width):
    """The block of a descriptor of keys or values: of pages [pages, page, heads, D], or of [B, heads, keys, D]."""
    return [1, block_n, 1, width] if page else [1, 1, block_n, width]


def compute_type(q, out):
    """The type in which tiles are multiplied: that of q, and that of out where q has 8 bits."""
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return types.get(q.dtype) or types[out.dtype]


def cache_descriptors(k, v, page, block_n, main, rest, block_dv, shared):
    """Descriptors of keys, of what their main part leaves over, and of values; None for what is not read so."""
    rest_desc = bulk_tiles(k, cache_block(page, block_n, rest)) if rest else None
    v_desc = None if shared else bulk_tiles(v, cache_block(page, block_n, block_dv))
    return bulk_tiles(k, cache_block(page, block_n, main)), rest_desc, v_desc


def workspaces(q, dv, splits, tiles, last):
    """(parts, their logarithms, counters of arrived programs) of a divided softmax; None for what is not needed."""
    if splits == 1:
        return None, None, None
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    parts = torch.empty((splits, rows, dv), dtype=torch.float32, device=q.device)
    part_logs = torch.empty((splits, rows), dtype=torch.float32, device=q.device)
    return parts, part_logs, torch.zeros(tiles, dtype=torch.int32, device=q.device) if last else None


def plan(inputs, outs, knobs, attributes):
    """Launches of a decode: q [B, Hq, Sq, D] against k [B, Hkv, Skv, D] and v, or pages of them with block_table and
    lengths. outs: out [B, Hq, Sq, Dv], or (out, lse)."""
    out, lse = outs if isinstance(outs, tuple) else (outs, None)
    q, k, v, table, mask = (inputs.get(name) for name in ("q", "k", "v", "block_table", "mask"))
    if out.numel() == 0:
        return []
    page = 0 if table is None else k.shape[1]
    (batches, heads, sq, head_dim), kv_heads = q.shape, k.shape[2 if page else 1]
    keys, group, dv = table.shape[1] * page if page else k.shape[2], heads // kv_heads, out.shape[3]
    main, rest = widths(head_dim)
    block_m, block_n, splits, last = knobs["block_m"], knobs["block_n"], knobs["split_kv"], knobs["combine"] == "last"
    block_dv = max(16, triton.next_power_of_2(dv))
    tiles = batches * kv_heads * triton.cdiv(sq * group, block_m)
    parts, part_logs, arrived = workspaces(q, dv, splits, tiles, last)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    scale_names = ("q_scale", "k_scale", "v_scale")
    scales = tuple(inputs[name] for name in scale_names) if "q_scale" in inputs else None
    causal, bulk = attributes.get("causal", ""), knobs["loads"] == "bulk"
    far = max(max(t.stride()) for t in (k, v)) * max(block_n, main, block_dv) >= 2**31
    lse_strides = lse.stride() if lse is not None else (0, 0, 0)
    shared = bool(attributes.get("kv_shared")) and block_dv == main == dv
    descriptors = cache_descriptors(k, v, page, block_n, main, rest, block_dv, shared) if bulk else (None, None, None)
    # two loops cost wide heads too many registers; the bulk copy engine fills up what is behind a sequence, not a page
    peel = page > 0 if bulk else main <= 256
    args = (
        q, k, v, *descriptors, out, lse, mask, inputs.get("alibi"), inputs.get("sinks"), table, inputs.get("lengths"),
        scales, parts, part_logs, arrived, kv_heads, keys, table.stride(0) if page else 0, q.stride(),
        cache_strides(k, page), cache_strides(v, page), out.stride(), lse_strides,
        mask.stride() if mask is not None else (0, 0, 0, 0), float(attributes.get("scale", head_dim**-0.5)),
        sq, group, head_dim, main, rest, dv, block_dv, block_m, block_n, splits, last, page,
        bool(causal) and not (causal == "bottom_right" and sq == 1), causal != "top_left", attributes.get("window", 0),
        float(attributes.get("softcap", 0)), attributes.get("mask", ""), shared, bool(knobs["turned"]), bulk, peel, far,
        compute_type(q, out), dot_precision(knobs["precision"], q), knobs["num_stages"],
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    launches = [(attention_decode, (tiles, splits), args, options)]
    if splits > 1 and not last:
        sinks = inputs.get("sinks")
        launches.append(combine_launch(parts, part_logs, out, lse, sinks, scales, lse_strides, kv_heads, group))
    return launches
