"""Systems of `benchmarks.xmc` that are not configurations of our trainer: other papers' methods, in one process and on one thread.

pfastrexml      50 trees and tail classifiers, α = .8, γ = 30, of relevance (Jain et al. 2016)
fastxml         50 trees, of labels (Prabhu and Varma 2014)

A method learns from points as the files have them. Those of relevance get inverse propensities over their maximum among training labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from training.baselines.xmc.fastxml import FastXmlOptions, fit_fastxml, tail_classifiers
from training.data.csr import Csr
from training.data.relevance import LabelRelevance, scale_of
from training.data.xmc import LabelledPoints
from training.specification.relevance import RelevanceOptions


class Predictor(Protocol):
    """What a method has learned."""

    def best(self, points: Csr, most: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """int64[B, M] and float32[B, M]: the best labels of points, best first, and their scores; NO_ITEM and 0 where there are none."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What would be stored, by name."""


def of_relevance(train: LabelledPoints) -> LabelledPoints:
    """The points with inverse propensities, over their maximum, as their labels' weights."""
    relevance = LabelRelevance.of_training(RelevanceOptions(source="inverse-propensity"), train.labels).of(train.labels)
    relevance.data /= np.float32(scale_of(relevance))
    return LabelledPoints(train.points, relevance)


def _pfastrexml(train: LabelledPoints) -> Predictor:
    return fit_fastxml(of_relevance(train), FastXmlOptions(discount_gain=False), tail_classifiers(train))


def _fastxml(train: LabelledPoints) -> Predictor:
    return fit_fastxml(train, FastXmlOptions())


BASELINES: dict[str, Callable[[LabelledPoints], Predictor]] = {"pfastrexml": _pfastrexml, "fastxml": _fastxml}
BASELINES_OF_RELEVANCE = ("pfastrexml",)
"""Methods whose scores estimate relevance over its maximum among training labels."""
