"""Compiled: adds the tail to the ranks of one query's items. See espalier.tail for the formulas.

Legend: I items, R handles of live ones, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.entry_lists import entry_of
from espalier.read_only import read_only
from espalier.tail import FARTHEST, FLOOR, Tail

Array = NDArray[Any]


class TailArrays(NamedTuple):
    """A tail as compiled code reads it. `alpha` 1: there is no tail. `gamma` −1: the form is the product."""

    alpha: float
    gamma: float
    row_begin: Array
    feature: Array
    value: Array
    square_I: Array

    @staticmethod
    def of(tail: Tail | None) -> TailArrays:
        """The arrays of a bundle's tail."""
        if tail is None:
            arrays = (np.empty(0, dtype) for dtype in (np.int64, np.int32, np.float32, np.float64))
            return TailArrays(1.0, -1.0, *read_only(*arrays))
        gamma = tail.info.gamma if tail.info.form == "gaussian" else -1.0
        return TailArrays(tail.info.alpha, gamma, *read_only(tail.row_begin, tail.feature, tail.value, tail.square_I))


@compiled()
def add_tail(
    ranks: Array, items: Array, count: int, features: Array, values: Array, tail: Any, query_F: Array, live: tuple[Any, ...]
) -> None:
    """Replace the first `count` ranks of some items by alpha · rank + (1 − alpha) · the tail's part.

    features, values  the query's · query_F: float64[F], zeros before and after the call
    live  the fields of LiveRows: items from I on are live
    """
    alpha, gamma, row_begin, feature, value, square_I = tail
    square = 0.0
    for j in range(len(features)):
        query_F[features[j]] = values[j]
        square += np.float64(values[j]) * np.float64(values[j])
    for x in range(count):
        item, product, own_square = items[x], 0.0, 0.0
        if item >= live[0]:
            _, _, leaves, begin_P, end_P, live_feature, live_value = live
            entry = entry_of(item - live[0], leaves)
            for e in range(begin_P[entry], end_P[entry]):
                product += query_F[live_feature[e]] * live_value[e]
                own_square += np.float64(live_value[e]) * np.float64(live_value[e])
        else:
            for e in range(row_begin[item], row_begin[item + 1]):
                product += query_F[feature[e]] * value[e]
            own_square = square_I[item]
        if gamma < 0:
            near = np.log(max(product, FLOOR))
        else:
            far = min(gamma / 2 * max(square + own_square - 2 * product, 0.0), FARTHEST)
            near = -far - np.log1p(np.exp(-far))
        ranks[x] = alpha * ranks[x] + (1 - alpha) * near
    for j in range(len(features)):
        query_F[features[j]] = 0
