"""How far predicted relevance is from the true one: XMAD@k and XRMSE@k (XReg, Prabhu et al. 2020, §3).

Memory and time grow with the entries of both, never with points × labels. For labels' metrics transpose both (`Relevance.transposed`).

Legend: B points, I labels, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.relevance import Relevance

Float64 = NDArray[np.float64]
Errors = Literal["largest", "predicted"]
"""Whose errors count: the k largest of all labels (Eq. 1 and 2), or those of the k best predictions (the released program)."""


@dataclass(frozen=True, eq=False)
class RankedErrors:
    """The errors of B points in the order in which they count, for several k and both metrics.

    row_E, place_E  int64[E]: the point of each error, and its place, from 0
    error_E         float64[E], at least 0
    """

    row_E: NDArray[np.int64]
    place_E: NDArray[np.int64]
    error_E: Float64
    points: int

    @staticmethod
    def of(true: Relevance, predicted: Relevance, errors: Errors = "largest") -> RankedErrors:
        """Those of predictions.

        true       y ≥ 0
        predicted  ŷ of the labels that were found, best first; of all others 0
        errors     "largest": S(e, k) are the k largest errors, so a relevant label that was not found counts. "predicted": those of the k
                   best predictions, as in the authors' program, which prints their mean divided by WP@k (as a fraction) under the same name

        Raises InvalidData where shapes do not fit, and for y below 0.
        """
        check(true, predicted)
        if errors == "predicted":
            error_E = np.abs(predicted.value_E - true.at(predicted.key_E))
            return RankedErrors(predicted.row_E, predicted.place_E, error_E, len(true))
        row_E, error_E = _all_errors(true, predicted)
        order_E = np.lexsort((-error_E, row_E))
        row_E, error_E = row_E[order_E], error_E[order_E]
        return RankedErrors(row_E, np.arange(len(row_E)) - np.searchsorted(row_E, row_E), error_E, len(true))

    def xmad(self, k: int) -> Float64:
        """float64[B]: the extreme mean absolute deviation of every point; the paper's figure is its mean.

            XMAD@k(ŷ, y) = 1/k · Σ_{l ∈ S(e, k)} e_l,   e_l = |ŷ_l − y_l|                (XReg Eq. 1)

        A point with fewer than k errors above 0 is still divided by k. Raises InvalidData for k below 1.
        """
        return self._sums(k, 1) / k

    def xrmse(self, k: int) -> Float64:
        """float64[B]: the extreme root mean square error of every point, √(1/k · Σ_{l ∈ S(e, k)} e_l²) (XReg Eq. 2)."""
        return np.sqrt(self._sums(k, 2) / k)

    def _sums(self, k: int, power: int) -> Float64:
        check_k(k)
        counts_E = self.place_E < k
        return np.bincount(self.row_E[counts_E], weights=self.error_E[counts_E] ** power, minlength=self.points).astype(np.float64)


def check_k(k: int) -> None:
    """Raises InvalidData where there is no place k."""
    if k < 1:
        raise InvalidData("k", k, "at least 1")


def check(true: Relevance, predicted: Relevance) -> None:
    """Raises InvalidData where two relevances cannot be compared."""
    if (len(true), true.width) != (len(predicted), predicted.width):
        raise InvalidData("predicted", f"[{len(predicted)}, {predicted.width}]", f"[{len(true)}, {true.width}], the shape of the true ones")
    if (true.value_E < 0).any():
        raise InvalidData("true", float(true.value_E.min()), "relevances of at least 0")


def _all_errors(true: Relevance, predicted: Relevance) -> tuple[NDArray[np.int64], Float64]:
    """Row and error of every pair that either of them has."""
    key_E = np.concatenate([true.key_E, predicted.key_E])
    signed_E = np.concatenate([true.value_E, -predicted.value_E])
    order_E = np.argsort(key_E, kind="stable")
    key_E = key_E[order_E]
    if not len(key_E):
        return key_E, signed_E
    first = np.flatnonzero(np.append(True, key_E[1:] != key_E[:-1]))
    return key_E[first] // true.width, np.abs(np.add.reduceat(signed_E[order_E], first))
