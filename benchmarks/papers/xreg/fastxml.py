"""FastXML and PfastreXML: forests whose hyperplanes rank labels well on either side (Prabhu and Varma 2014; Jain et al. 2016).

A node draws a side δ for each of its points and improves it in turn with the two rankings of labels that are best for the sides: nDCG of
FastXML, propensity-scored nDCG of PfastreXML (Eq. 4 with r± and δ). Then a hyperplane learns the sides by the logistic loss under the
1-norm (Eq. 4 with w), and points go where it says. A leaf has the mean relevance of its points' labels. A point's scores are the mean over
the leaves that it reaches (Eq. 3).

As the authors' programs have it: points as the files have them plus a feature of 1; a side's points cost C over its share; at most 10
points a leaf, and larger nodes that cannot be split are leaves too; 100 labels a leaf; 50 trees; C = 1. FastXML divides a point's gains by
the best DCG of as many labels, PfastreXML does not.

The tail of PfastreXML re-ranks the 1000 best: score^α · P(tail)^(1 − α), P(tail) = 1 / (1 + exp(γ ‖x − μ‖²)), x of length 1, μ the mean of
a label's points of length 1, α = .8, γ = 30. (Eq. 5 has γ / 2, the authors' program γ.)

Knows points, labels and their relevance. Does not know where relevance comes from.

Legend: B points, F features, I labels, R points of a node, N nodes, T trees, E entries, M results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.papers.xreg.l1_linear import Columns, Stop, minimise
from espalier.arrays import Array, Float32, Int64
from espalier.compiled_code import compiled
from espalier.search import NO_ITEM
from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints

STOP = Stop(tolerance=0.01, rounds=10, passes=10)
LEAST_GAIN = 1e-6
"""The mean gain of a point below which rankings and sides are not improved further."""
RE_RANKED = 1000


@dataclass(frozen=True)
class FastXmlOptions:
    """How a forest is grown; the authors' defaults.

    discount_gain  divide a point's gains by the best DCG of as many labels (FastXML), or do not (PfastreXML)
    """

    trees: int = 50
    max_leaf: int = 10
    labels_per_leaf: int = 100
    cost: float = 1.0
    bias: float = 1.0
    discount_gain: bool = True
    seed: int = 1


@dataclass(frozen=True)
class TailClassifiers:
    """μ of each label, and the parameters α and γ.

    means     float32[I, F]
    square_I  float32: ‖μ‖²
    """

    means: Csr
    square_I: Float32
    alpha: float = 0.8
    gamma: float = 30.0


class Forest(NamedTuple):
    """T trees in one numbering of nodes; an inner node has a hyperplane, a leaf has labels.

    root           int64[T]
    child          int32[N, 2]: where points with w·x < 0 and the others go; −1 at leaves
    weight_from    int64[N + 1], weight_feature int32, weight float32: hyperplanes; feature F is the bias's
    label_from     int64[N + 1], label int32, relevance float32: labels of leaves
    """

    root: Array
    child: Array
    weight_from: Array
    weight_feature: Array
    weight: Array
    label_from: Array
    label: Array
    relevance: Array


class Rows(NamedTuple):
    """A sparse matrix by rows, as compiled functions take it."""

    begin: Array
    column: Array
    value: Array


@dataclass(frozen=True, eq=False)
class FastXml:
    """A forest that scores labels, and its tail classifiers, if any."""

    forest: Forest
    labels: int
    bias: float
    tail: TailClassifiers | None

    def best(self, points: Csr, most: int) -> tuple[Int64, Float32]:
        """int64[B, M] and float32[B, M]: the best labels of points and their scores, NO_ITEM and 0 where there are none."""
        label_BM = np.full((points.shape[0], most), NO_ITEM, np.int64)
        score_BM = np.zeros((points.shape[0], most), np.float32)
        means = (
            _rows(self.tail.means)
            if self.tail
            else Rows(np.zeros(self.labels + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
        )
        square_I = self.tail.square_I if self.tail else np.zeros(self.labels, np.float32)
        alpha, gamma = (self.tail.alpha, self.tail.gamma) if self.tail else (1.0, 0.0)
        _predict(_rows(points), points.shape[1], self.forest, self.bias, means, square_I, alpha, gamma, label_BM, score_BM)
        return label_BM, score_BM

    def arrays(self) -> dict[str, Array]:
        tail = {} if self.tail is None else _rows(self.tail.means)._asdict()
        return self.forest._asdict() | {f"tail_{name}": array for name, array in tail.items()}


def fit_fastxml(train: LabelledPoints, options: FastXmlOptions, tail: TailClassifiers | None = None) -> FastXml:
    """A forest over points as they are, whose labels' weights are their relevance."""
    points, labels = _rows(train.points), _rows(train.labels)
    discount_I = 1 / np.log2(np.arange(2, train.labels.shape[1] + 2))
    best_dcg = np.append(1.0, np.cumsum(discount_I))
    gain_B = 1 / best_dcg[np.diff(labels.begin)] if options.discount_gain else np.ones(len(train))
    growing_forest = _Growing(points, labels, gain_B, discount_I, train.points.shape[1], options)
    for tree_number in range(options.trees):
        growing_forest.grow(np.random.default_rng((options.seed, tree_number)))
    return FastXml(growing_forest.forest(), train.labels.shape[1], options.bias, tail)


def tail_classifiers(train: LabelledPoints) -> TailClassifiers:
    """The means of labels' points of length 1 (Eq. 7); labels without points have 0."""
    listed = train.labels.copy()
    listed.data = np.ones_like(listed.data)
    counts_I = np.maximum(np.bincount(listed.indices, minlength=listed.shape[1]), 1)
    listed.data /= counts_I[listed.indices]
    means: Csr = (listed.T @ normalised(train.points)).tocsr().astype(np.float32)
    return TailClassifiers(means, np.asarray(means.multiply(means).sum(axis=1), np.float32).ravel())


class _Growing:
    def __init__(self, points: Rows, labels: Rows, gain_B: Array, discount_I: Array, features: int, options: FastXmlOptions) -> None:
        self._points, self._labels, self._gain_B, self._discount_I = points, labels, gain_B, discount_I
        self._options = options
        self._count_F, self._number_I = np.zeros(features + 1, np.int64), np.full(len(discount_I), -1, np.int64)
        self._roots: list[int] = []
        self._child: list[tuple[int, int]] = []
        self._weights: list[tuple[Array, Array]] = []
        self._leaves: list[tuple[Array, Array]] = []

    def grow(self, rng: np.random.Generator) -> None:
        self._roots.append(len(self._child))
        open_nodes = [(self._node(), np.arange(len(self._gain_B)))]
        while open_nodes:
            node, rows = open_nodes.pop()
            split = self._split(rows, rng) if len(rows) > self._options.max_leaf else None
            if split is None:
                self._leaves[node] = _leaf(self._labels, rows, self._number_I, self._options.labels_per_leaf)
                continue
            side_R, self._weights[node] = split
            self._child[node] = (self._node(), self._node())
            open_nodes += [(self._child[node][0], rows[~side_R]), (self._child[node][1], rows[side_R])]

    def _node(self) -> int:
        nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self._child.append((-1, -1))
        self._weights.append(nothing)
        self._leaves.append(nothing)
        return len(self._child) - 1

    def _split(self, rows: Array, rng: np.random.Generator) -> tuple[Array, tuple[Array, Array]] | None:
        """Which points go right, and the hyperplane; None if all would go the same way."""
        side_R = rng.random(len(rows)) < 0.5
        _rank_and_assign(self._labels, rows, self._gain_B, self._discount_I, self._number_I, side_R)
        right_share = float(side_R.mean())
        if right_share in (0, 1):
            return None
        features, columns = _columns(self._points, rows, self._count_F, self._options.bias)
        cost_R = self._options.cost / np.where(side_R, right_share, 1 - right_share)
        weight_F = minimise(columns, np.where(side_R, 1.0, -1.0), cost_R, False, STOP, int(rng.integers(1 << 31)))
        side_R = _products(columns, weight_F, len(rows)) >= 0
        kept_F = weight_F != 0
        return None if side_R.all() or not side_R.any() else (side_R, (features[kept_F], weight_F[kept_F].astype(np.float32)))

    def forest(self) -> Forest:
        feature, weight = _joined(self._weights)
        label, relevance = _joined(self._leaves)
        roots, child = np.array(self._roots), np.array(self._child, np.int32)
        return Forest(roots, child, _offsets(self._weights), feature, weight, _offsets(self._leaves), label, relevance)


def _joined(node_arrays: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.concatenate([arrays[0] for arrays in node_arrays]), np.concatenate([arrays[1] for arrays in node_arrays])


def _offsets(node_arrays: list[tuple[Array, Array]]) -> Int64:
    return np.append(0, np.cumsum([len(arrays[0]) for arrays in node_arrays])).astype(np.int64)


def _rows(matrix: Csr) -> Rows:
    matrix.sort_indices()
    return Rows(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data.astype(np.float32))


@compiled(error_model="numpy")
def _rank_and_assign(labels: Rows, rows: Array, gain: Array, discount: Array, number: Array, side: Array) -> None:
    """Improve sides and rankings in turn, until the mean gain hardly rises. `number` is −1 everywhere, and is so again afterwards."""
    begin, column, value = labels
    known = 0
    for row in rows:
        for e in range(begin[row], begin[row + 1]):
            if number[column[e]] < 0:
                number[column[e]] = known
                known += 1
    before = -np.inf
    while True:
        total, difference, achieved = np.zeros((2, known)), np.zeros(known), 0.0
        for r in range(len(rows)):
            row, s = rows[r], 1 if side[r] else 0
            for e in range(begin[row], begin[row + 1]):
                total[s, number[column[e]]] += value[e] * gain[row]
        for s in range(2):
            order = np.argsort(-total[s], kind="mergesort")
            for place in range(known):
                difference[order[place]] += discount[place] if s == 1 else -discount[place]
                achieved += discount[place] * total[s, order[place]]
        achieved /= len(rows)
        for r in range(len(rows)):
            row, better = rows[r], 0.0
            for e in range(begin[row], begin[row + 1]):
                better += value[e] * gain[row] * difference[number[column[e]]]
            if better != 0:
                side[r] = better > 0
        if achieved - before < LEAST_GAIN:
            break
        before = achieved
    for row in rows:
        for e in range(begin[row], begin[row + 1]):
            number[column[e]] = -1


@compiled()
def _columns(points: Rows, rows: Array, count: Array, bias: float) -> tuple[Array, Columns]:
    """The features of some points, ascending, the bias's last, and their columns. `count` is 0 everywhere, and is so again afterwards."""
    begin, column, value = points
    entries = 0
    for row in rows:
        for e in range(begin[row], begin[row + 1]):
            count[column[e]] += 1
        entries += begin[row + 1] - begin[row]
    features = np.append(np.flatnonzero(count), len(count) - 1).astype(np.int32)
    start = np.zeros(len(features) + 1, np.int64)
    for f in range(len(features) - 1):
        start[f + 1] = start[f] + count[features[f]]
        count[features[f]] = start[f]
    start[-1] = entries + len(rows)
    owner, number = np.empty(entries + len(rows), np.int32), np.empty(entries + len(rows), np.float32)
    for r in range(len(rows)):
        for e in range(begin[rows[r]], begin[rows[r] + 1]):
            at = count[column[e]]
            owner[at], number[at] = r, value[e]
            count[column[e]] += 1
        owner[entries + r], number[entries + r] = r, bias
    for f in range(len(features) - 1):
        count[features[f]] = 0
    return features, Columns(start, owner, number)


@compiled()
def _products(columns: Columns, weight: Array, points: int) -> Array:
    """float32[R]: w·x, summed as `_predict` sums it up to rounding."""
    begin, row, value = columns
    product = np.zeros(points)
    for f in range(len(weight)):
        if weight[f] != 0:
            for e in range(begin[f], begin[f + 1]):
                product[row[e]] += weight[f] * value[e]
    return product


@compiled()
def _leaf(labels: Rows, rows: Array, number: Array, most: int) -> tuple[Array, Array]:
    """The labels of most relevance in a leaf, ascending, with the mean over its points. `number` is as above."""
    begin, column, value = labels
    found, mean = [np.int32(0) for _ in range(0)], [0.0 for _ in range(0)]
    for row in rows:
        for e in range(begin[row], begin[row + 1]):
            if number[column[e]] < 0:
                number[column[e]] = len(found)
                found.append(column[e])
                mean.append(0.0)
            mean[number[column[e]]] += value[e] / len(rows)
    for label in found:
        number[label] = -1
    every, means = np.array(found, dtype=np.int32), np.array(mean, dtype=np.float32)
    kept = np.sort(np.argsort(-means, kind="mergesort")[:most])
    return every[kept], means[kept]


@compiled(error_model="numpy")
def _predict(
    points: Rows,
    features: int,
    forest: Forest,
    bias: float,
    means: Rows,
    square: Array,
    alpha: float,
    gamma: float,
    label_BM: Array,
    score_BM: Array,
) -> None:
    begin, column, value = points
    root, child, weight_from, weight_feature, weight, label_from, label, relevance = forest
    x, score = np.zeros(features + 1), np.zeros(len(square))
    x[features] = bias
    touched = np.empty(len(square), np.int64)
    for b in range(len(begin) - 1):
        norm, found = 0.0, 0
        for e in range(begin[b], begin[b + 1]):
            x[column[e]] = value[e]
            norm += value[e] * value[e]
        norm = np.sqrt(norm) if norm > 0 else 1.0
        for tree in range(len(root)):
            node = root[tree]
            while child[node, 0] >= 0:
                product = 0.0
                for e in range(weight_from[node], weight_from[node + 1]):
                    product += weight[e] * x[weight_feature[e]]
                node = child[node, 1] if product >= 0 else child[node, 0]
            for e in range(label_from[node], label_from[node + 1]):
                if score[label[e]] == 0:
                    touched[found] = label[e]
                    found += 1
                score[label[e]] += relevance[e] / len(root)
        every = np.sort(touched[:found])
        best = every[np.argsort(-score[every], kind="mergesort")[:RE_RANKED]]
        final = score[best]
        if alpha < 1:
            for k in range(len(best)):
                product = 0.0
                for e in range(means.begin[best[k]], means.begin[best[k] + 1]):
                    product += means.value[e] * x[means.column[e]]
                distance = square[best[k]] + 1 - 2 * product / norm
                final[k] = final[k] ** alpha * (1 / (1 + np.exp(gamma * distance))) ** (1 - alpha)
        order = np.argsort(-final, kind="mergesort")[: label_BM.shape[1]]
        for place in range(len(order)):
            label_BM[b, place], score_BM[b, place] = best[order[place]], final[order[place]]
        for k in range(found):
            score[touched[k]] = 0
        for e in range(begin[b], begin[b + 1]):
            x[column[e]] = 0
