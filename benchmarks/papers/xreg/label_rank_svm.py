"""Rank SVM of labels: for each label, its points before all others (Joachims 2002; Lee and Lin 2014).

    min_w ½ ‖w‖² + C y_l / N Σ_{i has l} Σ_{j has not} max(0, 1 − ⟨w, x_i − x_j⟩)²

N counts the points without the label, so C is the cost of one that has it. At most 4,000 of them take part, drawn at random. y_l is the
label's mean relevance. Sums over pairs take a sort of the scores, not the pairs themselves (Lee and Lin 2014). L-BFGS minimises.
Differences have no bias, so the scores of different labels share no scale, and estimate nothing.

Legend: B points, F features and the bias's, I labels, P points with a label, N points without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import minimize

from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from espalier.arrays import Bool, Float64, Int64
from training.data.csr import Csr
from training.data.xmc import LabelledPoints

STEPS = 30
MOST_WITHOUT = 4000


def fit_label_rank_svm(train: LabelledPoints, cost: float, seed: int = 1) -> LinearScores:
    """Weights of all labels; 0 of labels that no point or every point has. `cost` is C."""
    inputs: Csr = with_bias(train.points).astype(np.float64)
    weight_FI = np.zeros((inputs.shape[1], train.labels.shape[1]), np.float32)
    for label, rows_R, having, unit in problems(train.labels, seed):
        weight_FI[:, label] = _ranker(inputs[rows_R], having, cost * unit)
    return LinearScores(weight_FI)


def problems(labels: Csr, seed: int) -> Iterator[tuple[int, Int64, int, float]]:
    """The labels that some points have and some have not.

    Yields (label, int64[R]: the points that take part, those with the label first, how many these are, y_l / N).
    """
    by_label, every = labels.tocsc(), np.arange(labels.shape[0])
    for label in range(labels.shape[1]):
        entries = slice(by_label.indptr[label], by_label.indptr[label + 1])
        having = by_label.indices[entries].astype(np.int64)
        others = np.setdiff1d(every, having)
        if len(having) and len(others):
            if len(others) > MOST_WITHOUT:
                others = np.random.default_rng((seed, label)).choice(others, MOST_WITHOUT, replace=False)
            yield label, np.concatenate([having, others]), len(having), float(by_label.data[entries].mean()) / len(others)


def _ranker(inputs: Csr, having: int, cost: float) -> Float64:
    """float64[F]: the weights that rank the first `having` points before the others."""
    has_B = np.arange(inputs.shape[0]) < having

    def objective(weight_F: Float64) -> tuple[float, Float64]:
        loss, slope_B = pair_loss(inputs @ weight_F, has_B)
        return float(weight_F @ weight_F) / 2 + cost * loss, weight_F + cost * (inputs.T @ slope_B)

    weight_F: Float64 = minimize(objective, np.zeros(inputs.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": STEPS}).x
    return weight_F


def pair_loss(score_B: Float64, has_B: Bool) -> tuple[float, Float64]:
    """Σ max(0, 1 − s_i + s_j)² over points i with the label and j without it, and its derivative by each score, in O(B log B)."""
    high_P, low_N = np.sort(score_B[has_B] - 1), np.sort(score_B[~has_B])
    # Of one with the label: the sums over those without it whose score is above its own less 1, and the other way round.
    above_P, above_1, above_2 = _sums_above(low_N, high_P)
    below_N, below_1, _ = _sums_below(high_P, low_N)
    loss = float((above_2 - 2 * high_P * above_1 + high_P**2 * above_P).sum())
    slope_B = np.empty(len(score_B))
    slope_B[np.flatnonzero(has_B)[np.argsort(score_B[has_B] - 1)]] = -2 * (above_1 - high_P * above_P)
    slope_B[np.flatnonzero(~has_B)[np.argsort(score_B[~has_B])]] = 2 * (low_N * below_N - below_1)
    return loss, slope_B


def _sums_above(sorted_N: Float64, bound_P: Float64) -> tuple[Float64, Float64, Float64]:
    """Of the numbers above each bound: how many, their sum, and that of their squares."""
    at_P = np.searchsorted(sorted_N, bound_P, side="right")
    sums = [np.append(np.cumsum(part[::-1])[::-1], 0.0)[at_P] for part in (sorted_N, sorted_N**2)]
    return (len(sorted_N) - at_P).astype(np.float64), sums[0], sums[1]


def _sums_below(sorted_P: Float64, bound_N: Float64) -> tuple[Float64, Float64, Float64]:
    """Of the numbers below each bound: how many, their sum, and that of their squares."""
    at_N = np.searchsorted(sorted_P, bound_N, side="left")
    sums = [np.append(0.0, np.cumsum(part))[at_N] for part in (sorted_P, sorted_P**2)]
    return at_N.astype(np.float64), sums[0], sums[1]
