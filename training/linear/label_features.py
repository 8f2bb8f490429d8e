"""Label features: the normalised sum of a label's points. PIFA (positive instance feature aggregation: PECOS §3.1; XR-Linear §3.2) gives
each point one weight, XReg (Eq. 3) weighs points by relevance. Items with texts of their own have these beside their points.

Legend: B points, I labels, F features.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, hstack

from ..data.csr import Csr, normalised
from ..data.xmc import LabelledPoints
from ..linear.own_texts import Own
from ..specification.linear import LinearOptions


def label_features(train: LabelledPoints, own: Own | None, options: LinearOptions) -> tuple[Csr, Csr]:
    """Rows [I, …] of length 1 that a tree is built from, and [I, F], the same in the features of queries.

    Beside own texts the points count the more, the more there are of an item, n / (n + own.queries), and texts of items are no such points.
    """
    asked = train if train.own_B is None else train.take(train.asked)
    if own is not None and (not len(asked) or math.isinf(own.queries)):
        return own.rows, own.rows
    rows = summed(asked, options)
    if own is None:
        return rows, rows
    counts_I = np.bincount(asked.labels.indices, minlength=len(rows.indptr) - 1)
    return normalised(hstack([_shared(rows, counts_I, own), own.rows], format="csr")), beside(rows, counts_I, own)


def summed(points: LabelledPoints, options: LinearOptions) -> Csr:
    """Rows [I, F] of length 1 of points, as the loss wants them."""
    return weighted_sums(points) if options.loss == "relevance" else pifa(points)


def beside(rows: Csr, counts_I: NDArray[np.int64], own: Own) -> Csr:
    """Rows [I, F] of length 1: what so many points of each item say, `rows`, and its own texts."""
    return own.rows if math.isinf(own.queries) else normalised(csr_array(_shared(rows, counts_I, own) + own.rows))


def _shared(rows: Csr, counts_I: NDArray[np.int64], own: Own) -> Csr:
    return csr_array(diags_array((counts_I / (counts_I + own.queries)).astype(np.float32)) @ rows)


def pifa(data: LabelledPoints) -> Csr:
    """float32 rows [I, F] of length 1. A point has the weight 1 / √(number of its labels); a label without points has an empty row."""
    labels = data.labels
    counts = np.diff(labels.indptr)
    shares = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
    return normalised(csr_array((shares, labels.indices, labels.indptr), shape=labels.shape).T.tocsr() @ data.points)


def mean_points(data: LabelledPoints) -> Csr:
    """float32 rows [I, F] of length 1: the direction of the mean of a label's points. A label without points has an empty row."""
    labels = data.labels
    ones = csr_array((np.ones(labels.nnz, np.float32), labels.indices, labels.indptr), shape=labels.shape)
    return normalised(ones.T.tocsr() @ normalised(data.points))


def weighted_sums(data: LabelledPoints) -> Csr:
    """float32 rows [I, F] of length 1: Σ_i y_il x_i. A label without points has an empty row."""
    return normalised(data.labels.T.tocsr() @ data.points)
