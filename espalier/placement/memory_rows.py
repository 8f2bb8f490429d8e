"""What a live item has to do with the items of its events, in the units of a bundle's memory.

    S[a, new] = min(q_a² / p_a, largest_a) · (share of the events whose history holds a)^¼,   S[new, a] = 0

q_a is the ninth decile of a's own row of S, p_a its median. A bundle does not hold what its S was counted with. q_a in place of the minimum
would be near what those counts give for items with five events, on the embedded sample and on MovieLens; by validation queries of both it
pays to be above the decile as far as that is above the median: of an item with few events the memory knows more than its row does. Where S
is flat, more than that lifts new items' parents into all beams. No value exceeds those of its row, so folds do not raise them. What led to
an item says little of what comes after it: with S[new, a] > 0, histories that hold the item lose what their other items ask for.

Legend: I trained items.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.memory import Memory
from espalier.read_only import read_only

Array = NDArray[Any]
HIGH, MIDDLE, POWER = 0.9, 0.5, 0.25
MOST = 256
"""Most items that a live item's memory names: those of the largest S."""


class MemoryRows:
    """Makes the memory of live items. Used by any number of threads."""

    def __init__(self, memory: Memory) -> None:
        self.length = len(memory.weight)
        arrays = read_only(memory.offset, memory.value)
        high_I, middle_I, largest_I = (_levels(*arrays, quantile) for quantile in (HIGH, MIDDLE, 1.0))
        self._level_I = np.minimum(high_I**2 / np.where(middle_I > 0, middle_I, 1), largest_I)
        positive = self._level_I[self._level_I > 0]
        self._usual = float(np.median(positive)) if len(positive) else 0.0  # of live items, which have no row of their own

    def of(self, history_ET: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Item rows, ascending, and S between them and an item that these histories (−1: no item, the last item last) led to."""
        if not len(history_ET):
            return np.empty(0, np.int64), np.empty(0)
        latest = np.concatenate([np.unique(history[history >= 0][-self.length :]) for history in history_ET])
        rows, count = np.unique(latest, return_counts=True)
        trained = rows < len(self._level_I)
        level = np.where(trained, self._level_I[np.where(trained, rows, 0)], self._usual)
        values = level * (count / len(history_ET)) ** POWER
        kept = np.sort(np.argsort(-values, kind="stable")[:MOST])
        return rows[kept], values[kept]


@compiled()
def _levels(offset: Array, value: Array, quantile: float) -> Array:
    """float64[I]: a quantile of each item's values above 0; 0 where it has none."""
    levels = np.zeros(len(offset) - 1)
    for a in range(len(levels)):
        own = value[offset[a] : offset[a + 1]]
        own = np.sort(own[own > 0])
        if len(own):
            levels[a] = own[int(np.ceil(quantile * (len(own) - 1)))]
    return levels
