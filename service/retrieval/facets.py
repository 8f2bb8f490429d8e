"""Facets: how many items that a query may get have each value of a column.

A scan of the column in blocks. Eligible items are found without the mask of nodes that a search takes: so what people look at puts nothing
into the cache of masks, which the filters of customers fill. Does not know HTTP, nor how scans are bounded (scans.py).

Legend: I trained items, W rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
from espalier.masks.filters import Filter, ItemFilters
from espalier.tree import Tree

from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.value_counts import Tally, count_values, first_of_each, is_list, is_number, present_values

LIVE_ROWS = 1 << 12
"""Live items that are looked at between two checks of the deadline."""
SCANNED_ROWS = 1 << 16
"""Rows that are counted between two checks of the deadline."""
MAX_VALUES = 1 << 17
"""Distinct values of a column that are counted. Where the eligible items have more, none is listed."""
MAX_BYTES = 8 << 20
"""Texts in one answer: the list ends before the value that would make them longer."""
BINS = 20
"""Bins of a histogram."""


@dataclass(frozen=True)
class EligibleItems:
    """trained_I: bool[I], items with the fields that they were trained with. later_W: int64, rows of items with fields of their own."""

    trained_I: NDArray[np.bool_]
    later_W: NDArray[np.int64]

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.trained_I)) + len(self.later_W)


def eligible_items(view: View, tree: Tree, filters: ItemFilters, filter: Filter, check: Check) -> EligibleItems:
    """O(I), and as slow as a mask where the filter is the first on a column. Raises DeadlinePassed.

    tree, filters  of the version; of a forest the first tree
    """
    standing = view.standing or view.overlay.standing
    items = len(tree.leaf_of_item)
    standing_I = np.ones(items, np.bool_) if standing is None else standing.eligible_N[tree.leaf_of_item]
    trained_I = standing_I.copy()
    if filter:
        trained_I &= filters.matches(filter, np.arange(items))
    check()
    overlay = view.overlay
    changed = overlay.changed[1]
    trained_I[changed] = False
    later_W = np.concatenate([overlay.item_R[overlay.eligible_R], changed[standing_I[changed]]])
    if filter:
        passing = [np.empty(0, np.int64)]
        for begin in range(0, len(later_W), LIVE_ROWS):
            rows = later_W[begin : begin + LIVE_ROWS]
            passing.append(rows[view.matches(filter, rows)])
            check()
        later_W = np.concatenate(passing)
    return EligibleItems(trained_I, later_W)


class Column(NamedTuple):
    """A column of the catalogue, as its eligible items have it."""

    name: str
    view: View
    trained: pa.ChunkedArray
    eligible: EligibleItems

    def blocks(self, check: Check) -> Iterator[pa.Array]:
        """The values of all eligible items, a block at a time. Raises DeadlinePassed."""
        for begin in range(0, len(self.trained), SCANNED_ROWS):
            check()
            eligible_B = self.eligible.trained_I[begin : begin + SCANNED_ROWS]
            yield self.trained.slice(begin, SCANNED_ROWS).filter(pa.array(eligible_B)).combine_chunks()
        for begin in range(0, len(self.eligible.later_W), LIVE_ROWS):
            check()
            yield pa.array(self.view.items.values(self.name, self.eligible.later_W[begin : begin + LIVE_ROWS]), self.trained.type)


def facets(model: LoadedModel, name: str, conditions: Filter, limit: int, check: Check, live: bool = True) -> dict[str, Any]:
    """The answer: the `limit` most frequent values among the items that pass a filter, by whatever they have in the column itself.

    live  whether the live catalogue counts
    Raises InvalidQuery where the column cannot be filtered, DeadlinePassed.
    """
    if name not in model.filters.fields:
        raise InvalidQuery("column", name, f"a column that can be filtered: {', '.join(model.filters.fields)}")
    view = model.live.view(live)
    others = Filter(*(tuple(one for one in part if one[0] != name) for part in (conditions.wanted, conditions.barred)))
    eligible = eligible_items(view, model.bundle.tree, model.filters, others, check)
    column = Column(name, view, model.bundle.items.column(name), eligible)
    tally = Tally(column.trained.type, MAX_VALUES)
    for block in column.blocks(check):
        tally.add(count_values(block))
    values, items_V = tally.total()
    limit = min(limit, _readable(values[:limit]))
    listed = values[:limit]
    found: dict[str, Any] = {
        "column": name,
        "values": [{"value": value, "count": count} for value, count in zip(listed.to_pylist(), items_V[:limit].tolist(), strict=True)],
        "others": 0,
        "missing": eligible.count - tally.having,
        "eligible": eligible.count,
        "distinct": None if tally.overflowed else len(values),
    }
    if tally.overflowed or len(values) > limit:
        found["others"] = tally.having - _having_any(column, listed, items_V[:limit].sum(), check)
        if is_number(column.trained.type):
            found |= _histogram(column, check)
    return found


def _readable(values: pa.Array) -> int:
    """How many of the first values an answer has room for."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return len(values)
    return int(np.searchsorted(np.cumsum(np.asarray(pc.binary_length(values), np.int64)), MAX_BYTES, side="right"))


def _having_any(column: Column, listed: pa.Array, pairs: int, check: Check) -> int:
    """How many eligible items have one of some values. pairs: how many (item, value) pairs there are of these."""
    if not is_list(column.trained.type) or not len(listed):
        return int(pairs)
    having = 0
    for block in column.blocks(check):
        item_R, values = present_values(block)
        having += int(np.count_nonzero(first_of_each(item_R[np.asarray(pc.is_in(values, listed))])))
    return having


def _histogram(column: Column, check: Check) -> dict[str, Any]:
    """Minimum, maximum, and how many values lie in each of BINS bins of equal width; the last one has its maximum in it."""
    least, most = None, None
    for block in column.blocks(check):
        ends = pc.min_max(present_values(block).values)
        if ends["min"].is_valid:
            low, high = ends["min"].as_py(), ends["max"].as_py()
            least, most = low if least is None else min(least, low), high if most is None else max(most, high)
    if least is None or most is None:
        return {}
    at = np.linspace(0, 1, BINS + 1)
    edges = least * (1 - at) + most * at  # the difference of the two may be no float
    edges[-1] = most
    counts = np.zeros(BINS, np.int64)
    for block in column.blocks(check):
        counts += np.histogram(np.asarray(present_values(block).values, np.float64), edges)[0]
    bins = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return {"min": least, "max": most, "histogram": [{"min": low, "max": high, "count": count} for low, high, count in bins]}
