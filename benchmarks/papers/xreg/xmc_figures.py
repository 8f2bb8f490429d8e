"""How well labels were found, and their relevance estimated: the figures of `benchmarks.xmc`.

Relevance is inverse propensity over its maximum among all labels, so that XMAD@5 compares with XReg's tables.

Legend: B points, I labels, M results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.xreg.xmc_quality import quality
from espalier.label_counts import LabelCounts
from espalier.relevance import Relevance
from espalier.weighted_metrics import RankedErrors, almost_zero, auprc, tau_at_k
from training.data.csr import as_rows
from training.data.relevance import inverse_propensities
from training.data.xmc import LabelledPoints

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

    rows_BM: NDArray[np.int64]
    scores_BM: NDArray[Any]
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


def _relevances(train: LabelledPoints) -> tuple[NDArray[np.float64], float]:
    """float64[I]: inverse propensities over the largest of all labels; and the largest of the labels that training points have."""
    counts = LabelCounts(np.bincount(train.labels.indices, minlength=train.labels.shape[1]).astype(np.int64), len(train))
    worth_I = inverse_propensities(counts, A, B)
    worth_I /= worth_I.max()
    return worth_I, float(worth_I[counts.counts_I > 0].max())
