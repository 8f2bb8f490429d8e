"""Label features: the normalised sum of a label's points. PIFA (positive instance feature aggregation: PECOS §3.1; XR-Linear §3.2) gives
each point one weight, XReg (Eq. 3) weighs points by relevance.

Legend: B points, I labels, F features.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from training.data.csr import Csr, normalised
from training.data.xmc import LabelledPoints


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
