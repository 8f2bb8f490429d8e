"""Label features: the normalised sum of a label's points. PIFA (positive instance feature aggregation: PECOS §3.1; XR-Linear §3.2) gives
each point one weight, XReg (Eq. 3) weighs points by relevance. Own texts of items are added to their points.

Legend: B points, I labels, F features.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.sparse import csr_array, hstack

from espalier.arrays import Int64

from ..data.csr import Csr, lengths, normalised, scaled
from ..data.xmc import LabelledPoints
from ..linear.own_texts import OwnTexts
from ..specification.linear import LinearOptions


def label_features(train: LabelledPoints, own_texts: OwnTexts | None, options: LinearOptions) -> tuple[Csr, Csr]:
    """Rows [I, …] of length 1 that a tree is built from, and [I, F], in the features of queries, that score items (`add_own_texts`).

    With own texts, the n points of an item weigh n / (n + own_texts.queries). Points that are texts of items do not count. The tree is
    built from the items' own words alone: with words of near items it had worse clusters of short texts.
    """
    people_points = train if train.own_B is None else train.take(train.asked)
    if own_texts is not None and (not len(people_points) or math.isinf(own_texts.queries)):
        return own_texts.own_directions(), own_texts.rows
    rows = sum_points(people_points, options)
    if own_texts is None:
        return rows, rows
    counts_I = np.bincount(people_points.labels.indices, minlength=len(rows.indptr) - 1)
    labels = normalised(hstack([_damped(rows, counts_I, own_texts.queries), own_texts.own_directions()], format="csr"))
    return labels, add_own_texts(rows, counts_I, own_texts.rows, own_texts.queries)


def sum_points(points: LabelledPoints, options: LinearOptions) -> Csr:
    """Rows [I, F] of length 1: the sums of each label's points, weighed as the loss demands."""
    return weighted_sums(points) if options.loss == "relevance" else pifa(points)


def add_own_texts(rows: Csr, counts_I: Int64, text_rows: Csr, queries: float) -> Csr:
    """Rows [I, F]: the directions of the sums of points `rows`, of counts_I points each, plus the items' texts, which weigh as much as so
    many queries. A row without points is as long as that of the texts; with points, its length approaches 1.
    """
    if math.isinf(queries):
        return text_rows
    text_length_I, text_share_I = lengths(text_rows), queries / (counts_I + queries)
    length_I = np.where(text_length_I > 0, text_length_I, 1) ** text_share_I.astype(np.float32)
    directions = normalised(csr_array(_damped(rows, counts_I, queries) + normalised(text_rows)))
    return scaled(directions, length_I)


def _damped(rows: Csr, counts_I: Int64, queries: float) -> Csr:
    return scaled(rows, counts_I / (counts_I + queries))


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
