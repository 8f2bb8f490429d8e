"""Metrics of graded relevance: how far predictions are from the true relevance, and how well they rank and filter by it.

XMAD@k and XRMSE@k (XReg, Prabhu et al. 2020, §3) are a number for each point. WP@k, WN@k, Tau@k, PSP@k, PSN@k and AUPRC are one a test set,
as the Extreme Classification Repository and the authors of XReg compute them: sums over all points are divided by each other, so points
with much relevance weigh more.

Memory and time grow with the entries of both, never with points × labels. For labels' metrics transpose both (`Relevance.transposed`).

Legend: B points, I labels, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from espalier.arrays import Float64, Int64

from .graded_relevance import Relevance

Errors = Literal["largest", "predicted"]
"""Which errors count: the k largest over all labels (Eq. 1 and 2), or the errors of the k best predictions (the released program)."""
TIE = 1e-6
"""Values that differ by no more are equal to Tau@k, as in the authors' program."""
ALMOST_ZERO = 1e-6


@dataclass(frozen=True, eq=False)
class RankedErrors:
    """The errors of B points in the order in which they count, for several k and both metrics.

    row_E, position_E  int64[E]: the point of each error, and its position, from 0
    error_E            float64[E], at least 0
    """

    row_E: Int64
    position_E: Int64
    error_E: Float64
    points: int

    @staticmethod
    def of(true: Relevance, predicted: Relevance, errors: Errors = "largest") -> RankedErrors:
        """The errors of predictions.

        true       y ≥ 0
        predicted  ŷ of the predicted labels, best first; 0 for all other labels
        errors     "largest": S(e, k) are the k largest errors, so relevant labels that were not predicted count. "predicted": the errors of
                   the k best predictions. The authors' program prints their mean, divided by WP@k (as a fraction), under the same name
        """
        if errors == "predicted":
            error_E = np.abs(predicted.value_E - true.at(predicted.key_E))
            return RankedErrors(predicted.row_E, predicted.position_E, error_E, len(true))
        row_E, error_E = _all_errors(true, predicted)
        order_E = np.lexsort((-error_E, row_E))
        row_E, error_E = row_E[order_E], error_E[order_E]
        return RankedErrors(row_E, np.arange(len(row_E)) - np.searchsorted(row_E, row_E), error_E, len(true))

    def xmad(self, k: int) -> Float64:
        """float64[B]: the extreme mean absolute deviation of every point; the paper's figure is its mean.

            XMAD@k(ŷ, y) = 1/k · Σ_{l ∈ S(e, k)} e_l,   e_l = |ŷ_l − y_l|                (XReg Eq. 1)

        A point with fewer than k errors above 0 is still divided by k.
        """
        return self._sums(k, 1) / k

    def xrmse(self, k: int) -> Float64:
        """float64[B]: the extreme root mean square error of every point, √(1/k · Σ_{l ∈ S(e, k)} e_l²) (XReg Eq. 2)."""
        return np.sqrt(self._sums(k, 2) / k)

    def _sums(self, k: int, power: int) -> Float64:
        counts_E = self.position_E < k
        return np.bincount(self.row_E[counts_E], weights=self.error_E[counts_E] ** power, minlength=self.points).astype(np.float64)


def _all_errors(true: Relevance, predicted: Relevance) -> tuple[Int64, Float64]:
    """Row and error of every pair that has an entry in either."""
    key_E = np.concatenate([true.key_E, predicted.key_E])
    signed_E = np.concatenate([true.value_E, -predicted.value_E])
    order_E = np.argsort(key_E, kind="stable")
    key_E = key_E[order_E]
    if not len(key_E):
        return key_E, signed_E
    first = np.flatnonzero(np.append(True, key_E[1:] != key_E[:-1]))
    return key_E[first] // true.width, np.abs(np.add.reduceat(signed_E[order_E], first))


def wp_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """Relevance-weighted precision: the relevance of the k best predictions over that of the k most relevant labels.

        WP@k = Σ_i Σ_{j ≤ k} y_{i, π̂_j} / Σ_i Σ_{j ≤ k} y_{i, π*_j}

    π̂ is the order of the predictions, π* that of the true relevance. 0 if nothing is relevant. PSP@k is WP@k with
    y = 1/p (`propensity_scored`), CTR@k and Rating@k are WP@k with rates and ratings.
    """
    return _gain(true, predicted, k, discounted=False)


def wn_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """WP@k with the j-th position discounted by 1 / log2(1 + j): relevance-weighted nDCG, with linear gains."""
    return _gain(true, predicted, k, discounted=True)


def propensity_scored(true: Relevance, inverse_propensity_I: Float64) -> Relevance:
    """The relevance 1/p_l of every label that is relevant at all: with it WP@k is propensity-scored precision (Jain et al. 2016)."""
    present_E = (true.value_E > 0).astype(np.float64)
    return Relevance(true.offset_B, true.column_E, present_E, true.width).times(inverse_propensity_I)


def tau_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """Kendall's Tau@k as in the authors' program: how rarely a label that is not better than one of the k best stands above it.

        Tau@k = 1 − Σ_i Σ_{j ≤ min(k, |ŷ_i|)} err_ij / Σ_i Σ_{j ≤ min(k, |ŷ_i|)} |Y_i|
        err_ij = #{ l ∈ Y_i : y_l > y_{π̂_j} + 10⁻⁶ and ŷ_l < ŷ_{π̂_j} − 10⁻⁶ }

    Y_i are the labels that are relevant to point i; ŷ of a label that was not predicted is 0. 1 if there is nothing to compare.
    """
    relevant_E = true.value_E > 0
    row_E, true_E = true.row_E[relevant_E], true.value_E[relevant_E]
    predicted_E = predicted.at(true.key_E[relevant_E])
    predicted_B = np.diff(predicted.offset_B)
    size_B = np.bincount(row_E, minlength=len(true))
    true_of_predicted = true.at(predicted.key_E)
    wrong = 0
    for position in range(min(k, int(predicted_B.max(initial=0)))):
        compared_E = np.flatnonzero(predicted_B[row_E] > position)
        entries = predicted.offset_B[row_E[compared_E]] + position
        better_E = true_E[compared_E] > true_of_predicted[entries] + TIE
        below_E = predicted_E[compared_E] < predicted.value_E[entries] - TIE
        wrong += int((better_E & below_E).sum())
    pairs = int((np.minimum(predicted_B, k) * size_B).sum())
    return 1 - wrong / max(pairs, 1)


def auprc(true: Relevance, predicted: Relevance) -> float:
    """Area under the precision–recall curve of one threshold over the scores of all pairs of a point and a label (XReg Lemma 3.2).

        precision(t) = Σ y of the pairs with ŷ ≥ t / their number,   recall(t) = Σ y of these pairs / Σ y of all pairs

    The sum of precision(t) times the rise of recall, over thresholds from above; pairs without a prediction come last, together, with
    ŷ = 0. With y ∈ {0, 1} it is the average precision. Divide y by its maximum first, so that it lies in [0, 1]. 0 where nothing is
    relevant.
    """
    total = float(true.value_E.sum())
    if total == 0:
        return 0.0
    order_E = np.argsort(-predicted.value_E, kind="stable")
    score_E = predicted.value_E[order_E]
    gain_E = np.cumsum(true.at(predicted.key_E)[order_E])
    # Pairs with scores of 0 or less count at the same threshold as pairs without a prediction.
    last_E = np.append(score_E[1:] != score_E[:-1], True)[: len(score_E)] & (score_E > 0)
    gain = np.append(gain_E[last_E], total)
    count = np.append(np.flatnonzero(last_E) + 1, len(true) * true.width)
    rise = np.diff(gain, prepend=0)
    return float((gain / count * rise).sum() / total)


def almost_zero(predicted: Relevance) -> Relevance:
    """The predictions of XReg-zero (XReg, Table 3): the same order for every point, all values almost 0.

    The j-th best has 10⁻⁶ / j, so values of different points cannot be compared. Such predictions rank as well, but filter worse by a
    threshold: WP@k stays, AUPRC falls. (The paper does not say which values it takes.)
    """
    return Relevance(predicted.offset_B, predicted.column_E, ALMOST_ZERO / (1 + predicted.position_E), predicted.width)


def _gain(true: Relevance, predicted: Relevance, k: int, discounted: bool) -> float:
    discount: Float64 = 1 / np.log2(np.arange(2, k + 2)) if discounted else np.ones(k)
    counts_E = predicted.position_E < k
    got = (true.at(predicted.key_E[counts_E]) * discount[predicted.position_E[counts_E]]).sum()
    order_E = np.lexsort((-true.value_E, true.row_E))
    counts_E = true.position_E < k
    best = (true.value_E[order_E][counts_E] * discount[true.position_E[counts_E]]).sum()
    return float(got / best) if best > 0 else 0.0
