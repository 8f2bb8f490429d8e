"""L2-regularised linear classifiers for all children of a node at once, by dual coordinate descent, compiled by numba.

The squared hinge: Hsieh et al. 2008, Algorithm 3, minimises ½‖w‖² + Σ_i C_i max(0, 1 − y_i w·x_i)² one example at a time. The logistic
loss: Yu, Huang and Lin 2011 minimise ½‖w‖² + Σ_i C_i log(1 + exp(−y_i w·x_i)) likewise. Begun at another place w₀ than 0, both minimise
½‖w − w₀‖² + …. The children of a node learn from the same examples, and their problems do not touch each other, so that one pass over an
example's features serves all of them: their weights lie side by side, and what is a gather per feature and child becomes a few vector
instructions per feature. Features are renumbered by node, which keeps the weights in the cache.

What is compiled is only what loops over examples; the rest is NumPy, which needs no compiler at the first start.

Legend: R examples of a node, K children, F features of those examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from training.data.csr import Csr
from training.linear.config import LinearOptions

Array = NDArray[Any]
BLOCK = 64
"""Children whose weights lie side by side: more of them leave the cache."""
LANES = 16
"""Blocks are padded to this many float32 numbers."""
FAST = {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}
STEPS, NEAR, FAR = 20, 1e-3, 30.0
"""Of a logistic example: most Newton steps, the step that is the last one, and the largest margin."""


def train_children(
    points: Csr,
    rows: NDArray[np.int64],
    positive_from: NDArray[np.int64],
    positive_child: NDArray[np.int32],
    positive_cost: NDArray[np.float32],
    centroids: Csr | None,
    children: int,
    options: LinearOptions,
    number_of: NDArray[np.int32],
    seed: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint16], NDArray[np.float32], NDArray[np.float32]]:
    """The weights of a node's children, without those below the threshold.

    rows                            int64[R]: the points that the node's children learn from
    positive_from, positive_child   int64[R + 1], int32: of which children each of them is a positive; of the others it is a negative
    positive_cost                   float32: C of each of those positives; that of negatives is the options'
    centroids                       K rows, to whose β-fold (`options.prior`) each child's weights are drawn, and its bias to −β / 2:
                                    halfway between a point like none of the child's and its row; None: to 0
    number_of                       int32[features], −1 everywhere; is so again afterwards
    Returns features int32, where each one's entries begin int64, entries' children uint16, entries' weights float32, biases float32[K].
    """
    drawn = np.empty(0, np.int32) if centroids is None else centroids.indices
    entries = points.indptr[rows + 1] - points.indptr[rows]
    begin = np.concatenate([[0], np.cumsum(entries)])
    features = np.empty(min(len(number_of), int(begin[-1]) + len(drawn)), np.int32)
    features = np.sort(features[: _features_of(points.indptr, points.indices, rows, drawn, number_of, features)])
    number_of[features] = np.arange(len(features), dtype=np.int32)
    number, value, length = np.empty(begin[-1], np.int32), np.empty(begin[-1], np.float32), np.empty(len(rows), np.float32)
    _gather(points.indptr, points.indices, points.data, rows, number_of, np.float32(options.bias), number, value, length)
    weights_FK = np.zeros((len(features) + 1, children), np.float32)
    if centroids is not None:
        child = np.repeat(np.arange(children), np.diff(centroids.indptr))
        weights_FK[number_of[drawn], child] = np.float32(options.prior) * centroids.data
        if options.bias > 0:
            weights_FK[-1] = -options.prior / (2 * options.bias)
    number_of[features] = -1

    order = np.arange(len(rows))
    for first in range(0, children, BLOCK):
        block = min(BLOCK, children - first)
        weights = np.zeros((len(features) + 1, -(-block // LANES) * LANES), np.float32)
        weights[:, :block] = weights_FK[:, first : first + block]
        _descend(
            begin, number, value, length, positive_from, positive_child, positive_cost, first, block, options.loss == "logistic",
            np.float32(options.cost), np.float32(options.tolerance), options.passes, np.float32(options.bias), order, seed, weights,
        )  # fmt: skip
        weights_FK[:, first : first + block] = weights[:, :block]

    kept_FK = np.abs(weights_FK[:-1]) >= max(np.float32(options.threshold), np.finfo(np.float32).tiny)
    row, child = np.nonzero(kept_FK)
    per_row = np.bincount(row, minlength=len(features))
    used = per_row > 0
    row_entry = np.concatenate([[0], np.cumsum(per_row[used])])
    return features[used], row_entry, child.astype(np.uint16), weights_FK[:-1][kept_FK], weights_FK[-1] * np.float32(options.bias)


@njit(cache=True, nogil=True)
def _features_of(indptr: Array, indices: Array, rows: Array, drawn: Array, number_of: Array, features: Array) -> int:
    """Write the features of some points, and those that weights are drawn to, each once. How many they are."""
    found = 0
    for row in rows:
        for e in range(indptr[row], indptr[row + 1]):
            if number_of[indices[e]] < 0:
                number_of[indices[e]] = 0
                features[found] = indices[e]
                found += 1
    for feature in drawn:
        if number_of[feature] < 0:
            number_of[feature] = 0
            features[found] = feature
            found += 1
    return found


@njit(cache=True, nogil=True)
def _gather(
    indptr: Array, indices: Array, values: Array, rows: Array, number_of: Array, bias: Any, number: Array, value: Array, length: Array
) -> None:
    """Write the entries of some points one after the other, their features renumbered, and each point's squared length with its bias."""
    k = 0
    for r in range(len(rows)):
        square = bias * bias
        for e in range(indptr[rows[r]], indptr[rows[r] + 1]):
            number[k], value[k] = number_of[indices[e]], values[e]
            square += values[e] * values[e]
            k += 1
        length[r] = square


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def _descend(
    begin: Array, number: Array, value: Array, length: Array, positive_from: Array, positive_child: Array, positive_cost: Array, first: int,
    block: int, logistic: bool, cost: Any, tolerance: Any, passes: int, bias: Any, order: Array, seed: int, weights: Array,
) -> None:  # fmt: skip
    """One block of children: `weights` float32[F + 1, width] from what they are drawn to, to the optimum; the last row is the bias's."""
    count, width, last = len(length), weights.shape[1], weights.shape[0] - 1
    dual = np.zeros((count, width), np.float32)
    score, step = np.empty(width, np.float32), np.zeros(width, np.float32)
    one, zero, half = np.float32(1), np.float32(0), np.float32(0.5)
    sign, lift = np.empty(width, np.float32), np.empty(width, np.float32)
    for c in range(width):  # of a negative; lift = 1 / 2C
        sign[c], lift[c] = -one, half / cost
    random = np.uint64(seed) * np.uint64(2654435761) + np.uint64(first + 1)
    for _ in range(passes):
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
                    lift[positive_child[p] - first] = half / positive_cost[p]
            alpha, square, moved = dual[r], length[r], zero
            if logistic:
                for c in range(block):
                    margin = sign[c] * score[c]
                    after, push = _logistic(margin, square, half / lift[c], alpha[c])
                    highest, lowest = max(highest, push), min(lowest, push)
                    step[c] = (after - alpha[c]) * sign[c]
                    alpha[c] = after
                    moved = max(moved, abs(step[c]))
            else:
                for c in range(width):
                    gradient = sign[c] * score[c] - one + lift[c] * alpha[c]
                    projected = gradient if alpha[c] > zero else min(gradient, zero)
                    highest, lowest = max(highest, projected), min(lowest, projected)
                    after = max(alpha[c] - gradient / (square + lift[c]), zero)
                    step[c] = (after - alpha[c]) * sign[c]
                    alpha[c] = after
                    moved = max(moved, abs(step[c]))
            for p in range(positive_from[r], positive_from[r + 1]):
                if first <= positive_child[p] < first + block:
                    sign[positive_child[p] - first] = -one
                    lift[positive_child[p] - first] = half / cost
            if moved > np.float32(1e-6):
                for e in range(begin[r], begin[r + 1]):
                    x, weight = value[e], weights[number[e]]
                    for c in range(width):
                        weight[c] += x * step[c]
                for c in range(width):
                    weights[last, c] += bias * step[c]
        if highest - lowest <= tolerance:
            break


@njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")
def _logistic(margin: Any, square: Any, cost: Any, alpha: Any) -> tuple[Any, Any]:
    """The best dual of one example while the others stay, and by how much its margin moves.

    The margin t after the step and the new dual C σ(−t) are tied by t − margin = ‖x‖² (C σ(−t) − α): a root of a rising function of t
    that bends at 0 alone. So Newton's steps, kept on the root's side of 0, cannot miss it.
    """
    one, zero, reach = np.float32(1), np.float32(0), square * cost
    at_zero = square * alpha - margin - np.float32(0.5) * reach
    t = min(max(margin, zero), np.float32(FAR)) if at_zero < zero else max(min(margin, zero), np.float32(-FAR))
    for _ in range(STEPS):
        share = one / (one + np.exp(t))
        step = (t - margin - reach * share + square * alpha) / (one + reach * share * (one - share))
        after = t - step
        after = min(max(after, zero), np.float32(FAR)) if at_zero < zero else max(min(after, zero), np.float32(-FAR))
        step, t = after - t, after
        if abs(step) < np.float32(NEAR):
            break
    return cost / (one + np.exp(t)), t - margin
