"""Facets: for each value of a column, the number of eligible items that have it.

Facets scan the column in blocks. They do not use the node mask of a search, so that browsing does not evict customers' filters from the
cache of masks. Knows views and filters. Does not know HTTP, nor how scans are bounded (scans.py).

Legend: I trained items, W rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Bool, Int64
from espalier.errors import InvalidQuery
from espalier.masks.filters import Filter, ItemFilters, is_list
from espalier.tree import Tree

from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.value_counts import Tally, count_values, differs_from_previous, is_number, present_values

LIVE_ROWS = 1 << 12
"""Live items that are checked against a filter, or counted, between two checks of the deadline."""
SCANNED_ROWS = 1 << 16
"""Rows that are counted between two checks of the deadline."""
MAX_VALUES = 1 << 17
"""Most distinct values of a column. If the eligible items have more, none is listed."""
MAX_BYTES = 8 << 20
"""Most bytes of text values in one answer. The list ends before the first value that exceeds them."""
BINS = 20
"""Bins of a histogram."""


@dataclass(frozen=True)
class EligibleItems:
    """trained_I: bool[I], eligible items with their trained fields. changed_W: int64, rows of eligible items with live fields."""

    trained_I: Bool
    changed_W: Int64

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.trained_I)) + len(self.changed_W)


def eligible_items(view: View, tree: Tree, filters: ItemFilters, filter: Filter, check: Check) -> EligibleItems:
    """The items that pass a filter and are not removed. O(I); the first filter on a column takes as long as a mask. Raises DeadlinePassed.

    tree, filters  of the version; the first tree of a forest
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
    changed_W = np.concatenate([overlay.item_R[overlay.eligible_R], changed[standing_I[changed]]])
    if filter:
        passing = [np.empty(0, np.int64)]
        for begin in range(0, len(changed_W), LIVE_ROWS):
            rows = changed_W[begin : begin + LIVE_ROWS]
            passing.append(rows[view.matches(filter, rows)])
            check()
        changed_W = np.concatenate(passing)
    return EligibleItems(trained_I, changed_W)


class Column(NamedTuple):
    """A column of the catalogue, restricted to eligible items."""

    name: str
    view: View
    trained: pa.ChunkedArray
    eligible: EligibleItems

    def blocks(self, check: Check) -> Iterator[pa.Array]:
        """The values of all eligible items, block by block. Raises DeadlinePassed."""
        for begin in range(0, len(self.trained), SCANNED_ROWS):
            check()
            eligible_B = self.eligible.trained_I[begin : begin + SCANNED_ROWS]
            yield self.trained.slice(begin, SCANNED_ROWS).filter(pa.array(eligible_B)).combine_chunks()
        for begin in range(0, len(self.eligible.changed_W), LIVE_ROWS):
            check()
            yield pa.array(self.view.items.values(self.name, self.eligible.changed_W[begin : begin + LIVE_ROWS]), self.trained.type)


def facets(model: LoadedModel, name: str, filter: Filter, limit: int, check: Check, live: bool = True) -> dict[str, Any]:
    """The answer: the `limit` most frequent values among the items that pass the filter. Its conditions on the column itself are ignored.

    live  whether the live catalogue counts
    Raises InvalidQuery if the column cannot be filtered, DeadlinePassed.
    """
    if name not in model.filters.fields:
        raise InvalidQuery("column", name, f"a column that can be filtered: {', '.join(model.filters.fields)}")
    view = model.live.view(live)
    wanted, barred = (tuple(condition for condition in conditions if condition[0] != name) for conditions in (filter.wanted, filter.barred))
    eligible = eligible_items(view, model.bundle.tree, model.filters, Filter(wanted, barred), check)
    column = Column(name, view, model.bundle.items.column(name), eligible)
    tally = Tally(column.trained.type, MAX_VALUES)
    for block in column.blocks(check):
        tally.add(count_values(block))
    values, items_V = tally.total()
    limit = min(limit, _count_that_fits(values[:limit]))
    top_values = values[:limit]
    document: dict[str, Any] = {
        "column": name,
        "values": [{"value": value, "count": n} for value, n in zip(top_values.to_pylist(), items_V[:limit].tolist(), strict=True)],
        "others": 0,
        "missing": eligible.count - tally.items_with_value,
        "eligible": eligible.count,
        "distinct": None if tally.overflowed else len(values),
    }
    if tally.overflowed or len(values) > limit:
        document["others"] = tally.items_with_value - _items_with_any(column, top_values, items_V[:limit].sum(), check)
        if is_number(column.trained.type):
            document |= _histogram(column, check)
    return document


def _count_that_fits(values: pa.Array) -> int:
    """The number of leading values that fit in an answer."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return len(values)
    return int(np.searchsorted(np.cumsum(np.asarray(pc.binary_length(values), np.int64)), MAX_BYTES, side="right"))


def _items_with_any(column: Column, top_values: pa.Array, pairs: int, check: Check) -> int:
    """The number of eligible items with any of the listed values. pairs: number of (item, value) pairs with these values."""
    if not is_list(column.trained.type) or not len(top_values):
        return int(pairs)
    count = 0
    for block in column.blocks(check):
        item_R, values = present_values(block)
        count += int(np.count_nonzero(differs_from_previous(item_R[np.asarray(pc.is_in(values, top_values))])))
    return count


def _histogram(column: Column, check: Check) -> dict[str, Any]:
    """Minimum, maximum, and the number of values in each of BINS bins of equal width. The last bin includes the maximum."""
    least, most = None, None
    for block in column.blocks(check):
        ends = pc.min_max(present_values(block).values)
        if ends["min"].is_valid:
            low, high = ends["min"].as_py(), ends["max"].as_py()
            least, most = low if least is None else min(least, low), high if most is None else max(most, high)
    if least is None or most is None:
        return {}
    fractions = np.linspace(0, 1, BINS + 1)
    edges = least * (1 - fractions) + most * fractions  # not least + at * (most − least): the difference may overflow
    edges = np.maximum.accumulate(np.minimum(edges, most))  # between close numbers, rounding makes some edges decrease
    counts = np.zeros(BINS, np.int64)
    for block in column.blocks(check):
        counts += np.histogram(np.asarray(present_values(block).values, np.float64), edges)[0]
    bins = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return {"min": least, "max": most, "histogram": [{"min": low, "max": high, "count": count} for low, high, count in bins]}
