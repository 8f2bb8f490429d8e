"""What a re-ranker needs of candidates that training did not see, or saw otherwise: their fields and node rows as they are now.

Knows live items. Does not know features.

Legend: W rows, D node row.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.live.items import LiveItems
from espalier.live.overlay import Overlay

Int64 = NDArray[np.int64]


class LiveCandidates:
    """Of one snapshot."""

    def __init__(self, table: LiveItems, overlay: Overlay) -> None:
        self._table, self._overlay = table, overlay

    def numbers(self, column: str, rows_W: Int64) -> tuple[Int64, NDArray[np.float32]]:
        """Which of some item rows (positions) are not as trained, and their numbers in a column; NaN where there is none."""
        at = np.flatnonzero((rows_W >= self._overlay.items) | np.isin(rows_W, self._changed))
        values: list[Any] = self._table.values(column, rows_W[at]) if len(at) else []
        return at, np.array([np.nan if value is None else float(value) for value in values], np.float32)

    def node_rows(self, rows_W: Int64) -> tuple[Int64, NDArray[np.float32]]:
        """Which of some item rows (positions) have live leaves, and the leaves' node rows, float32[…, D]."""
        leaves = self._overlay.trees[0]
        handles = self._overlay.handles_of(rows_W)
        if leaves.rows_PD is None or not len(leaves):
            return np.empty(0, np.int64), np.empty((0, 1), np.float32)
        order_X = self._by_handle
        at_X = np.minimum(np.searchsorted(leaves.handle_X[order_X], handles), len(leaves) - 1)
        place = order_X[at_X]
        at = np.flatnonzero((handles >= 0) & (leaves.handle_X[place] == handles))
        return at, leaves.rows_PD[leaves.place_X[place[at]]]

    @cached_property
    def _by_handle(self) -> Int64:
        return np.argsort(self._overlay.trees[0].handle_X)

    @cached_property
    def _changed(self) -> Int64:
        """Trained item rows whose fields may have been changed."""
        return np.concatenate([self._overlay.row_W, self._overlay.changed[1]])
