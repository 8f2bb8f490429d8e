"""label-counts.safetensors: how many training points, or events of training lists, had each item.

Propensities and rows of live items are made by it. Engines do not read it; a bundle may lack it.

Legend: I items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import BundleCorrupt
from espalier.stored_arrays import check_arrays, check_length

MAX_COUNT = 1 << 53
"""Most points or events of an item."""


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """counts_I: int64[I], training points or events with each item; points: all of them."""

    counts_I: NDArray[np.int64]
    points: int

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As they are stored."""
        return {"counts": self.counts_I, "points": np.array([self.points], np.int64)}

    @staticmethod
    def of_arrays(arrays: Mapping[str, NDArray[Any]], items: int) -> LabelCounts:
        """From a file's arrays, of so many items. Raises BundleCorrupt."""
        check_arrays(arrays, {"counts": np.int64, "points": np.int64})
        counts_I, points = arrays["counts"], arrays["points"]
        check_length("counts", counts_I, items)
        check_length("points", points, 1)
        most = min(int(points[0]), MAX_COUNT)
        if items and not (counts_I.min() >= 0 and counts_I.max() <= most):
            raise BundleCorrupt(f"counts from {counts_I.min()} to {counts_I.max()}, expected 0 to {most}, the number of points")
        return LabelCounts(counts_I, int(points[0]))
