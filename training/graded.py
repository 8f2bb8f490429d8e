"""Figures for relevance with degrees, or for known propensities of items. `evaluate` adds them to its rows.

Legend: B queries, I items, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.heldout import RELEVANCE
from espalier.errors import BundleCorrupt

from .data.relevance import inverse_propensities
from .graded_metrics import RankedErrors, almost_zero, auprc, propensity_scored, tau_at_k, wn_at_k, wp_at_k
from .graded_relevance import Relevance
from .specification.linear import RELEVANCE_OPTIONS

Figures = dict[str, float]


@dataclass(frozen=True, eq=False)
class Grades:
    """Degrees of relevance and propensities for B queries.

    relevance             of each query's relevant items, above 0; None: no degrees
    scale                 divisor of relevance for errors, since scores are in [0, 1]
    inverse_propensity_I  float64[I]; None: not known
    """

    relevance: Sequence[Float32] | None
    scale: float = 1.0
    inverse_propensity_I: Float64 | None = None


def grades_of(bundle: Bundle, relevance: Sequence[Float32] | None) -> Grades | None:
    """The grades of queries with this relevance, by a bundle; None if it has neither degrees nor propensities.

    Raises BundleCorrupt if `data.relevance.scale` of the manifest is no number above 0.
    """
    counts, degrees = bundle.label_counts(), bundle.manifest.data.get(RELEVANCE)
    inverse_I = None
    if counts is not None:
        options = RELEVANCE_OPTIONS.checked(bundle.manifest.training.get("relevance", {}))
        inverse_I = inverse_propensities(counts, options.propensity_a, options.propensity_b)
    if degrees is None:
        return None if inverse_I is None else Grades(None, 1.0, inverse_I)
    scale = degrees.get("scale") if isinstance(degrees, dict) else None
    if not isinstance(scale, float) or not 0 < scale < np.inf:
        raise BundleCorrupt(f"{bundle.path}: data.relevance.scale of the manifest is {scale!r}, expected a number above 0")
    return Grades(relevance, scale, inverse_I)


def graded_figures(
    relevant: Sequence[Int64],
    grades: Grades,
    item_rows_BM: Int64,
    scores_BM: NDArray[np.floating],
    ms: Sequence[int],
    items: int,
) -> dict[int, dict[str, Figures]]:
    """m → {"pointwise": figures of each query's m best items, "labelwise": figures of each item's m best queries}.

    psp, psn              with inverse propensities
    wp, wn, tau           with relevance
    xmad, xrmse           if relevance has degrees: errors of all items, largest first; means over queries, or over items
    released_xmad         errors of the m best only, divided by wp, as the authors of XReg print; likewise released_xrmse
    auprc, auprc_zero     of all results, only pointwise; auprc_zero with values that keep only each query's order (XReg-zero)

    Labelwise figures are over the results of all queries.
    """
    relevant = [np.unique(rows) for rows in relevant] if grades.relevance is None else relevant  # users may touch an item again
    values = [np.ones(len(rows)) for rows in relevant] if grades.relevance is None else grades.relevance
    true = Relevance.of_lists(relevant, values, items).times(1 / grades.scale)
    predicted = Relevance.of_predictions(item_rows_BM, scores_BM, items)
    scored = None if grades.inverse_propensity_I is None else propensity_scored(true, grades.inverse_propensity_I)
    figures: dict[int, dict[str, Figures]] = {m: {} for m in ms}
    for side in ("pointwise", "labelwise"):
        if side == "labelwise":
            true, predicted, scored = true.transposed(), predicted.transposed(), None if scored is None else scored.transposed()
        errors = None if grades.relevance is None else (RankedErrors.of(true, predicted), RankedErrors.of(true, predicted, "predicted"))
        for m in ms:
            of_side: Figures = {}
            if scored is not None:
                of_side |= {"psp": wp_at_k(scored, predicted, m), "psn": wn_at_k(scored, predicted, m)}
            if errors is not None:
                of_side |= {"wp": wp_at_k(true, predicted, m), "wn": wn_at_k(true, predicted, m), "tau": tau_at_k(true, predicted, m)}
                of_side |= _errors(*errors, m, of_side["wp"])
            figures[m][side] = of_side
        if side == "pointwise" and grades.relevance is not None:
            auprc_figures = {"auprc": auprc(true, predicted), "auprc_zero": auprc(true, almost_zero(predicted))}
            for m in ms:
                figures[m][side] |= auprc_figures
    return figures


def _errors(largest_errors: RankedErrors, predicted_errors: RankedErrors, m: int, wp: float) -> Figures:
    figures = {"xmad": largest_errors.xmad(m), "xrmse": largest_errors.xrmse(m)}
    released = {"released_xmad": predicted_errors.xmad(m), "released_xrmse": predicted_errors.xrmse(m)}
    divisor = wp if wp > 0 else 1.0
    return {name: float(error_B.mean()) for name, error_B in figures.items()} | {
        name: float(error_B.mean()) / divisor for name, error_B in released.items()
    }


def print_graded(rows: Sequence[dict[str, Any]]) -> None:
    """Print the figures of each row, in a table for each side."""
    for side in ("pointwise", "labelwise"):
        sides = [(row, row["graded"][side]) for row in rows if "graded" in row]
        if not sides:
            continue
        names = list(sides[0][1])
        print(f"\n{side}\n{'beam':>6} {'m':>5} " + " ".join(f"{name:>{max(7, len(name))}}" for name in names))
        for row, figures in sides:
            values = " ".join(f"{figures[name]:{max(7, len(name))}.4f}" for name in names)
            print(f"{row['beam_size']:6} {row['m']:5} {values}")
