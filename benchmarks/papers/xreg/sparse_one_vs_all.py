"""One-versus-all classifiers with few weights: ProXML's and PPD-Sparse's objectives.

ProXML (Babbar and Schölkopf 2019): the 1-norm makes a classifier robust to changes of its points' features.

    min_w ‖w‖₁ + C Σ_i max(0, 1 − t_i w·x_i)²

PPD-Sparse (Yen et al. 2017): both norms and the hinge, so that points with a margin, and most weights, are 0.

    min_w λ ‖w‖₁ + ½ ‖w‖² + C Σ_i max(0, 1 − t_i w·x_i)
    dual:  w = S_λ(v),  v = Σ_i α_i t_i x_i,  0 ≤ α_i ≤ C,   S_λ(v) = sign(v) max(0, |v| − λ)

The dual is maximised one α at a time, in passes over the points that may still move. Both solve a label exactly; the papers' own searches
reach the same optimum on larger data. Labels without points have no weights and so a score of 0, above what negatives of other labels have:
their weight of the bias is −1, what a label of all negatives has.

Legend: B points, F features and the bias's, I labels, E entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from benchmarks.papers.xreg.l1_linear import Columns, Stop, minimise
from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from espalier.compiled_code import compiled
from training.data.xmc import LabelledPoints

Array = NDArray[Any]
PROXML_STOP = Stop(tolerance=0.01, rounds=20, passes=10)
PASSES, TOLERANCE = 20, 0.05
"""Of PPD-Sparse: most passes, and the violation of optimality at which they end."""


def fit_proxml(train: LabelledPoints, cost: float = 1.0, seed: int = 1) -> LinearScores:
    """Classifiers of all labels. `cost` is C."""
    columns_BF = with_bias(train.points).tocsc()
    columns = Columns(columns_BF.indptr.astype(np.int64), columns_BF.indices, columns_BF.data)
    cost_B = np.full(len(train), cost)
    return _every_label(train, lambda sign_B, label: minimise(columns, sign_B, cost_B, True, PROXML_STOP, seed + label))


def fit_ppd_sparse(train: LabelledPoints, cost: float = 1.0, sparsity: float = 0.1, seed: int = 1) -> LinearScores:
    """Classifiers of all labels.

    cost      C
    sparsity  λ
    """
    inputs = with_bias(train.points)
    begin, square_B = inputs.indptr.astype(np.int64), np.asarray(inputs.multiply(inputs).sum(axis=1)).ravel().astype(np.float64)

    options = cost, sparsity, PASSES, TOLERANCE

    def classifier(sign_B: Array, label: int) -> Array:
        weight_F = np.zeros(inputs.shape[1])
        _maximise(begin, inputs.indices, inputs.data, square_B, sign_B, options, seed + label, weight_F)
        return weight_F

    return _every_label(train, classifier)


def _every_label(train: LabelledPoints, fit: Callable[[Array, int], Array]) -> LinearScores:
    by_label, features = train.labels.tocsc(), train.points.shape[1] + 1
    columns = []
    for label in range(train.labels.shape[1]):
        sign_B = np.full(len(train), -1.0)
        sign_B[by_label.indices[by_label.indptr[label] : by_label.indptr[label + 1]]] = 1
        if (sign_B > 0).any():
            weight_F = fit(sign_B, label)
        else:
            weight_F = np.zeros(features)
            weight_F[-1] = -1
        columns.append(csc_array(weight_F[:, None].astype(np.float32)))
    indptr = np.append(0, np.cumsum([column.nnz for column in columns]))
    data, indices = (np.concatenate([getattr(column, name) for column in columns]) for name in ("data", "indices"))
    return LinearScores(csc_array((data, indices, indptr), shape=(features, len(columns))))


@compiled(error_model="numpy")
def _maximise(begin: Array, column: Array, value: Array, square: Array, sign: Array, options: Any, seed: int, weight: Array) -> None:
    """Write the weights of PPD-Sparse's optimum."""
    cost, sparsity, passes, tolerance = options
    points = len(sign)
    dual, sums, order = np.zeros(points), np.zeros(len(weight)), np.arange(points)
    left, random, inactive = points, np.uint64(seed) * np.uint64(2654435761) + np.uint64(1), 1.0
    for _ in range(passes):
        for a in range(left - 1, 0, -1):
            random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            b = np.int64((random >> np.uint64(33)) % np.uint64(a + 1))
            order[a], order[b] = order[b], order[a]
        worst, a = 0.0, 0
        while a < left:
            i = order[a]
            gradient = -1.0
            for e in range(begin[i], begin[i + 1]):
                gradient += sign[i] * value[e] * weight[column[e]]
            if (dual[i] == 0 and gradient > inactive) or (dual[i] == cost and gradient < -inactive):
                left -= 1
                order[a], order[left] = order[left], order[a]
                continue
            a += 1
            after = min(max(dual[i] - gradient / square[i], 0.0), cost)
            change = after - dual[i]
            if change != 0:
                worst = max(worst, abs(gradient))
                dual[i] = after
                for e in range(begin[i], begin[i + 1]):
                    f = column[e]
                    sums[f] += change * sign[i] * value[e]
                    weight[f] = max(sums[f] - sparsity, 0.0) + min(sums[f] + sparsity, 0.0)
        if worst <= tolerance:
            if left == points:
                break
            left, inactive = points, np.inf  # the points that were left out must agree
        else:
            inactive = min(inactive, max(worst, tolerance))
