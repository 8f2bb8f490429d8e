"""Label features: the normalised sum of a label's points. PIFA (positive instance feature aggregation: PECOS §3.1; XR-Linear §3.2) gives
each point one weight, XReg (Eq. 3) weighs points by relevance. Items with texts of their own have these beside their points.

Legend: B points, I labels, F features.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csr_array, diags_array, hstack

from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints
from training.linear.own_texts import Own
from training.specification.linear import LinearOptions


def label_features(train: LabelledPoints, own: Own | None, options: LinearOptions) -> tuple[Csr, Csr]:
    """Rows [I, …] of length 1 that a tree is built from, and [I, F], the same in the features of queries.

    Beside own texts the points count the more, the more there are of an item, n / (n + own.queries), and texts of items are no such points.
    """
    asked = train if train.own_B is None else train.take(train.asked)
    if own is not None and (not len(asked) or math.isinf(own.queries)):
        return own.rows, own.rows
    rows = weighted_sums(asked) if options.loss == "relevance" else pifa(asked)
    if own is None:
        return rows, rows
    queries_I = np.bincount(asked.labels.indices, minlength=len(rows.indptr) - 1)
    rows = csr_array(diags_array((queries_I / (queries_I + own.queries)).astype(np.float32)) @ rows)
    return normalised(hstack([rows, own.rows], format="csr")), normalised(csr_array(rows + own.rows))


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
