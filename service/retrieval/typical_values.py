"""Typical values of a group of items: values that are more frequent in the group than in the catalogue.

The trained items of a version are counted once, the live items once for each overlay. Knows columns and views. Does not know trees.

Legend: V distinct values.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Float64, Int64
from espalier.live.overlay import Overlay

from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.value_counts import Tally, ValueCounts, count_values

MAX_COLUMNS = 16
"""Most columns, in the order of the item table."""
MAX_VALUES = 1 << 15
"""Most distinct values of a column. A column with more is left out."""
MIN_ITEMS_PER_VALUE = 2
"""Least mean number of items per value of a column. A column with a lower mean names items, as titles do, and is left out."""
SAMPLED_BASE = 1 << 18
"""Most trained items that are counted for the catalogue. Of a larger catalogue, an evenly spaced sample is counted."""
SAMPLED_LIVE = 1 << 14
"""Most live items that are counted. Of more, an evenly spaced sample is counted."""
MAX_LISTED = 5
"""Most values of a column that are listed."""
NAMES = ("id", "title")
"""Columns that name items."""


class Base(NamedTuple):
    """items_V: float64[V], number of items of the catalogue with each value; an estimate if only a sample was counted."""

    values: pa.Array
    items_V: Float64


class TypicalValues:
    """The counts of every version that serves: those of its trained items, and those with the live items of an overlay."""

    def __init__(self) -> None:
        self._bases: WeakKeyDictionary[LoadedModel, dict[str, Base | None]] = WeakKeyDictionary()
        self._live: WeakKeyDictionary[Overlay, dict[str, Base]] = WeakKeyDictionary()

    def columns(self, model: LoadedModel, view: View, check: Check) -> dict[str, Base]:
        """The counts of the columns whose values may be typical. The first request of a version, or of an overlay, scans the columns.

        Raises DeadlinePassed.
        """
        bases = self._bases.setdefault(model, {})
        names = [name for name in model.filters.fields if name not in NAMES][:MAX_COLUMNS]
        for name in names:
            if name not in bases:
                check()
                bases[name] = _base(model.bundle.items.column(name))
        trained_bases = {name: base for name in names if (base := bases[name]) is not None}
        if view.overlay.is_empty:
            return trained_bases
        live_bases = self._live.setdefault(view.overlay, {})
        for name, base in trained_bases.items():
            if name not in live_bases:
                check()
                live_bases[name] = _with_live(base, name, model.bundle.items.column(name), view)
        return {name: live_bases[name] for name in trained_bases}


def typical(base: Base, counts: ValueCounts, sampled: int, represented: int, catalogue: int) -> list[dict[str, Any]]:
    """The MAX_LISTED most typical values: those with the largest share · log lift, their term in the Kullback-Leibler divergence.

    Lift alone would rank the rarest values first, count alone those that are frequent everywhere. Ties are ordered by count: at the root,
    where every lift is 1, the most frequent values come first.

    base       counts of the catalogue
    counts     counts of the group, from a sample of `sampled` items of its `represented` items
    catalogue  number of items of the catalogue
    """
    share_V = counts.items_V / max(sampled, 1)
    if represented == catalogue:
        base_V = share_V  # the group is the catalogue, even if only a sample of it was counted
    else:
        index_V = pc.fill_null(pc.index_in(counts.values, base.values), -1)
        base_V = np.append(base.items_V, 0)[np.asarray(index_V)] / catalogue
        base_V = np.maximum(base_V, share_V * (represented / catalogue))  # not below the group's own items: `base` may be a sample
    lift_V = share_V / base_V
    order = pc.sort_indices(
        pa.table({"part": share_V * np.log(lift_V), "items": counts.items_V, "value": counts.values}),
        [("part", "descending"), ("items", "descending"), ("value", "ascending")],
    )
    top = np.asarray(order)[:MAX_LISTED]
    columns = zip(counts.values.take(pa.array(top)).to_pylist(), counts.items_V[top], share_V[top], lift_V[top], strict=True)
    return [{"value": v, "count": int(count), "share": float(share), "lift": float(lift)} for v, count, share, lift in columns]


def count_blocks(kind: pa.DataType, blocks: list[pa.Array]) -> ValueCounts:
    tally = Tally(kind, MAX_VALUES)
    for block in blocks:
        tally.add(count_values(block))
    return ValueCounts(*tally.total(), tally.items_with_value)


def _base(column: pa.ChunkedArray) -> Base | None:
    """The counts of a column; None if it has no values, or too many distinct ones."""
    rows = evenly_spaced(len(column), SAMPLED_BASE)
    sampled = column if len(rows) == len(column) else column.take(pa.array(rows))
    counts = count_blocks(column.type, [sampled.combine_chunks()])
    if not len(counts.values) or counts.items_V.sum() < MIN_ITEMS_PER_VALUE * len(counts.values):
        return None
    return Base(counts.values, np.asarray(counts.items_V * (len(column) / len(rows)), np.float64))


def _with_live(base: Base, name: str, column: pa.ChunkedArray, view: View) -> Base:
    """The counts of a column with the live items added and the trained items that they replace subtracted."""
    overlay = view.overlay
    changed = overlay.changed[1]
    live_rows = np.concatenate([overlay.item_R[overlay.leaf_R], changed])
    sampled = live_rows[evenly_spaced(len(live_rows), SAMPLED_LIVE)]
    replaced = count_values(column.take(pa.array(np.concatenate([overlay.hidden, changed]))).combine_chunks())
    live = count_values(pa.array(view.items.values(name, sampled), column.type))
    values = pa.concat_arrays([base.values, replaced.values, live.values])
    items = np.concatenate([base.items_V, -replaced.items_V, live.items_V * (len(live_rows) / max(len(sampled), 1))])
    merged = pa.table({"value": values, "items": items}).group_by("value", use_threads=False).aggregate([("items", "sum")])
    return Base(merged.column("value").combine_chunks(), np.asarray(merged.column("items_sum")))


def evenly_spaced(count: int, most: int) -> Int64:
    """int64: at most `most` of the numbers 0 … count − 1, evenly spaced, ascending."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
