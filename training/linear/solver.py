"""L2-regularised linear classifiers for all children of a node at once, by dual coordinate descent, compiled by numba.

The squared hinge: Hsieh et al. 2008, Algorithm 3, minimises ½‖w‖² + Σ_i C_i max(0, 1 − y_i w·x_i)² one example at a time. The logistic
loss: Yu, Huang and Lin 2011 minimise ½‖w‖² + Σ_i C_i log(1 + exp(−y_i w·x_i)) likewise; here targets z may be fractions, which minimises
½‖w‖² + Σ_i C_i [z_i log(1 + exp(−w·x_i)) + (1 − z_i) log(1 + exp(w·x_i))] (XReg Eq. 5) with one dual β = C (z − σ(w·x)) an example.
Started at w₀ instead of 0, all minimise ½‖w − w₀‖² + …. The children of a node share their examples and their problems are independent,
so one pass over an example's features serves all of them: their weights lie side by side, and each feature is a few vector instructions
instead of a gather per child. Features are renumbered by node, which keeps the weights in the cache.

Only loops over examples are compiled; the rest is NumPy, which needs no compiler at the first start.

Legend: R examples of a node, K children, F features of those examples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Float32, Int32, Int64
from espalier.compiled_code import compiled

from ..data.csr import Csr
from ..linear.examples import Examples
from ..linear.node_scorers import NodeScorers
from ..specification.linear import LinearOptions

BLOCK = 64
"""Children whose weights lie side by side: more of them leave the cache."""
LANES = 16
"""Blocks are padded to this many float32 numbers."""
FAST = {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}
LEAST_RATE = 1e-4
"""The rate of a child that is a positive of no point."""
STEPS, NEAR, FAR = 20, 1e-3, 30.0
"""For a logistic example: most Newton steps, the step that is the last one, and the largest margin."""


class Rows(NamedTuple):
    """The features of a node's examples, renumbered.

    begin   int64[R + 1]: where each example's entries begin · number int32, value float32: its features and their values
    square  float32[R]: each example's squared length, the bias's feature included
    """

    begin: Array
    number: Array
    value: Array
    square: Array


class Targets(NamedTuple):
    """Which children each example is a positive of, and at what cost; see Examples."""

    positive_from: Array
    child: Array
    cost: Array
    target: Array
    negative_cost: Array


class Descent(NamedTuple):
    """When the descent stops, and what it minimises; see LinearOptions."""

    logistic: bool
    tolerance: Any
    passes: int
    bias: Any


class Block(NamedTuple):
    """The state of one block of children, padded to `width`.

    weights  float32[F + 1, width]: the last row is the bias's
    dual     float32[R, width]: α ≥ 0 of the hinge, α y of the logistic loss
    sign     float32[width]: 2z − 1 of the current example, for z ∈ {0, 1} ±1; −1 between examples
    half_cost  float32[width]: 1 / 2C of the current example
    score, step      float32[width]: of the current example
    first, size      the block's first child, and how many it has
    """

    weights: Array
    dual: Array
    sign: Array
    half_cost: Array
    score: Array
    step: Array
    first: int
    size: int


def train_children(
    points: Csr, examples: Examples, children: int, centroids: Csr | None, options: LinearOptions, number_of: Int32, seed: int
) -> NodeScorers:
    """The scorers of a node's children, without weights below the threshold.

    centroids  float32[K, F]: each child's weights are regularised towards `options.prior` times its row, and its bias towards
               −prior / 2, halfway between a point that shares nothing with the row and the row itself; None: towards 0. With an
               intercept of "base-rate", biases are regularised towards the log-odds of the child's mean target besides
    number_of  int32[features of the data], −1 everywhere before and after
    """
    extra = np.empty(0, np.int32) if centroids is None else centroids.indices
    features = _number_features(points, examples.points, extra, number_of)
    rows = _renumbered(points, examples.points, number_of, options.bias)
    weights_FK = np.zeros((len(features) + 1, children), np.float32)
    if centroids is not None:
        child = np.repeat(np.arange(children), np.diff(centroids.indptr))
        weights_FK[number_of[extra], child] = np.float32(options.prior) * centroids.data
        if options.bias > 0:
            weights_FK[-1] = -options.prior / (2 * options.bias)
    if options.intercept == "base-rate" and options.bias > 0:
        weights_FK[-1] += base_rates(examples, children) / np.float32(options.bias)
    number_of[features] = -1
    _minimise(rows, examples, options, weights_FK, seed)
    return _without_small(features, weights_FK, options)


def base_rates(examples: Examples, children: int) -> Float32:
    """float32[K]: the log-odds of each child's mean target, weighted by the points' costs; no rate is nearer to 0 or 1 than LEAST_RATE."""
    if examples.positive_target is None or examples.cost is None:
        raise ValueError("base rates are those of targets of relevance")
    cost_P = np.repeat(examples.cost, np.diff(examples.positive_from))
    sums = np.bincount(examples.positive_child, weights=examples.positive_target * cost_P, minlength=children)
    total = max(float(examples.cost.sum(dtype=np.float64)), np.finfo(np.float64).tiny)  # 0 without points
    rates = np.clip(sums / total, LEAST_RATE, 1 - LEAST_RATE)
    return np.log(rates / (1 - rates)).astype(np.float32)


def _number_features(points: Csr, rows: Int64, extra: Array, number_of: Int32) -> Int32:
    """The distinct features of some points and the `extra` ones, ascending; writes their positions into `number_of`."""
    most = int((points.indptr[rows + 1] - points.indptr[rows]).sum()) + len(extra)
    features = np.empty(min(len(number_of), most), np.int32)
    features = np.sort(features[: _distinct_features(points.indptr, points.indices, rows, extra, number_of, features)])
    number_of[features] = np.arange(len(features), dtype=np.int32)
    return features


def _renumbered(points: Csr, rows: Int64, number_of: Int32, bias: float) -> Rows:
    begin = np.concatenate([[0], np.cumsum(points.indptr[rows + 1] - points.indptr[rows])]).astype(np.int64)
    renumbered = Rows(begin, np.empty(begin[-1], np.int32), np.empty(begin[-1], np.float32), np.empty(len(rows), np.float32))
    _gather(points.indptr, points.indices, points.data, rows, number_of, np.float32(bias), renumbered)
    return renumbered


def _minimise(rows: Rows, examples: Examples, options: LinearOptions, weights_FK: Float32, seed: int) -> None:
    """Optimise the weights in place; the last row is the bias's."""
    target, cost = examples.positive_target, examples.cost
    targets = Targets(
        examples.positive_from,
        examples.positive_child,
        examples.positive_cost,
        np.ones(len(examples.positive_child), np.float32) if target is None else target,
        np.full(len(rows.square), options.known_cost, np.float32) if cost is None else cost,
    )
    descent = Descent(options.loss != "squared-hinge", np.float32(options.tolerance), options.passes, np.float32(options.bias))
    order = np.arange(len(rows.square))
    for first in range(0, weights_FK.shape[1], BLOCK):
        size = min(BLOCK, weights_FK.shape[1] - first)
        width = -(-size // LANES) * LANES
        weights = np.zeros((len(weights_FK), width), np.float32)
        weights[:, :size] = weights_FK[:, first : first + size]
        sign, half_cost, score = np.full(width, -1, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        dual = np.zeros((len(order), width), np.float32)
        block = Block(weights, dual, sign, half_cost, score, np.zeros(width, np.float32), first, size)
        _descend(rows, targets, descent, block, order, seed)
        weights_FK[:, first : first + size] = weights[:, :size]


def _without_small(features: Int32, weights_FK: Float32, options: LinearOptions) -> NodeScorers:
    sizes_FK = np.abs(weights_FK[:-1])
    least_K = np.float32(options.relative_threshold) * sizes_FK.max(0, initial=0)
    is_kept_FK = sizes_FK >= np.maximum(least_K, max(np.float32(options.threshold), np.finfo(np.float32).tiny))
    row, child = np.nonzero(is_kept_FK)
    per_row = np.bincount(row, minlength=len(features))
    used = per_row > 0
    return NodeScorers(
        row_feature=features[used],
        row_count=per_row[used].astype(np.int32),
        entry_child=child.astype(np.uint16),
        entry_weight=weights_FK[:-1][is_kept_FK],
        bias=weights_FK[-1] * np.float32(options.bias),
    )


@compiled()
def _distinct_features(indptr: Array, indices: Array, rows: Array, extra: Array, number_of: Array, features: Array) -> int:
    """Write the features of some rows and the extra ones, each once. Returns how many there are."""
    found = 0
    for row in rows:
        for e in range(indptr[row], indptr[row + 1]):
            if number_of[indices[e]] < 0:
                number_of[indices[e]] = 0
                features[found] = indices[e]
                found += 1
    for feature in extra:
        if number_of[feature] < 0:
            number_of[feature] = 0
            features[found] = feature
            found += 1
    return found


@compiled()
def _gather(indptr: Array, indices: Array, values: Array, rows: Array, number_of: Array, bias: Any, out: Rows) -> None:
    """Write the entries of some rows one after the other, their features renumbered, and each row's squared length with its bias."""
    k = 0
    for r in range(len(rows)):
        square = bias * bias
        for e in range(indptr[rows[r]], indptr[rows[r] + 1]):
            out.number[k], out.value[k] = number_of[indices[e]], values[e]
            square += values[e] * values[e]
            k += 1
        out.square[r] = square


@compiled(fastmath=FAST, error_model="numpy")
def _descend(rows: Rows, targets: Targets, descent: Descent, block: Block, order: Array, seed: int) -> None:
    """Passes over the examples in random orders, until the projected gradients of a pass are within the tolerance.

    One function on purpose, with the tuples unpacked: a function that gets arrays counts the references of each, here once an example.
    """
    begin, number, value, squares = rows
    positive_from, positive_child, positive_cost, positive_target, negative_cost = targets
    logistic, tolerance, passes, bias = descent
    weights, dual, sign, half_cost, score, step, first, size = block
    last, width = weights.shape[0] - 1, weights.shape[1]
    one, zero, half = np.float32(1), np.float32(0), np.float32(0.5)
    random = np.uint64(seed) * np.uint64(2654435761) + np.uint64(first + 1)
    for _ in range(passes):
        for a in range(len(order) - 1, 0, -1):
            random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            b = np.int64((random >> np.uint64(33)) % np.uint64(a + 1))
            order[a], order[b] = order[b], order[a]
        highest, lowest = np.float32(-np.float32(1e30)), np.float32(1e30)
        for r in order:
            # score: w · x of each child
            for c in range(width):
                score[c] = weights[last, c] * bias
            for e in range(begin[r], begin[r + 1]):
                x, weight = value[e], weights[number[e]]
                for c in range(width):
                    score[c] += x * weight[c]
            of_negative = half / negative_cost[r]
            for c in range(width):
                half_cost[c] = of_negative
            for p in range(positive_from[r], positive_from[r + 1]):
                if first <= positive_child[p] < first + size:
                    sign[positive_child[p] - first] = positive_target[p] + positive_target[p] - one
                    half_cost[positive_child[p] - first] = half / positive_cost[p]
            # The example's duals move to their optimum; for the logistic loss the margin's change takes the place of the gradient.
            alpha, square, moved = dual[r], squares[r], zero
            if logistic:
                for c in range(size):
                    after, push = _logistic(score[c], square, half / half_cost[c], half + half * sign[c], alpha[c])
                    highest, lowest = max(highest, abs(push)), min(lowest, -abs(push))
                    step[c] = after - alpha[c]
                    alpha[c] = after
                    moved = max(moved, abs(step[c]))
            else:
                for c in range(width):
                    gradient = sign[c] * score[c] - one + half_cost[c] * alpha[c]
                    projected = gradient if alpha[c] > zero else min(gradient, zero)
                    highest, lowest = max(highest, projected), min(lowest, projected)
                    after = max(alpha[c] - gradient / (square + half_cost[c]), zero)
                    step[c] = (after - alpha[c]) * sign[c]
                    alpha[c] = after
                    moved = max(moved, abs(step[c]))
            for p in range(positive_from[r], positive_from[r + 1]):
                if first <= positive_child[p] < first + size:
                    sign[positive_child[p] - first] = -one
            if moved > np.float32(1e-6):
                for e in range(begin[r], begin[r + 1]):
                    x, weight = value[e], weights[number[e]]
                    for c in range(width):
                        weight[c] += x * step[c]
                for c in range(width):
                    weights[last, c] += bias * step[c]
        if highest - lowest <= tolerance:
            break


@compiled(fastmath=FAST, error_model="numpy")
def _logistic(margin: Any, square: Any, cost: Any, target: Any, dual: Any) -> tuple[Any, Any]:
    """The optimal dual of one example while the others stay, and by how much its margin w·x moves.

    The margin t after the step and the new dual C (z − σ(t)) satisfy t − margin = ‖x‖² (C (z − σ(t)) − β). The difference of both sides
    increases with t and has its only inflection at t = 0, so Newton's method, kept on the root's side of 0, converges.
    """
    one, zero, reach = np.float32(1), np.float32(0), square * cost
    lacking = one - target
    at_zero = square * dual - margin - reach * (np.float32(0.5) - lacking)
    t = min(max(margin, zero), np.float32(FAR)) if at_zero < zero else max(min(margin, zero), np.float32(-FAR))
    for _ in range(STEPS):
        share = one / (one + np.exp(t))
        step = (t - margin - reach * (share - lacking) + square * dual) / (one + reach * share * (one - share))
        after = t - step
        after = min(max(after, zero), np.float32(FAR)) if at_zero < zero else max(min(after, zero), np.float32(-FAR))
        step, t = after - t, after
        if abs(step) < np.float32(NEAR):
            break
    return cost * (one / (one + np.exp(t)) - lacking), t - margin
