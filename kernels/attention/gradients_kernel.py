"""The gradient of a tile of scores, which every pass of a backward remakes from lse and delta.

With p the softmax's weights and dp = d_out v^T it is p * (dp - delta).
"""

import triton
import triton.language as tl

from kernelwright.kernels.attention.scores_kernel import LOG2_OF_E, capped_scores, finite_or_zero, seen_scores


@triton.jit
def score_gradients(
    products, d_weights, logs, deltas, queries, keys, inside, slopes, mask, mask_places, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """(weights, gradient of the capped scores, gradient of the scaled products), tiles in fp32 like the products.

    logs: base-2 logarithm of each query's denominator, +inf for queries that do not exist, so that they weigh nothing.
    """
    capped = capped_scores(products, scale, CAP)
    scores = seen_scores(capped, queries, keys, inside, slopes, mask, mask_places, CAUSAL, WINDOW, MASK, HIDES)
    weights = tl.exp2(scores - logs)
    d_capped = weights * (d_weights - deltas)
    d_scaled = d_capped
    if CAP > 0:
        ratio = capped * (1.0 / (CAP * LOG2_OF_E))
        d_scaled = d_capped * (1.0 - ratio * ratio)
    return weights, d_capped, d_scaled


@triton.jit
def row_facts(lse, delta, places, exist):
    """(base-2 logarithm of the denominator, delta) of query rows."""
    logs = finite_or_zero(tl.load(lse + places, mask=exist, other=float("inf")) * LOG2_OF_E)
    return logs, tl.load(delta + places, mask=exist, other=0.0)
