"""Rows of live leaves in arrays that only grow: what a snapshot refers to stays as it is while later rows come.

The row of a leaf is at the place that has its entry's number (espalier.entry_lists); place 0 has none. Written by one thread. A pool is
written anew when its entries are.

Legend: P places, D node row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.entry_lists import FIRST, with_room
from espalier.live.overlay import SparsePool
from espalier.live.rows import LiveRow
from espalier.read_only import read_only


class DensePool:
    """Node rows, float32[P, width], and counts of events, float64[P]."""

    def __init__(self, width: int) -> None:
        self._rows_PD, self._count_P = np.zeros((FIRST, width), np.float32), np.zeros(FIRST)
        self.places = 1

    def add(self, row: LiveRow) -> None:
        self._rows_PD, self._count_P = (with_room(array, self.places + 1) for array in (self._rows_PD, self._count_P))
        self._rows_PD[self.places], self._count_P[self.places] = row.values, row.count
        self.places += 1

    def keep(self, place_X: NDArray[np.int64]) -> None:
        """Keep some places alone, in this order, in new arrays."""
        room = max(FIRST, 2 * len(place_X))
        self._rows_PD, self._count_P = (with_room(array[place_X], room) for array in (self._rows_PD, self._count_P))
        self.places = len(place_X)

    @property
    def numbers(self) -> int:
        """Numbers of all places, used or not."""
        return self.places * self._rows_PD.shape[1]

    @property
    def rows_PD(self) -> NDArray[np.float32]:
        """Read-only."""
        return read_only(self._rows_PD[: self.places])[0]

    @property
    def count_P(self) -> NDArray[np.float64]:
        """Read-only."""
        return read_only(self._count_P[: self.places])[0]


class SparseRowsPool:
    """Sparse rows: those at a place are its features and their values, at begin_P … end_P − 1."""

    def __init__(self) -> None:
        self._begin_P, self._end_P = np.zeros(FIRST, np.int64), np.zeros(FIRST, np.int64)
        self._feature, self._value = np.zeros(FIRST, np.int32), np.zeros(FIRST, np.float32)
        self.places, self.entries = 1, 0

    def add(self, feature: NDArray[np.int32], value: NDArray[np.float32]) -> None:
        place, end = self.places, self.entries + len(feature)
        self._begin_P, self._end_P = (with_room(array, place + 1) for array in (self._begin_P, self._end_P))
        self._feature, self._value = (with_room(array, end) for array in (self._feature, self._value))
        self._begin_P[place], self._end_P[place] = self.entries, end
        self._feature[self.entries : end], self._value[self.entries : end] = feature, value
        self.entries, self.places = end, place + 1

    def keep(self, place_X: NDArray[np.int64]) -> None:
        """Keep some places alone, in this order, in new arrays."""
        count_X = self._end_P[place_X] - self._begin_P[place_X]
        end_X = np.cumsum(count_X)
        entry = np.arange(int(count_X.sum())) + np.repeat(self._begin_P[place_X] - end_X + count_X, count_X)
        room, self.places, self.entries = max(FIRST, 2 * len(place_X)), len(place_X), len(entry)
        self._begin_P, self._end_P = (with_room(array, room) for array in (end_X - count_X, end_X))
        self._feature, self._value = (with_room(array[entry], max(FIRST, 2 * len(entry))) for array in (self._feature, self._value))

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Where the rows begin and end, features and values."""
        places, entries = slice(self.places), slice(self.entries)
        return self._begin_P[places], self._end_P[places], self._feature[entries], self._value[entries]


class WeightPool:
    """Weights of linear scorers, and the rows of a tail."""

    def __init__(self) -> None:
        self._weights, self._tails = SparseRowsPool(), SparseRowsPool()
        self._bias_P = np.zeros(FIRST, np.float32)

    @property
    def places(self) -> int:
        return self._weights.places

    @property
    def numbers(self) -> int:
        """Numbers of all places, used or not."""
        return self._weights.entries + self._tails.entries

    def add(self, row: LiveRow) -> None:
        place = self.places
        self._bias_P = with_room(self._bias_P, place + 1)
        self._bias_P[place] = row.bias
        self._weights.add(row.feature, row.values)
        self._tails.add(row.tail_feature, row.tail_value)

    def keep(self, place_X: NDArray[np.int64]) -> None:
        """Keep some places alone, in this order, in new arrays."""
        self._bias_P = with_room(self._bias_P[place_X], max(FIRST, 2 * len(place_X)))
        self._weights.keep(place_X)
        self._tails.keep(place_X)

    @property
    def sparse(self) -> SparsePool:
        """Read-only arrays."""
        begin_P, end_P, feature, weight = self._weights.arrays
        return SparsePool(*read_only(begin_P, end_P, self._bias_P[: self.places], feature, weight, *self._tails.arrays))
