"""The tail of a forest: adds to an item's score how near the query is to the item's training points (XReg-t, PfastreXML).

Regressors are poor for items with few training points; the direction of these points predicts better. With s the mean score of the trees
and μ the item's row, of length 1 or empty:

    rank = α · log s + (1 − α) · log near(x, μ)

    product   near = max(⟨x, μ⟩, FLOOR)                 (XReg-t, by the authors' last pass)
    gaussian  near = 1 / (1 + exp(γ / 2 · ‖x − μ‖²))    (PfastreXML)

Legend: I items, F features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.arrays import Array, Float32, Float64, Int32, Int64
from espalier.errors import BundleCorrupt
from espalier.manifest import TailInfo
from espalier.stored_arrays import Dtypes, check_arrays, check_length, check_rows

FLOOR = 1e-6
"""Least value of a product: an item that shares no feature with the query comes last, but can still come back."""
FARTHEST = 1e6
"""The largest γ / 2 · ‖x − μ‖², so that ranks are finite."""
ARRAYS: Dtypes = {"row_begin": np.int64, "feature": np.int32, "value": np.float32}


@dataclass(frozen=True, eq=False)
class Tail:
    """Rows by item: entries row_begin[i] … row_begin[i + 1] − 1, features ascending.

    row_begin int64[I + 1] · feature int32 · value float32 · width F
    """

    info: TailInfo
    row_begin: Int64
    feature: Int32
    value: Float32
    width: int

    @cached_property
    def square_I(self) -> Float64:
        """float64[I]: the squared lengths of the rows."""
        squares = np.concatenate([[0], np.cumsum(self.value.astype(np.float64) ** 2)])
        return np.asarray(squares[self.row_begin[1:]] - squares[self.row_begin[:-1]])

    def part(self, features: Int32, values: Float32, item: int) -> float:
        """(1 − α) · log near of one item and a query of some features, ascending, and their values; explanations show it."""
        entries = slice(int(self.row_begin[item]), int(self.row_begin[item + 1]))
        return self.part_of_row(features, values, self.feature[entries], self.value[entries])

    def part_of_row(self, features: Int32, values: Float32, row_features: Int32, row_values: Float32) -> float:
        """`part` for an item's row, which a live item brings itself."""
        _, query_positions, row_positions = np.intersect1d(features, row_features, assume_unique=True, return_indices=True)
        query, row = values.astype(np.float64), row_values.astype(np.float64)
        product = float(query[query_positions] @ row[row_positions])
        if self.info.form == "product":
            near = np.log(max(product, FLOOR))
        else:
            distance = max(float(query @ query) + float(row @ row) - 2 * product, 0)
            near = -np.logaddexp(0, min(self.info.gamma / 2 * distance, FARTHEST))
        return float((1 - self.info.alpha) * near)

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the file."""
        return {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], info: TailInfo, items: int, width: int) -> Tail:
        """The tail of `items` items, from a file's arrays. Raises BundleCorrupt."""
        check_arrays(arrays, ARRAYS)
        tail = Tail(info, **arrays, width=width)
        for name in ("feature", "value"):
            check_length(name, arrays[name], info.entries)
        check_rows("feature", tail.feature, tail.row_begin, items, width)
        if not np.isfinite(tail.value).all() or np.abs(tail.square_I - 1)[np.diff(tail.row_begin) > 0].max(initial=0) > 1e-3:
            raise BundleCorrupt("value: rows must have the length 1, or no entry")
        return tail
