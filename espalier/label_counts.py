"""label-counts.safetensors: the number of training points, or of events in training lists, with each item.

Propensities and the rows of live items are computed from it. Engines do not read it; a bundle may lack it.

Legend: I items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from espalier.arrays import Array, Int64
from espalier.errors import BundleCorrupt
from espalier.stored_arrays import check_arrays, check_length

MAX_COUNT = 1 << 53
"""Most points or events of an item."""


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """counts_I: int64[I], training points or events with each item; points: the number of all points or events."""

    counts_I: Int64
    points: int

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the file."""
        return {"counts": self.counts_I, "points": np.array([self.points], np.int64)}

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], items: int) -> LabelCounts:
        """The counts of `items` items, from a file's arrays. Raises BundleCorrupt."""
        check_arrays(arrays, {"counts": np.int64, "points": np.int64})
        counts_I, points = arrays["counts"], arrays["points"]
        check_length("counts", counts_I, items)
        check_length("points", points, 1)
        most = min(int(points[0]), MAX_COUNT)
        if items and not (counts_I.min() >= 0 and counts_I.max() <= most):
            raise BundleCorrupt(f"counts from {counts_I.min()} to {counts_I.max()}, expected 0 to {most}, the number of points")
        return LabelCounts(counts_I, int(points[0]))
