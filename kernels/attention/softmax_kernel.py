"""Steps of an attention that all of its forward kernels share: scores, what hides keys, and the running softmax.

Scores are in units of log2(e), so that exp2 does what exp would.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def capped_scores(s, twice_over_cap, cap):
    """cap * tanh(s / cap), for s of any size; twice_over_cap is 2 / cap times whatever s is still to be scaled by."""
    return cap - 2.0 * cap / (tl.exp2(s * twice_over_cap) + 1.0)


@triton.jit
def softmax_step(s, factor, m, norm, SHIFT: tl.constexpr, GUARD: tl.constexpr):
    """(weights, what sums so far shrink by, new maxima, new sums of weights) of a tile of scores times factor > 0.

    SHIFT: weights are made 2**SHIFT times larger. GUARD: rows may have no key that is visible so far.
    """
    top = tl.maximum(m, tl.max(s, 1) * factor)
    base = top
    if GUARD:
        base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(s * factor - (base - SHIFT)[:, None])
    alpha = tl.exp2(m - base)
    return p, alpha, top, norm * alpha + tl.sum(p, 1)


@triton.jit
def softmax_start(sinks_ptr, head, ROWS: tl.constexpr, SHIFT: tl.constexpr, SINKS: tl.constexpr):
    """Maxima and sums before the first key: none, or those of the head's sink."""
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        m = tl.zeros((ROWS,), tl.float32) + sink
        norm = tl.zeros((ROWS,), tl.float32) + tl.where(sink == -float("inf"), 0.0, tl.exp2(SHIFT * 1.0))
    else:
        m = tl.full((ROWS,), -float("inf"), tl.float32)
        norm = tl.zeros((ROWS,), tl.float32)
    return m, norm


@triton.jit
def softmax_end(m, norm, SHIFT: tl.constexpr):
    """(what the sums of weighted values are multiplied by, natural logarithm of the denominator); zero and -inf for
    rows that saw no key."""
    dead = norm == 0.0
    inverse = tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, norm))
    lse = tl.where(dead, -float("inf"), (m + tl.log2(tl.where(dead, 1.0, norm)) - SHIFT) * LN2)
    return inverse, lse


@triton.jit
def key_ranges(
    first, last, len_k, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """(start, start of blocks of which every key is visible, their end, end) of the keys that queries at the places
    first .. last see. All but the last are multiples of BLOCK_N; all three parts may be empty."""
    hi = len_k
    full_hi = len_k
    if CAUSAL:
        hi = tl.maximum(tl.minimum(len_k, last + 1), 0)
        full_hi = tl.maximum(tl.minimum(len_k, first + 1), 0)
    lo = 0
    full_lo = 0
    if WINDOW > 0:
        lo = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def visible_keys(s, places, cols, len_k, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The scores [queries, keys] with -inf where a query does not see a key. places: of queries among the keys."""
    seen = (cols < len_k)[None, :]
    if CAUSAL:
        seen = seen & (cols[None, :] <= places[:, None])
    if WINDOW > 0:
        seen = seen & (cols[None, :] > places[:, None] - WINDOW)
    return tl.where(seen, s, -float("inf"))


def attention_parts(size, split, least):
    """A head dimension as two powers of two: one that covers it and 0, or the largest in it and one for the rest."""
    whole = max(triton.next_power_of_2(size), least)
    first = whole // 2
    if not split or whole == size or first < least:
        return whole, 0
    return first, max(triton.next_power_of_2(size - first), least)


def attention_scale(attributes, head_dim):
    """The factor of the scores."""
    return float(attributes.get("scale", head_dim**-0.5))


def attention_reach(*tensors):
    """The largest offset within one head of one sequence that an element of a tensor has, in elements."""
    most = 0
    for tensor in tensors:
        sizes = (tensor.shape[0], tensor.shape[-1]) if tensor.dim() == 3 else tensor.shape[-2:]
        strides = (tensor.stride(0), tensor.stride(-1)) if tensor.dim() == 3 else tensor.stride()[-2:]
        most = max(most, sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size))
    return most


def attention_strides(tensor):
    """Strides of batch, head, position and dimension; packed tensors [T, H, D] have no batch."""
    if tensor.dim() == 3:
        return (0, tensor.stride(1), tensor.stride(0), tensor.stride(2))
    return tensor.stride()
