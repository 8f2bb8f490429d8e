"""Rows of live leaves in arrays that only grow: rows that a snapshot refers to stay as they are while later rows come.

A leaf's entry number (espalier.entry_lists) is the index of its row; entry 0 has no row. Written by one thread. A pool is rewritten when
its entries are.

Legend: P entries, X some entries, D node row.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Float32, Float64, Int32, Int64, read_only
from espalier.entry_lists import FIRST, with_room
from espalier.live.overlay import SparsePool
from espalier.live.rows import LiveRow
from espalier.stored_arrays import spans


class DensePool:
    """Node rows, float32[P, width], and counts of events, float64[P]. size: P."""

    def __init__(self, width: int) -> None:
        self._rows_PD, self._count_P = np.zeros((FIRST, width), np.float32), np.zeros(FIRST)
        self.size = 1

    def add(self, row: LiveRow) -> None:
        self._rows_PD, self._count_P = (with_room(array, self.size + 1) for array in (self._rows_PD, self._count_P))
        self._rows_PD[self.size], self._count_P[self.size] = row.values, row.count
        self.size += 1

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        room = max(FIRST, 2 * len(entry_X))
        self._rows_PD, self._count_P = (with_room(array[entry_X], room) for array in (self._rows_PD, self._count_P))
        self.size = len(entry_X)

    @property
    def numbers(self) -> int:
        """Count of the numbers of all entries, used or not."""
        return self.size * self._rows_PD.shape[1]

    @property
    def rows_PD(self) -> Float32:
        """Read-only."""
        return read_only(self._rows_PD[: self.size])[0]

    @property
    def count_P(self) -> Float64:
        """Read-only."""
        return read_only(self._count_P[: self.size])[0]


class SparseRowsPool:
    """Sparse rows: an entry has the features and values at begin_P … end_P − 1. size: P; weights: features of all entries."""

    def __init__(self) -> None:
        self._begin_P, self._end_P = np.zeros(FIRST, np.int64), np.zeros(FIRST, np.int64)
        self._feature, self._value = np.zeros(FIRST, np.int32), np.zeros(FIRST, np.float32)
        self.size, self.weights = 1, 0

    def add(self, feature: Int32, value: Float32) -> None:
        entry, end = self.size, self.weights + len(feature)
        self._begin_P, self._end_P = (with_room(array, entry + 1) for array in (self._begin_P, self._end_P))
        self._feature, self._value = (with_room(array, end) for array in (self._feature, self._value))
        self._begin_P[entry], self._end_P[entry] = self.weights, end
        self._feature[self.weights : end], self._value[self.weights : end] = feature, value
        self.weights, self.size = end, entry + 1

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        count_X = self._end_P[entry_X] - self._begin_P[entry_X]
        end_X, weight = np.cumsum(count_X), spans(self._begin_P[entry_X], self._end_P[entry_X])
        room, self.size, self.weights = max(FIRST, 2 * len(entry_X)), len(entry_X), len(weight)
        self._begin_P, self._end_P = (with_room(array, room) for array in (end_X - count_X, end_X))
        self._feature, self._value = (with_room(array[weight], max(FIRST, 2 * len(weight))) for array in (self._feature, self._value))

    @property
    def arrays(self) -> tuple[Int64, Int64, Int32, Float32]:
        """begin_P, end_P, features and values."""
        entries, weights = slice(self.size), slice(self.weights)
        return self._begin_P[entries], self._end_P[entries], self._feature[weights], self._value[weights]


class WeightPool:
    """Weights of linear scorers, and the rows of a tail. size: P."""

    def __init__(self) -> None:
        self._weights, self._tails = SparseRowsPool(), SparseRowsPool()
        self._bias_P = np.zeros(FIRST, np.float32)

    @property
    def size(self) -> int:
        return self._weights.size

    @property
    def numbers(self) -> int:
        """Count of the numbers of all entries, used or not."""
        return self._weights.weights + self._tails.weights

    def add(self, row: LiveRow) -> None:
        entry = self.size
        self._bias_P = with_room(self._bias_P, entry + 1)
        self._bias_P[entry] = row.bias
        self._weights.add(row.feature, row.values)
        self._tails.add(row.tail_feature, row.tail_value)

    def keep(self, entry_X: Int64) -> None:
        """Keep only some entries, in this order, in new arrays."""
        self._bias_P = with_room(self._bias_P[entry_X], max(FIRST, 2 * len(entry_X)))
        self._weights.keep(entry_X)
        self._tails.keep(entry_X)

    @property
    def sparse(self) -> SparsePool:
        """Read-only arrays."""
        begin_P, end_P, feature, weight = self._weights.arrays
        return SparsePool(*read_only(begin_P, end_P, self._bias_P[: self.size], feature, weight, *self._tails.arrays))
