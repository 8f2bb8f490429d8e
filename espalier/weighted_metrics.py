"""How well predictions rank and filter by graded relevance: WP@k, WN@k, Tau@k, PSP@k, PSN@k and AUPRC.

One number a test set, as the Extreme Classification Repository and the authors of XReg compute them: sums over all points are divided by
each other, so points with much relevance weigh more. `regression_metrics` has the errors of the values themselves. For labels' metrics
transpose both relevances.

Legend: B points, I labels, E entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.regression_metrics import check, check_k
from espalier.relevance import Relevance

Float64 = NDArray[np.float64]
TIE = 1e-6
"""Values that differ by no more are equal to Tau@k, as in the authors' program."""
ALMOST_ZERO = 1e-6


def wp_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """Relevance-weighted precision: the relevance of the k best predictions over that of the k most relevant labels.

        WP@k = Σ_i Σ_{j ≤ k} y_{i, π̂_j} / Σ_i Σ_{j ≤ k} y_{i, π*_j}

    π̂ is the order of the predictions, π* that of the true relevance. 0 where nothing is relevant. PSP@k is WP@k with
    y = 1/p (`propensity_scored`), CTR@k and Rating@k are WP@k with rates and ratings. Raises InvalidData as `RankedErrors`.
    """
    return _gain(true, predicted, k, discounted=False)


def wn_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """WP@k with the j-th place discounted by 1 / log2(1 + j): relevance-weighted nDCG, with linear gains."""
    return _gain(true, predicted, k, discounted=True)


def propensity_scored(true: Relevance, inverse_propensity_I: Float64) -> Relevance:
    """The relevance 1/p_l of every label that is relevant at all: with it WP@k is propensity-scored precision (Jain et al. 2016)."""
    if inverse_propensity_I.shape != (true.width,):
        raise InvalidData("inverse_propensity_I", list(inverse_propensity_I.shape), f"[{true.width}], one for each label")
    present_E = (true.value_E > 0).astype(np.float64)
    return Relevance(true.offset_B, true.column_E, present_E, true.width).times(inverse_propensity_I)


def tau_at_k(true: Relevance, predicted: Relevance, k: int) -> float:
    """Kendall's Tau@k as in the authors' program: how rarely a label that is not better than one of the k best stands above it.

        Tau@k = 1 − Σ_i Σ_{j ≤ min(k, |ŷ_i|)} err_ij / Σ_i Σ_{j ≤ min(k, |ŷ_i|)} |Y_i|
        err_ij = #{ l ∈ Y_i : y_l > y_{π̂_j} + 10⁻⁶ and ŷ_l < ŷ_{π̂_j} − 10⁻⁶ }

    Y_i are the labels that are relevant to point i; ŷ of a label that was not found is 0. 1 where there is nothing to compare.
    """
    check(true, predicted)
    check_k(k)
    relevant_E = true.value_E > 0
    row_E, true_E = true.row_E[relevant_E], true.value_E[relevant_E]
    predicted_E = predicted.at(true.key_E[relevant_E])
    found_B = np.diff(predicted.offset_B)
    size_B = np.bincount(row_E, minlength=len(true))
    true_of_predicted = true.at(predicted.key_E)
    wrong = 0
    for place in range(min(k, int(found_B.max(initial=0)))):
        compared_E = np.flatnonzero(found_B[row_E] > place)
        at = predicted.offset_B[row_E[compared_E]] + place
        better_E = true_E[compared_E] > true_of_predicted[at] + TIE
        below_E = predicted_E[compared_E] < predicted.value_E[at] - TIE
        wrong += int((better_E & below_E).sum())
    pairs = int((np.minimum(found_B, k) * size_B).sum())
    return 1 - wrong / max(pairs, 1)


def auprc(true: Relevance, predicted: Relevance) -> float:
    """Area under the precision–recall curve of one threshold over the scores of all pairs of a point and a label (XReg Lemma 3.2).

        precision(t) = Σ y of the pairs with ŷ ≥ t / their number,   recall(t) = Σ y of these pairs / Σ y of all pairs

    The sum of precision(t) times the rise of recall, over thresholds from above; pairs without a prediction come last, together, with
    ŷ = 0. With y ∈ {0, 1} it is the average precision. Divide y by its maximum first, so that it lies in [0, 1]. 0 where nothing is
    relevant.
    """
    check(true, predicted)
    total = float(true.value_E.sum())
    if total == 0:
        return 0.0
    order_E = np.argsort(-predicted.value_E, kind="stable")
    score_E = predicted.value_E[order_E]
    gain_E = np.cumsum(true.at(predicted.key_E)[order_E])
    # Scores of 0 and less are kept only together with the pairs that have none.
    last_E = np.append(score_E[1:] != score_E[:-1], True)[: len(score_E)] & (score_E > 0)
    gain = np.append(gain_E[last_E], total)
    count = np.append(np.flatnonzero(last_E) + 1, len(true) * true.width)
    rise = np.diff(gain, prepend=0)
    return float((gain / count * rise).sum() / total)


def almost_zero(predicted: Relevance) -> Relevance:
    """The predictions of XReg-zero (XReg, Table 3): the same order for every point, all values almost 0.

    The j-th best has 10⁻⁶ / j, so that values of different points say nothing. Such predictions rank as well, and filter by a threshold
    worse: WP@k stays, AUPRC falls. (The paper does not say which values it takes.)
    """
    return Relevance(predicted.offset_B, predicted.column_E, ALMOST_ZERO / (1 + predicted.place_E), predicted.width)


def _gain(true: Relevance, predicted: Relevance, k: int, discounted: bool) -> float:
    check(true, predicted)
    check_k(k)
    discount: Float64 = 1 / np.log2(np.arange(2, k + 2)) if discounted else np.ones(k)
    counts_E = predicted.place_E < k
    got = (true.at(predicted.key_E[counts_E]) * discount[predicted.place_E[counts_E]]).sum()
    order_E = np.lexsort((-true.value_E, true.row_E))
    counts_E = true.place_E < k
    best = (true.value_E[order_E][counts_E] * discount[true.place_E[counts_E]]).sum()
    return float(got / best) if best > 0 else 0.0
