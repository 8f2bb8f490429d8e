"""Integer keys in order with integers beside them, as arrays that snapshots may keep: changes make new arrays, many at once.

Legend: X keys, C columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class SortedArrays:
    """Keys (int64, ascending) with `columns` numbers each. Changes are collected until the arrays are asked for: O(X) then, whatever their
    number.
    """

    def __init__(self, columns: int = 0) -> None:
        self._arrays_KX = np.empty((1 + columns, 0), np.int64)
        self._pending: dict[int, tuple[int, ...] | None] = {}

    def set(self, key: int, *values: int) -> None:
        self._pending[key] = values

    def discard(self, key: int) -> None:
        self._pending[key] = None

    @property
    def arrays_KX(self) -> Int64:
        """int64[1 + C, X]: the keys and their columns. The array is never written to again."""
        if self._pending:
            changed = np.array(sorted(self._pending), np.int64)
            at = np.searchsorted(self._arrays_KX[0], changed)
            there = at < self._arrays_KX.shape[1]
            there[there] = self._arrays_KX[0, at[there]] == changed[there]
            kept_KX = np.delete(self._arrays_KX, at[there], axis=1) if there.any() else self._arrays_KX
            new = [(key, *values) for key, values in sorted(self._pending.items()) if values is not None]
            self._pending.clear()
            new_KX = np.array(new, np.int64).reshape(-1, len(kept_KX)).T
            self._arrays_KX = np.insert(kept_KX, np.searchsorted(kept_KX[0], new_KX[0]), new_KX, axis=1)
        return self._arrays_KX
