"""How well labels were found, and their relevance estimated: the figures of `benchmarks.xmc`.

Relevance is inverse propensity over its maximum among all labels, so that XMAD@5 compares with XReg's tables.

Legend: B points, I labels, M results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.arrays import Array, Float64, Int64
from espalier.label_counts import LabelCounts
from training.data.csr import as_rows
from training.data.relevance import inverse_propensities
from training.data.xmc import LabelledPoints
from training.graded_metrics import RankedErrors, almost_zero, auprc, tau_at_k
from training.graded_relevance import Relevance

A, B = 0.55, 1.5
"""Of propensities, for sets that are neither Wikipedia's nor Amazon's."""
NAMES = ("p1", "p3", "p5", "psp1", "psp3", "psp5", "r10", "r100")


@dataclass(frozen=True)
class Predictions:
    """A system's results for the test points.

    rows_BM, scores_BM  labels, best first, NO_ITEM where there is none, and their scores
    of_relevance        whether scores estimate relevance over its maximum among training labels
    zero                whether only the order counts, with values of almost 0 (XReg-zero)
    """

    rows_BM: Int64
    scores_BM: Array
    of_relevance: bool = False
    zero: bool = False


def figures_of(predictions: Predictions, train: LabelledPoints, test: LabelledPoints) -> dict[str, float]:
    """P@k, PSP@k, R@k, Tau@5 in %, XMAD@5 and AUPRC."""
    quality_figures = quality(predictions.rows_BM, test, train)
    worth_I, unit = _relevances(train)
    labels = as_rows(test.labels)
    true = Relevance(labels.indptr, labels.indices.astype(np.int64), worth_I[labels.indices], labels.width)
    scores_BM = predictions.scores_BM * (unit if predictions.of_relevance else 1)
    predicted = Relevance.of_predictions(predictions.rows_BM, scores_BM, labels.width)
    judged = almost_zero(predicted) if predictions.zero else predicted
    return {name: quality_figures[name] for name in NAMES} | {
        "xmad5": round(float(RankedErrors.of(true, judged).xmad(5).mean()), 4),
        "tau5": round(100 * tau_at_k(true, predicted, 5), 2),
        "auprc": round(auprc(true, judged), 4),
    }


def quality(found_BM: Int64, test: LabelledPoints, training: LabelledPoints) -> dict[str, float]:
    """P@k, nDCG@5, PSP@k (Jain et al. 2016, A = .55, B = 1.5) and R@k in %.

    R@k is the mean over points with labels, the others are over all points, as the repository's own scripts have them.
    """
    counts = np.diff(test.labels.indptr)
    hits_BM = np.zeros(found_BM.shape, np.bool_)
    for b in range(len(test)):
        hits_BM[b] = np.isin(found_BM[b], test.labels_of(b))
    seen = np.bincount(training.labels.indices, minlength=training.labels.shape[1])
    c = (np.log(len(training)) - 1) * (1.5 + 1) ** 0.55
    worth = 1 + c * np.exp(-0.55 * np.log(seen + 1.5))
    gain_BM = np.where(hits_BM, worth[np.maximum(found_BM, 0)], 0)
    best = [np.sort(worth[test.labels_of(b)])[::-1] for b in range(len(test))]
    row: dict[str, float] = {}
    for k in (1, 3, 5):
        row[f"p{k}"] = float(hits_BM[:, :k].mean())
        row[f"psp{k}"] = float(gain_BM[:, :k].sum() / sum(gains[:k].sum() for gains in best))
    discount = 1 / np.log2(np.arange(2, 7))
    ideal = np.array([discount[: min(5, count)].sum() for count in counts])
    with_labels = counts > 0
    row["ndcg5"] = float(((hits_BM[:, :5] * discount).sum(1)[with_labels] / ideal[with_labels]).sum() / len(test))
    for k in (10, 100):
        row[f"r{k}"] = float((hits_BM[with_labels, :k].sum(1) / counts[with_labels]).mean())
    return {name: round(100 * value, 2) for name, value in row.items()}


def _relevances(train: LabelledPoints) -> tuple[Float64, float]:
    """float64[I]: inverse propensities over the largest of all labels; and the largest of the labels that training points have."""
    counts = LabelCounts(np.bincount(train.labels.indices, minlength=train.labels.shape[1]).astype(np.int64), len(train))
    worth_I = inverse_propensities(counts, A, B)
    worth_I /= worth_I.max()
    return worth_I, float(worth_I[counts.counts_I > 0].max())
