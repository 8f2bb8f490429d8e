"""Integer keys in order with integers beside them, as arrays that snapshots may keep: changes make new arrays, many at once.

Legend: X keys, C columns, K = 1 + C, U changed keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled

Array = NDArray[Any]
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
            nothing = (0,) * (len(self._arrays_KX) - 1)
            rows = [(key, *(nothing if values is None else values), values is not None) for key, values in sorted(self._pending.items())]
            self._pending.clear()
            self._arrays_KX = _merged(self._arrays_KX, np.array(rows, np.int64))
        return self._arrays_KX


@compiled()
def _merged(arrays_KX: Array, changed_UK: Array) -> Array:
    """int64[K, …]: the arrays with some keys set, or left out where the number behind their columns is 0. Changes ascend by key."""
    rows, before = arrays_KX.shape
    at_U = np.searchsorted(arrays_KX[0], changed_UK[:, 0])
    after = before
    for u in range(len(changed_UK)):
        there = at_U[u] < before and arrays_KX[0, at_U[u]] == changed_UK[u, 0]
        after += changed_UK[u, rows] - (1 if there else 0)
    merged_KX = np.empty((rows, after), np.int64)
    x = n = 0
    for u in range(len(changed_UK)):
        kept = at_U[u] - x
        merged_KX[:, n : n + kept] = arrays_KX[:, x : x + kept]
        x, n = x + kept, n + kept
        if x < before and arrays_KX[0, x] == changed_UK[u, 0]:
            x += 1
        if changed_UK[u, rows]:
            merged_KX[:, n] = changed_UK[u, :rows]
            n += 1
    merged_KX[:, n:] = arrays_KX[:, x:]
    return merged_KX
