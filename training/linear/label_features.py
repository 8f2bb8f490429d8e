"""What a label looks like: PIFA, the normalised sum of the points that have it (PECOS §3.1; XR-Linear §3.2).

Legend: B points, I labels, F features.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from espalier.text.sparse_rows import SparseRows
from training.data.xmc import LabelledPoints


def pifa(data: LabelledPoints) -> SparseRows:
    """float32 rows [I, F] of length 1. A point counts 1 / √(its labels) for each of them; a label without points has an empty row."""
    points = data.points
    counts = np.diff(data.labels_from)
    share = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
    of_label = csr_array((share, data.labels, data.labels_from), shape=(len(data), data.label_count)).T.tocsr()
    sums = of_label @ csr_array((points.values, points.indices, points.indptr), shape=(len(points), points.width))
    sums.sort_indices()
    rows = SparseRows(sums.indptr.astype(np.int64), sums.indices.astype(np.int32), sums.data.astype(np.float32), points.width)
    return rows.normalised()
