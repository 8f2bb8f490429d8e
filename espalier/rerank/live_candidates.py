"""What a snapshot of live items knows of candidates: their fields and node rows.

Legend: W item rows, P entries of live leaves, D node row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.live.items import LiveItems
from espalier.live.overlay import Overlay
from espalier.placement.evidence import joined_text


class LiveCandidates:
    """Fields and node rows, in one snapshot, of candidates that were put or changed after training."""

    def __init__(self, table: LiveItems, overlay: Overlay) -> None:
        self._table, self._overlay = table, overlay

    def numbers(self, column: str, rows_W: Int64) -> tuple[Int64, Float32]:
        """Positions of the item rows whose fields are not as trained, and these items' numbers in a column, NaN for null."""
        positions, [values] = self._values([column], rows_W)
        return positions, np.array([np.nan if value is None else float(value) for value in values], np.float32)

    def texts(self, columns: Sequence[str], rows_W: Int64) -> tuple[Int64, list[str]]:
        """The same positions, and these items' texts in some columns, item by item."""
        positions, values = self._values(columns, rows_W)
        return positions, texts_of(values)

    def _values(self, columns: Sequence[str], rows_W: Int64) -> tuple[Int64, list[list[Any]]]:
        positions = np.flatnonzero((rows_W >= self._overlay.items) | np.isin(rows_W, self._changed))
        rows = rows_W[positions]
        return positions, [self._table.values(column, rows) if len(positions) else [] for column in columns]

    def node_rows(self, rows_W: Int64) -> tuple[Int64, Float32]:
        """Positions of the item rows that have live leaves, and these leaves' node rows, float32[…, D]."""
        leaves = self._overlay.trees[0]
        handles = self._overlay.handles_of(rows_W)
        if leaves.rows_PD is None or not len(leaves):
            return np.empty(0, np.int64), np.empty((0, 1), np.float32)
        entries = leaves.of_handles(handles)
        positions = np.flatnonzero(entries)
        return positions, leaves.rows_PD[entries[positions]]

    @cached_property
    def _changed(self) -> Int64:
        """Trained item rows whose fields may have been changed."""
        return np.concatenate([self._overlay.row_W, self._overlay.changed[1]])


def texts_of(columns: Sequence[Sequence[object]]) -> list[str]:
    """The texts of items' values, item by item and column by column; that of a null is empty."""
    return [joined_text([value]) for values in zip(*columns, strict=True) for value in values]
