"""What becomes of the product of a query and a key before the softmax: scale, soft cap, bias, and which keys are seen.

Scores are kept in base 2 (natural ones times log2(e)), where an exponential is one instruction. A query's position and
a key's are counted on one axis, so that key j is in the window w of query i if i - w < j.
"""

import triton
import triton.language as tl

LOG2_OF_E = tl.constexpr(1.4426950408889634)
LN_OF_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def capped_scores(products, scale, CAP: tl.constexpr):
    """Base-2 scores of q k^T, softly capped to (-CAP, CAP) in natural units unless CAP is 0."""
    if CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both ends too
        rising = tl.exp2(products * (scale * (2 * LOG2_OF_E / CAP)))
        scores = (CAP * LOG2_OF_E) * (1.0 - 2.0 / (rising + 1.0))
    else:
        scores = products * (scale * LOG2_OF_E)
    return scores


@triton.jit
def seen_scores(
    scores, queries, keys, inside, slopes, mask, mask_places,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, HIDES: tl.constexpr = True,
):  # fmt: skip
    """Base-2 scores with ALiBi (slopes, or None) and the mask tensor (MASK: "", "bool" or "additive") added, and -inf
    where a key is hidden. inside: keys and queries that exist. HIDES: whether anything in the tile can be hidden."""
    if slopes is not None:
        scores -= (slopes * LOG2_OF_E) * tl.abs(queries - keys).to(tl.float32)
    if HIDES:
        seen = inside
        if CAUSAL:
            seen = seen & (keys <= queries)
        if WINDOW > 0:
            seen = seen & (keys > queries - WINDOW)
        if MASK == "bool":
            seen = seen & (tl.load(mask + mask_places, mask=inside, other=0) != 0)
        elif MASK == "additive":
            scores += tl.load(mask + mask_places, mask=inside, other=0).to(tl.float32) * LOG2_OF_E
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def finite_or_zero(x):
    """-inf becomes 0, so that (-inf) - (-inf) never comes up."""
    return tl.where(x == float("-inf"), 0.0, x)
