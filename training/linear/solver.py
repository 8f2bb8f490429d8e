"""L2-regularised squared-hinge machines for all children of a node at once, by dual coordinate descent, compiled by numba.

Hsieh et al. 2008, Algorithm 3, minimises ½‖w‖² + C Σ_i max(0, 1 − y_i w·x_i)² one example at a time; begun at another place w₀ than 0, it
minimises ½‖w − w₀‖² + …. The children of a node learn from the same examples, and their problems do not touch each other, so that one
pass over an example's features serves all of them: their weights lie side by side, and what is a gather per feature and child becomes a
few vector instructions per feature. Features are renumbered by node, which keeps the weights in the cache.

Legend: R examples of a node, K children, F features of those examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 64
"""Children whose weights lie side by side: more of them leave the cache."""
LANES = 16
"""Blocks are padded to this many float32 numbers."""
FAST = {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}


@njit(cache=True, nogil=True, fastmath=FAST)
def train_children(
    indptr: Array, indices: Array, values: Array, rows: Array, positive_from: Array, positive_child: Array, positive_lift: Array,
    prior_from: Array, prior_feature: Array, prior_value: Array, prior: Any, children: int, cost: float, tolerance: float, passes: int,
    bias: Any, threshold: Any, number_of: Array, seed: int,
) -> tuple[Array, Array, Array, Array, Array, int]:  # fmt: skip
    """The weights of a node's children, without those below the threshold.

    indptr, indices, values         training points, CSR (int64, int32, float32)
    rows                            int64[R]: the points that the node's children learn from
    positive_from, positive_child   int64[R + 1], int32: of which children each of them is a positive; of the others it is a negative
    positive_lift                   float32: 1 / 2C of each of those positives
    prior_from, …, prior            int64[K + 1], int32, float32 rows, and β: each child's weights are drawn to β times its row, instead of
                                    to 0, and its bias to −β / 2, halfway between a point like none of the child's and its row
    cost                            C of the negatives
    tolerance, passes               the largest minus the smallest projected gradient of a pass at which to stop; most passes
    bias                            value of one more feature that every point has
    number_of                       int32[features], −1 everywhere; is so again afterwards
    Returns features int32, where each one's entries begin int64, entries' children uint16, entries' weights float32, biases float32[K],
    and how many passes were made, all blocks together.
    """
    count = len(rows)
    features = np.empty(len(number_of), np.int32)
    found, entries = 0, 0
    for r in range(count):
        for e in range(indptr[rows[r]], indptr[rows[r] + 1]):
            if number_of[indices[e]] < 0:
                number_of[indices[e]] = 0
                features[found] = indices[e]
                found += 1
            entries += 1
    for e in range(len(prior_feature)):
        if number_of[prior_feature[e]] < 0:
            number_of[prior_feature[e]] = 0
            features[found] = prior_feature[e]
            found += 1
    features = np.sort(features[:found])
    for f in range(found):
        number_of[features[f]] = f
    begin = np.empty(count + 1, np.int64)
    number, value = np.empty(entries, np.int32), np.empty(entries, np.float32)
    length = np.empty(count, np.float32)
    k = 0
    for r in range(count):
        begin[r] = k
        square = np.float32(bias * bias)
        for e in range(indptr[rows[r]], indptr[rows[r] + 1]):
            number[k], value[k] = number_of[indices[e]], values[e]
            square += values[e] * values[e]
            k += 1
        length[r] = square
    begin[count] = k
    prior_number = np.empty(len(prior_feature), np.int32)
    for e in range(len(prior_feature)):
        prior_number[e] = number_of[prior_feature[e]]
    for f in range(found):
        number_of[features[f]] = -1

    kept_weights = np.zeros((found + 1, children), np.float32)
    made = 0
    order = np.arange(count)
    for first in range(0, children, BLOCK):
        block = min(BLOCK, children - first)
        width = (block + LANES - 1) // LANES * LANES
        weights = np.zeros((found + 1, width), np.float32)
        if bias > 0:
            weights[found] = -prior / (2 * bias)
        for c in range(first, min(first + block, len(prior_from) - 1)):
            for e in range(prior_from[c], prior_from[c + 1]):
                weights[prior_number[e], c - first] = prior * prior_value[e]
        made += _descend(
            begin, number, value, length, positive_from, positive_child, positive_lift, first, block, cost, tolerance, passes, bias, order,
            seed, weights,
        )  # fmt: skip
        kept_weights[:, first : first + block] = weights[:, :block]

    large, used = 0, 0
    for f in range(found):
        some = False
        for c in range(children):
            if abs(kept_weights[f, c]) >= threshold and kept_weights[f, c] != 0:
                large += 1
                some = True
        used += some
    row_feature, row_entry = np.empty(used, np.int32), np.empty(used + 1, np.int64)
    entry_child, entry_weight = np.empty(large, np.uint16), np.empty(large, np.float32)
    row, entry = 0, 0
    for f in range(found):
        before = entry
        for c in range(children):
            if abs(kept_weights[f, c]) >= threshold and kept_weights[f, c] != 0:
                entry_child[entry], entry_weight[entry] = c, kept_weights[f, c]
                entry += 1
        if entry > before:
            row_feature[row], row_entry[row] = features[f], before
            row += 1
    row_entry[used] = large
    return row_feature, row_entry, entry_child, entry_weight, kept_weights[found] * np.float32(bias), made


@njit(cache=True, nogil=True, fastmath=FAST)
def _descend(
    begin: Array, number: Array, value: Array, length: Array, positive_from: Array, positive_child: Array, positive_lift: Array, first: int,
    block: int, cost: float, tolerance: float, passes: int, bias: Any, order: Array, seed: int, weights: Array,
) -> int:  # fmt: skip
    """One block of children: `weights` float32[F + 1, width] from what they are drawn to, to the optimum; the last row is the bias's.

    Returns the passes made.
    """
    count, width, last = len(length), weights.shape[1], weights.shape[0] - 1
    dual = np.zeros((count, width), np.float32)
    sign = np.full(width, np.float32(-1))
    score, step = np.empty(width, np.float32), np.empty(width, np.float32)
    one, zero, negative_lift = np.float32(1), np.float32(0), np.float32(0.5 / cost)
    lift = np.full(width, negative_lift)
    random = np.uint64(seed) * np.uint64(2654435761) + np.uint64(first + 1)
    for done in range(passes):
        for a in range(count - 1, 0, -1):
            random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            b = np.int64((random >> np.uint64(33)) % np.uint64(a + 1))
            order[a], order[b] = order[b], order[a]
        highest, lowest = np.float32(-np.float32(1e30)), np.float32(1e30)
        for r in order:
            for c in range(width):
                score[c] = weights[last, c] * bias
            for e in range(begin[r], begin[r + 1]):
                x, weight = value[e], weights[number[e]]
                for c in range(width):
                    score[c] += x * weight[c]
            for p in range(positive_from[r], positive_from[r + 1]):
                if first <= positive_child[p] < first + block:
                    sign[positive_child[p] - first] = one
                    lift[positive_child[p] - first] = positive_lift[p]
            alpha, moved = dual[r], zero
            for c in range(width):
                gradient = sign[c] * score[c] - one + lift[c] * alpha[c]
                projected = gradient if alpha[c] > zero else min(gradient, zero)
                highest, lowest = max(highest, projected), min(lowest, projected)
                after = max(alpha[c] - gradient / (length[r] + lift[c]), zero)
                step[c] = (after - alpha[c]) * sign[c]
                alpha[c] = after
                moved = max(moved, abs(step[c]))
            for p in range(positive_from[r], positive_from[r + 1]):
                if first <= positive_child[p] < first + block:
                    sign[positive_child[p] - first] = -one
                    lift[positive_child[p] - first] = negative_lift
            if moved > np.float32(1e-6):
                for e in range(begin[r], begin[r + 1]):
                    x, weight = value[e], weights[number[e]]
                    for c in range(width):
                        weight[c] += x * step[c]
                for c in range(width):
                    weights[last, c] += bias * step[c]
        if highest - lowest <= tolerance:
            return done + 1
    return passes
