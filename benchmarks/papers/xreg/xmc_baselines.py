"""Systems of `benchmarks.xmc` that are not configurations of our trainer: other papers' methods, in one process and on one thread.

pfastrexml      50 trees and tail classifiers, α = .8, γ = 30, of relevance (Jain et al. 2016)
pfastxml        its trees alone
fastxml         50 trees, of labels (Prabhu and Varma 2014)
least-squares   ridge regression of every label's relevance, λ chosen
leml            linear regression of relevance of rank at most 200, λ chosen (Yu et al. 2014)
rank-svm        every label ranks points, of relevance; C = 3
proxml          one-versus-all with the 1-norm and the squared hinge, C = 1 (Babbar and Schölkopf 2019)

DiSMEC, Parabel and Bonsai are configurations (xmc_systems.py). Trees learn from points as the files have them, the others from points of
length 1. Relevance is inverse propensity over its maximum among training labels. λ "chosen" has the highest WP@5 on a tenth of the
training points, held out. C of rank-svm (of .3, 1, 3 and 10) and C of proxml (of .3, 1 and 3) had the highest PSP@5 on such a tenth of
BibTeX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from benchmarks.papers.xreg.fastxml import FastXmlOptions, fit_fastxml, tail_classifiers
from benchmarks.papers.xreg.label_rank_svm import fit_label_rank_svm
from benchmarks.papers.xreg.least_squares import fit_least_squares
from benchmarks.papers.xreg.leml import fit_leml
from benchmarks.papers.xreg.proxml import fit_proxml
from espalier.arrays import Array, Float32, Int64
from training.data.csr import Csr, as_rows
from training.data.relevance import LabelRelevance, scale_of
from training.data.xmc import LabelledPoints
from training.graded_metrics import wp_at_k
from training.graded_relevance import Relevance
from training.specification.linear import RelevanceOptions

RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)
RANK = 200
HELD_OUT = 10
"""One point of so many is held out to choose by."""


class Predictor(Protocol):
    """A trained method."""

    def best(self, points: Csr, most: int) -> tuple[Int64, Float32]:
        """int64[B, M] and float32[B, M]: the best labels of points, best first, and their scores; NO_ITEM and 0 if there are fewer."""

    def arrays(self) -> dict[str, Array]:
        """The arrays that would be stored, by name."""


def of_relevance(train: LabelledPoints) -> LabelledPoints:
    """The points with inverse propensities, over their maximum, as their labels' weights."""
    relevance = LabelRelevance.of_training(RelevanceOptions(source="inverse-propensity"), train.labels).of(train.labels)
    relevance.data /= np.float32(scale_of(relevance))
    return LabelledPoints(train.points, relevance)


def _chosen(train: LabelledPoints, fit: Callable[[LabelledPoints, float], Predictor]) -> Predictor:
    """The method trained with the λ of RIDGES that is best on held-out points."""
    order = np.random.default_rng(1).permutation(len(train))
    size = max(len(train) // HELD_OUT, 1)
    valid, training = train.take(order[:size]), train.take(order[size:])
    true = Relevance.of_rows(as_rows(valid.labels))
    quality = [
        wp_at_k(true, Relevance.of_predictions(*fit(training, ridge).best(valid.points, 5), valid.labels.shape[1]), 5) for ridge in RIDGES
    ]
    return fit(train, RIDGES[int(np.argmax(quality))])


BASELINES: dict[str, Callable[[LabelledPoints], Predictor]] = {
    "pfastrexml": lambda train: fit_fastxml(of_relevance(train), FastXmlOptions(discount_gain=False), tail_classifiers(train)),
    "pfastxml": lambda train: fit_fastxml(of_relevance(train), FastXmlOptions(discount_gain=False)),
    "fastxml": lambda train: fit_fastxml(train, FastXmlOptions()),
    "least-squares": lambda train: _chosen(of_relevance(train), fit_least_squares),
    "leml": lambda train: _chosen(of_relevance(train), lambda points, ridge: fit_leml(points, RANK, ridge)),
    "rank-svm": lambda train: fit_label_rank_svm(of_relevance(train), 3.0),
    "proxml": fit_proxml,
}
BASELINES_OF_RELEVANCE = ("pfastrexml", "pfastxml", "least-squares", "leml")
"""Methods whose scores estimate relevance over its maximum among training labels."""
