"""What values are typical of some items: more frequent among them than in the catalogue.

The trained items of a version are counted once, the live ones once for each overlay. Knows columns and views. Does not know trees.

Legend: V distinct values.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.live.overlay import Overlay

from ..live.views import View
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.value_counts import Tally, ValueCounts, count_values

MAX_COLUMNS = 16
"""Columns that are looked at, in the order of the item table."""
MAX_VALUES = 1 << 15
"""Distinct values of a column; one with more is left out."""
SHARED_BY = 2
"""Items that have a value, on average over the values of a column, at least: else the column names items, as titles do."""
BASE_ITEMS = 1 << 18
"""Items that stand for the catalogue; a larger one is looked at at even distances."""
LIVE_ITEMS = 1 << 14
"""Live items that stand for all of them; more are looked at at even distances."""
LISTED = 5
"""Values of a column that are listed."""
NAMES = ("id", "title")
"""Columns that name items."""


class Base(NamedTuple):
    """How many items of the catalogue have each value, float64[V]; of a catalogue that is looked at in part, an estimate."""

    values: pa.Array
    items_V: NDArray[np.float64]


class TypicalValues:
    """The counts of every version that serves: of its trained items, and of those that are there with an overlay."""

    def __init__(self) -> None:
        self._bases: WeakKeyDictionary[LoadedModel, dict[str, Base | None]] = WeakKeyDictionary()
        self._live: WeakKeyDictionary[Overlay, dict[str, Base]] = WeakKeyDictionary()

    def columns(self, model: LoadedModel, view: View, check: Check) -> dict[str, Base]:
        """The columns in which values may be typical. The first request of a version, and of an overlay, takes a scan.

        Raises DeadlinePassed.
        """
        bases = self._bases.setdefault(model, {})
        names = [name for name in model.filters.fields if name not in NAMES][:MAX_COLUMNS]
        for name in names:
            if name not in bases:
                check()
                bases[name] = _base(model.bundle.items.column(name))
        found = {name: base for name in names if (base := bases[name]) is not None}
        if view.overlay.is_empty:
            return found
        live = self._live.setdefault(view.overlay, {})
        for name, base in found.items():
            if name not in live:
                check()
                live[name] = _with_live(base, name, model.bundle.items.column(name), view)
        return {name: live[name] for name in found}


def typical(base: Base, counts: ValueCounts, looked_at: int, below: int, catalogue: int) -> list[dict[str, Any]]:
    """The LISTED most typical values: of the largest share · log lift, their part of the divergence of the two distributions.

    By lift alone the rarest values would come first, by count those that are frequent everywhere. Of equal ones, those of more items come
    first: at the root, where every lift is 1, the most frequent values.

    base       of all items of the catalogue
    counts     of the values among `looked_at` items, which stand for `below`
    catalogue  items of the catalogue
    """
    share_V = counts.items_V / max(looked_at, 1)
    if below == catalogue:
        base_V = share_V  # the catalogue itself, even where only a part is looked at
    else:
        at_V = pc.fill_null(pc.index_in(counts.values, base.values), -1)
        base_V = np.append(base.items_V, 0)[np.asarray(at_V)] / catalogue
        base_V = np.maximum(base_V, share_V * (below / catalogue))  # an estimate may be too low; the catalogue has at least what is here
    lift_V = share_V / base_V
    order = pc.sort_indices(
        pa.table({"part": share_V * np.log(lift_V), "items": counts.items_V, "value": counts.values}),
        [("part", "descending"), ("items", "descending"), ("value", "ascending")],
    )
    top = np.asarray(order)[:LISTED]
    columns = zip(counts.values.take(pa.array(top)).to_pylist(), counts.items_V[top], share_V[top], lift_V[top], strict=True)
    return [{"value": v, "count": int(count), "share": float(share), "lift": float(lift)} for v, count, share, lift in columns]


def summed(kind: pa.DataType, parts: list[pa.Array]) -> ValueCounts:
    tally = Tally(kind, MAX_VALUES)
    for part in parts:
        tally.add(count_values(part))
    return ValueCounts(*tally.total(), tally.having)


def _base(column: pa.ChunkedArray) -> Base | None:
    """The counts of a column; None where its values are too many to be typical of anything."""
    rows = evenly(len(column), BASE_ITEMS)
    looked_at = column if len(rows) == len(column) else column.take(pa.array(rows))
    counts = summed(column.type, [looked_at.combine_chunks()])
    if not len(counts.values) or counts.items_V.sum() < SHARED_BY * len(counts.values):
        return None
    return Base(counts.values, np.asarray(counts.items_V * (len(column) / len(rows)), np.float64))


def _with_live(base: Base, name: str, column: pa.ChunkedArray, view: View) -> Base:
    """The counts of a column with live items in the place of the trained ones that they replace."""
    overlay = view.overlay
    changed = overlay.changed[1]
    came = np.concatenate([overlay.item_R[overlay.leaf_R], changed])
    looked_at = came[evenly(len(came), LIVE_ITEMS)]
    gone = count_values(column.take(pa.array(np.concatenate([overlay.hidden, changed]))).combine_chunks())
    live = count_values(pa.array(view.items.values(name, looked_at), column.type))
    values = pa.concat_arrays([base.values, gone.values, live.values])
    items = np.concatenate([base.items_V, -gone.items_V, live.items_V * (len(came) / max(len(looked_at), 1))])
    merged = pa.table({"value": values, "items": items}).group_by("value", use_threads=False).aggregate([("items", "sum")])
    return Base(merged.column("value").combine_chunks(), np.asarray(merged.column("items_sum")))


def evenly(count: int, most: int) -> NDArray[np.int64]:
    """int64: at most so many of the numbers 0 … count − 1, at even distances, ascending."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
