"""Relevance of labels as data: checked weights, rates of clicks, inverse propensities, thresholds.

Knows numbers. Does not know files (xmc.py, query_logs.py) or what is learned from relevance.

Legend: B points, I labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Bool, Float64
from espalier.errors import InvalidData
from espalier.label_counts import LabelCounts

from ..data.csr import Csr
from ..specification.linear import RelevanceOptions

SMALLEST, LARGEST = 1e-9, 1e9
"""Bounds of a weight above 0: ratios of two weights are ordinary float32 numbers."""
WEIGHTS = f"0, or a number from {SMALLEST:g} to {LARGEST:g}"
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def is_weight(weight: float) -> bool:
    """Whether a number can be the weight of a label: 0, or from SMALLEST to LARGEST."""
    return weight == 0 or SMALLEST <= weight <= LARGEST


def are_weights(weights: NDArray[np.floating]) -> Bool:
    are_valid: Bool = (weights == 0) | ((weights >= SMALLEST) & (weights <= LARGEST))
    return are_valid


def checked(source: str, labels: Csr) -> Csr:
    """Labels without those of weight 0. Raises InvalidData, which names source, row and label, for an invalid weight (`is_weight`)."""
    is_wrong = ~are_weights(labels.data)
    if is_wrong.any():
        position = int(is_wrong.argmax())
        row = int(np.searchsorted(labels.indptr, position, side="right")) - 1
        raise InvalidData(f"{source}, row {row}, label {int(labels.indices[position])}", float(labels.data[position]), WEIGHTS)
    labels.eliminate_zeros()
    return labels


@dataclass(frozen=True)
class Smoothing:
    """Turns counts into rates: (clicks + a · prior) / (views + a), and 0 without clicks.

    For pairs without clicks, the formula would give shown pairs some relevance, and pairs that were never shown none.

    prior     the rate of all training clicks to all training views
    strength  a: the number of views that the prior is worth
    """

    prior: float
    strength: float

    @staticmethod
    def of(views: Float64, clicks: Float64, strength: float) -> Smoothing:
        """The smoothing with the prior of a training log."""
        total = float(views.sum())
        return Smoothing(float(clicks.sum()) / total if total > 0 else 0.0, strength)

    def rates(self, views: Float64, clicks: Float64) -> Float64:
        """float64, in [0, 1]: the rates of pairs with so many views, above 0, and clicks, at most as many as views."""
        rates = (clicks + self.strength * self.prior) / (views + self.strength)
        return np.where(clicks > 0, rates, 0.0)


def inverse_propensities(counts: LabelCounts, a: float, b: float) -> Float64:
    """float64[I], at least 1: how many times as often a label is relevant as it is seen (Jain, Prabhu and Varma, 2016).

        1 / p_l = 1 + C · (N_l + B)^−A,   C = (ln N − 1) · (B + 1)^A

    counts  N_l, training points with each label, and N, training points; N below e gives C = 0
    """
    c = max(float(np.log(max(counts.points, 1))) - 1, 0.0) * (b + 1) ** a
    result: Float64 = 1 + c * (counts.counts_I + b) ** -a
    return result


@dataclass(frozen=True, eq=False)
class LabelRelevance:
    """The relevance that a configuration gives to labels, from the labels of training points.

    counts  training points with each label, and in all
    """

    options: RelevanceOptions
    counts: LabelCounts

    @staticmethod
    def of_training(options: RelevanceOptions, labels: Csr) -> LabelRelevance:
        """The relevance by the labels of training points, as they were read."""
        counts_I = np.bincount(labels.indices, minlength=labels.shape[1]).astype(np.int64)
        return LabelRelevance(options, LabelCounts(counts_I, labels.shape[0]))

    @property
    def inverse_propensity_I(self) -> Float64:
        """float64[I]."""
        return inverse_propensities(self.counts, self.options.propensity_a, self.options.propensity_b)

    def of(self, labels: Csr) -> Csr:
        """float32[B, I]: the relevance of labels of training or other points, from the weights that were read."""
        relevance = labels.copy()
        if self.options.source == "binary":
            relevance.data = np.ones_like(relevance.data)
        elif self.options.source == "inverse-propensity":
            relevance.data = self.inverse_propensity_I[relevance.indices].astype(np.float32)
        if self.options.threshold > 0:
            relevance.data[relevance.data < self.options.threshold] = 0
            relevance.eliminate_zeros()
        return relevance


def scale_of(training: Csr) -> float:
    """The divisor that brings relevance into [0, 1]: its maximum over training labels; 1 if there are none."""
    return float(training.data.max()) if training.nnz else 1.0


def distribution(relevance: Csr) -> dict[str, Any]:
    """The distribution of relevance over all labels of all points: their number, mean and quantiles."""
    if not relevance.nnz:
        return {"labels": 0}
    values = np.quantile(relevance.data, QUANTILES)
    quantiles = {f"{share:g}": float(value) for share, value in zip(QUANTILES, values, strict=True)}
    return {"labels": int(relevance.nnz), "mean": float(relevance.data.mean()), "quantiles": quantiles}


def is_graded(relevance: Csr) -> bool:
    return bool(relevance.nnz) and bool(relevance.data.min() < relevance.data.max())
