"""Weights between items by regression: how much each item of a list says of another one that the rest of the list does not say already.

Follows SLIM with selected features (Ning and Karypis 2011), without its ℓ1 term. For each item b

    w_b = argmin_{w ≥ 0} ½ · wᵀ (G + l2 · g · 1) w − Σ_a w_a · G[a, b],     G = XᵀX,   g the mean number of events of an item, each len^−γ

X holds len^(−γ / 2) for each event of a user's list, so G[a, b] is `after` + `before` of `cooccurrence.py` (but for pairs farther apart
than its window). Only the CANDIDATES items a with the largest G[a, b] / √(events of a) have a weight. Items that are often together share
what they explain, where counts add it up: with two volumes of a series in the history, a third one does not count twice.

Coordinate descent needs no inverse, and its minimum is finite even if pairs are missing in the counts. Lists have no order here. In lists
with an order this found less than counts that fall with the distance, and nothing beside them. Memory is 56 bytes for each pair of an item
and a candidate.

Knows counts. Does not know lists or how the weights are used.

Legend: I items, N pairs, K candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_array

from espalier.arrays import Array
from espalier.compiled_code import compiled

from ..neighbours.cooccurrence import Counts
from ..neighbours.neighbour_lists import Pairs
from ..retrieval.scores import keep_best

CANDIDATES = 100
"""Twice as many found no more on two logs and a little more on a third, half as many a little less on one."""
ROUNDS, TOLERANCE = 50, 0.01
"""A descent ends after so many rounds, or when no weight changes by more than this share of the largest; most need five."""
BLOCK = 1 << 10
"""Items of a compiled call, at most a second or two; an interrupt ends the work after it."""
LONG = 1 << 12
"""Rows with more entries are sorted and searched for candidates, others are read: a few items may occur with nearly all others."""
STEP_S = 1.6e-9
"""Seconds of one of `steps`, on a core of an AMD EPYC."""


def slim(counts: Counts, l2: float) -> Pairs:
    """The weights w_b[a] in the row of a, divided by the mean over items of the largest in a row."""
    total_I = counts.total_I
    items = len(total_I)
    penalty = l2 * float(total_I[total_I > 0].mean()) if total_I.any() else 1.0
    bound_I1 = np.concatenate([[0], np.cumsum(np.minimum(np.diff(counts.offset_I1), CANDIDATES))]).astype(np.int64)
    source_N, weight_N = np.empty(bound_I1[-1], np.int32), np.zeros(bound_I1[-1], np.float32)
    item_N = counts.item_N
    if np.diff(counts.offset_I1).max(initial=0) > LONG:
        item_N = item_N.copy()
    rows = counts.offset_I1, item_N, counts.after_N + counts.before_N
    sort_rows(*rows, LONG)
    for first in range(0, items, BLOCK):
        _descend(rows, total_I, penalty, first, min(items, first + BLOCK), bound_I1, source_N, weight_N)
    is_used = weight_N > 0
    target_N = np.repeat(np.arange(items), np.diff(bound_I1))
    by_source = csr_array((weight_N[is_used], (source_N[is_used], target_N[is_used])), shape=(items, items))
    has_weights = np.diff(by_source.indptr) > 0
    largest = np.maximum.reduceat(by_source.data, by_source.indptr[:-1][has_weights]).mean() if has_weights.any() else 1.0
    return Pairs(by_source.indptr.astype(np.int64), by_source.indices.astype(np.int32), (by_source.data / largest).astype(np.float32))


def steps(counts: Counts) -> float:
    """About how many steps of the inner loops `slim` takes."""
    length_I = np.diff(counts.offset_I1)
    read_N = np.minimum(length_I, LONG)[counts.item_N]
    kept_I = np.minimum(length_I, CANDIDATES)
    return float(kept_I.sum() * (read_N.mean() if len(read_N) else 0.0) + 8 * np.square(kept_I).sum() + len(counts.item_N))


@compiled()
def sort_rows(offset_I1: Array, item_N: Array, value_N: Array, least: int) -> None:
    """The entries of each row that has more than `least`, by ascending item, in place."""
    for a in range(len(offset_I1) - 1):
        if offset_I1[a + 1] - offset_I1[a] > least:
            row = slice(offset_I1[a], offset_I1[a + 1])
            order = np.argsort(item_N[row])
            item_N[row], value_N[row] = item_N[row][order], value_N[row][order]


@compiled()
def _descend(rows: Any, total_I: Array, penalty: float, first: int, last: int, bound_I1: Array, source_N: Array, weight_N: Array) -> None:
    """The candidates of the items first … last − 1, and their weights, each item's from bound_I1 of it on."""
    offset_I1, item_N, count_N = rows
    place_I = np.full(len(total_I), -1, np.int64)
    gram_KK, gain_K, weight_K = np.empty((CANDIDATES, CANDIDATES)), np.empty(CANDIDATES), np.empty(CANDIDATES)
    kept_K, score_K = np.empty(CANDIDATES, np.int64), np.empty(CANDIDATES, np.float64)
    for b in range(first, last):
        row = slice(offset_I1[b], offset_I1[b + 1])
        likeness = np.empty(row.stop - row.start, np.float32)
        for n in range(len(likeness)):
            a = item_N[row.start + n]
            likeness[n] = -np.inf if a == b else count_N[row.start + n] / np.sqrt(total_I[a])
        kept = keep_best(item_N[row], likeness, len(likeness), kept_K[: bound_I1[b + 1] - bound_I1[b]], score_K)
        for k in range(kept):
            place_I[kept_K[k]] = k
        gram_KK[:kept, :kept] = 0
        for k in range(kept):
            a = kept_K[k]
            if offset_I1[a + 1] - offset_I1[a] > LONG:
                others = item_N[offset_I1[a] : offset_I1[a + 1]]
                for other in range(kept):
                    n = np.searchsorted(others, kept_K[other])
                    if n < len(others) and others[n] == kept_K[other]:
                        gram_KK[k, other] = count_N[offset_I1[a] + n]
            else:
                for n in range(offset_I1[a], offset_I1[a + 1]):
                    if place_I[item_N[n]] >= 0:
                        gram_KK[k, place_I[item_N[n]]] = count_N[n]
            gram_KK[k, k] += total_I[a] + penalty
        for n in range(row.start, row.stop):
            if place_I[item_N[n]] >= 0:
                gain_K[place_I[item_N[n]]] = count_N[n]
        weight_K[:kept] = 0
        for _ in range(ROUNDS):
            change = largest = 0.0
            for k in range(kept):
                weight = max(0.0, weight_K[k] + gain_K[k] / gram_KK[k, k])
                step = weight - weight_K[k]
                if step != 0:
                    weight_K[k] = weight
                    for other in range(kept):
                        gain_K[other] -= step * gram_KK[k, other]
                change, largest = max(change, abs(step)), max(largest, weight)
            if change <= TOLERANCE * largest:
                break
        for k in range(kept):
            place_I[kept_K[k]] = -1
            source_N[bound_I1[b] + k], weight_N[bound_I1[b] + k] = kept_K[k], weight_K[k]
