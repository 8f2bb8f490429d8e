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

MAX_COUNT = 1 << 53
"""Most points or events of an item."""


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """counts_I: int64[I], training points or events with each item; points: all of them."""

    counts_I: NDArray[np.int64]
    points: int

    def check(self, items: int) -> None:
        """Raises BundleCorrupt where the counts cannot be those of so many items."""
        counts_I = self.counts_I
        if counts_I.dtype != np.int64 or counts_I.shape != (items,):
            raise BundleCorrupt(f"counts: {counts_I.dtype}{list(counts_I.shape)}, expected int64[{items}]")
        most = min(self.points, MAX_COUNT)
        if items and not (counts_I.min() >= 0 and counts_I.max() <= most):
            raise BundleCorrupt(f"counts from {counts_I.min()} to {counts_I.max()}, expected 0 to {most}, the number of points")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """As they are stored."""
        return {"counts": self.counts_I, "points": np.array([self.points], np.int64)}

    @staticmethod
    def of_arrays(arrays: Mapping[str, NDArray[Any]], items: int) -> LabelCounts:
        """From a file's arrays. Raises BundleCorrupt."""
        if arrays.keys() != {"counts", "points"}:
            raise BundleCorrupt(f"arrays {sorted(arrays)}, expected counts and points")
        points = arrays["points"]
        if points.dtype != np.int64 or points.shape != (1,):
            raise BundleCorrupt(f"points: {points.dtype}{list(points.shape)}, expected int64[1]")
        found = LabelCounts(arrays["counts"], int(points[0]))
        found.check(items)
        return found
