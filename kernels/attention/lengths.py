"""Lengths of sequences that vary, and how many pairs of query and key see each other."""

from __future__ import annotations

from kernelwright.kernels.attention.workload import Problem


def packed_lengths(total: int, count: int, longest: int, seed: int = 0) -> list[int]:
    """`count` uneven lengths of at most `longest` that sum up to `total`, always the same; one is `longest`.

    They stand for the lengths of a batch of real requests, where they are not given.
    """
    if not count:
        return []
    lengths, left = [longest], total - longest
    state = 12345 + seed
    for position in range(1, count):
        state = (1103515245 * state + 12345) % 2**31
        others = count - position
        mean = left / others
        # what is left must fit into the others' places
        least = max(0, left - (others - 1) * longest)
        wish = int(mean * (0.25 + 1.5 * state / 2**31)) if others > 1 else left
        lengths.append(min(max(wish, least), longest, left))
        left -= lengths[-1]
    # the longest stands in the middle, as no kernel may rely on an order
    middle = count // 2
    lengths[0], lengths[middle] = lengths[middle], lengths[0]
    return lengths


def sequences(p: Problem) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence of the batch, as make_inputs cuts packed ones."""
    if not p.packed:
        return [(p.q_length, p.kv_length)] * p.batch
    queries = packed_lengths(p.total_q, p.batch, p.q_length)
    if (p.total_q, p.q_length) == (p.total_k, p.kv_length):
        return list(zip(queries, queries, strict=True))
    return list(zip(queries, packed_lengths(p.total_k, p.batch, p.kv_length, 1), strict=True))


def paged_lengths(p: Problem) -> list[int]:
    """Keys of each sequence of a paged cache: close to Skv, ending at different places of the last page."""
    return [max(p.kv_length - (5 * turn) % p.page, min(p.q_length, p.kv_length)) for turn in range(p.batch)]


def visible_pairs(p: Problem) -> int:
    """Pairs of query and key, over all sequences and heads, that causal and window leave; masks count as full."""
    counts = {pair: _visible(p, *pair) for pair in set(sequences(p))}
    return p.heads * sum(counts[pair] for pair in sequences(p))


def _visible(p: Problem, queries: int, keys: int) -> int:
    shift = 0 if p.causal == "top_left" else keys - queries

    def upto(last: int) -> int:
        """Keys 0..last of the places i' - and below, summed over the queries i' = shift .. shift + queries - 1."""
        low, high = shift + last, shift + last + queries - 1
        full = max(0, min(high - (keys - 1) + 1, queries))
        start, end = max(low, 0), min(high, keys - 2)
        partial = (start + end + 2) * (end - start + 1) // 2 if end >= start else 0
        return full * keys + partial

    seen = upto(0) if p.causal else queries * keys
    # keys at or before i' - window are out of sight
    return seen - upto(-p.window) if p.window else seen
