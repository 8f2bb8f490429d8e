"""The trained items whose rows have the direction of a new one.

Legend: I trained items, D node row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.placement.graph_rows import RowScale

Floats = NDArray[np.float64]
Int64 = NDArray[np.int64]
NEAREST = 10
"""Items that are named."""


class NearRows:
    """Finds them. A copy of the leaves' rows, less their mean, of length 1, without biases: float32[I, D]."""

    def __init__(self, node_rows_ND: NDArray[np.float32] | NDArray[np.float16], leaf_of_item: Int64, scale: RowScale) -> None:
        rows_ID = np.asarray(node_rows_ND[leaf_of_item], np.float32)
        rows_ID = np.where(scale.is_free_S, rows_ID - scale.row_S.astype(np.float32), np.float32(0))
        length_I = np.linalg.norm(rows_ID, axis=1, keepdims=True)
        self._unit_ID = (rows_ID / np.where(length_I > 0, length_I, 1)).astype(np.float32)
        self._scale = scale

    def of(self, row_D: Floats, but: int = -1) -> tuple[Int64, Floats]:
        """At most NEAREST items, the nearest first, and their cosines, at least 0. but: an item that is left out, −1 for none."""
        away_D = np.where(self._scale.is_free_S, row_D - self._scale.row_S, 0)
        cosine_I = self._unit_ID @ (away_D / max(float(np.linalg.norm(away_D)), 1e-12)).astype(np.float32)
        items = np.argsort(-cosine_I, kind="stable")[: NEAREST + 1]
        items = items[items != but][:NEAREST]
        return items, np.maximum(cosine_I[items].astype(np.float64), 0)
