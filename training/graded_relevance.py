"""The relevance of items to queries, true or predicted, as sparse rows.

Knows sparse rows and their transposes. Does not know where relevance comes from (data/relevance.py) or how predictions are judged
(graded_metrics.py). Raw arrays instead of scipy.sparse, since predictions have an order within a row.

Legend: B queries (or points), I items (or labels), E entries, M results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Float64, Int64
from espalier.search import NO_ITEM
from espalier.text.sparse_rows import SparseRows


@dataclass(frozen=True, eq=False)
class Relevance:
    """B rows over I columns; pairs without an entry are 0. The entries of a row are in any order; those of predictions are best first.

    offset_B  int64[B + 1]: where the entries of each row begin
    column_E  int64[E], from 0 to width − 1, each once in a row
    value_E   float64[E], finite
    width     I
    """

    offset_B: Int64
    column_E: Int64
    value_E: Float64
    width: int

    def __len__(self) -> int:
        return len(self.offset_B) - 1

    @staticmethod
    def of_rows(rows: SparseRows) -> Relevance:
        """The relevance of sparse rows, for example a matrix of labels."""
        return Relevance(rows.indptr.astype(np.int64), rows.indices.astype(np.int64), rows.values.astype(np.float64), rows.width)

    @staticmethod
    def of_lists(columns: Sequence[Int64], values: Sequence[NDArray[np.floating]], width: int) -> Relevance:
        """The relevance of rows of columns and values, two arrays of equal length each."""
        offset_B = np.concatenate([[0], np.cumsum([len(column) for column in columns], dtype=np.int64)]).astype(np.int64)
        none: list[NDArray[np.floating]] = [np.zeros(0)]
        return Relevance(
            offset_B, np.concatenate([*columns, np.zeros(0, np.int64)]), np.concatenate([*values, *none]).astype(np.float64), width
        )

    @staticmethod
    def of_predictions(item_rows_BM: Int64, scores_BM: NDArray[np.floating], width: int) -> Relevance:
        """The relevance of a search's results: item rows, best first, NO_ITEM as padding, and their scores."""
        is_item_BM = item_rows_BM != NO_ITEM
        offset_B = np.concatenate([[0], np.cumsum(is_item_BM.sum(axis=1))]).astype(np.int64)
        return Relevance(offset_B, item_rows_BM[is_item_BM].astype(np.int64), scores_BM[is_item_BM].astype(np.float64), width)

    @cached_property
    def row_E(self) -> Int64:
        """int64[E]: the row of each entry."""
        return np.repeat(np.arange(len(self)), np.diff(self.offset_B))

    @cached_property
    def position_E(self) -> Int64:
        """int64[E]: the position of each entry in its row, from 0."""
        return np.arange(len(self.column_E)) - self.offset_B[self.row_E]

    @cached_property
    def key_E(self) -> Int64:
        """int64[E]: row · width + column, which is different for every pair."""
        key_E: Int64 = self.row_E * self.width + self.column_E
        return key_E

    @cached_property
    def by_key(self) -> tuple[Int64, Int64]:
        """int64[E] twice: the keys, ascending, and the entry of each."""
        order_E = np.argsort(self.key_E)
        return self.key_E[order_E], order_E

    def at(self, key_E: Int64) -> Float64:
        """float64: the values of some pairs; 0 for pairs without an entry."""
        if not len(self.key_E):
            return np.zeros(len(key_E))
        sorted_E, order_E = self.by_key
        position = np.minimum(np.searchsorted(sorted_E, key_E), len(order_E) - 1)
        return np.where(sorted_E[position] == key_E, self.value_E[order_E[position]], 0.0)

    def transposed(self) -> Relevance:
        """Rows and columns swapped: for each item its queries, by descending value, ties by row."""
        order_E = np.lexsort((self.row_E, -self.value_E, self.column_E))
        offset = np.concatenate([[0], np.cumsum(np.bincount(self.column_E, minlength=self.width))]).astype(np.int64)
        return Relevance(offset, self.row_E[order_E], self.value_E[order_E], len(self))

    def times(self, factor: NDArray[np.floating] | float) -> Relevance:
        """The relevance with values multiplied by a number, or by one for each column (float[I])."""
        by_E = factor if isinstance(factor, float) else factor[self.column_E]
        return Relevance(self.offset_B, self.column_E, self.value_E * by_E, self.width)
