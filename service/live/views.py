"""The catalogue of a version as one request sees it: trained items, and the live items that were published when it came.

Later item rows are unknown to the request, because the engine may not have them yet. Knows rows, filters and overlays. Does not know how
items become live.

Legend: W rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int32, Int64
from espalier.items import Items
from espalier.live.filtered import LiveFilters
from espalier.live.items import LiveItem, LiveItems
from espalier.live.masks import eligible_rows
from espalier.live.overlay import PARENT, SLOT, Overlay
from espalier.masks.filters import Filter
from espalier.memory import Memory
from espalier.rerank.live_candidates import LiveCandidates
from espalier.search import NodeMask
from espalier.tail import Tail
from espalier.tree import Tree


@dataclass(frozen=True, eq=False)
class View:
    """A catalogue at a moment. Without any put, its overlay is empty and its items are the trained ones.

    With live items the view itself is its `Items`, in which later items have no row.

    is_frozen  whether this request sees no live items while others do, so that its search must exclude them
    """

    table: LiveItems
    overlay: Overlay
    filters: LiveFilters
    is_frozen: bool = False

    @property
    def items(self) -> Items:
        return self.table.trained if self.overlay.is_empty else self

    @cached_property
    def candidates(self) -> LiveCandidates | None:
        """The live items for a re-ranker; None if there are none."""
        return None if self.overlay.is_empty else LiveCandidates(self.table, self.overlay)

    @property
    def sequence(self) -> int | None:
        """The last operation that every answer to the request holds; None if there was none."""
        return self.overlay.sequence or None

    @property
    def count(self) -> int:
        """Number of items, eligible or not."""
        return self.overlay.items + len(self.overlay.trees[0]) - self.overlay.moved

    @property
    def standing(self) -> NodeMask | None:
        """The mask of a query without a filter; None if every item is eligible, or if the engine has the mask."""
        if not self.overlay.is_empty:
            return None
        trained = self.filters.trained
        return trained.standing or (trained.every_item if self.is_frozen else None)

    def eligible(self, mask: NodeMask | None) -> int | None:
        """How many items a query may get; None: all."""
        if mask is not None:
            return mask.items
        return None if self.overlay.standing is None else self.overlay.eligible

    def cached(self, filter: Filter) -> NodeMask | None:
        """The mask of a filter, if it is cached. Takes microseconds."""
        return self.filters.cached(filter, self.overlay)

    def mask(self, filter: Filter) -> NodeMask:
        """The mask of the items that pass a filter by the fields that they have now, and are not removed."""
        return self.filters.mask(filter, self.overlay)

    def matches(self, filter: Filter, rows: Int64) -> Bool:
        """bool[W]: whether items pass a filter by the fields that they have now, removed or not."""
        return self.filters.matches(filter, rows)

    def is_removed(self, rows: Int64) -> Bool:
        """bool[W]: whether items are removed."""
        removed, is_live = self.filters.trained.is_removed(rows), rows >= self.overlay.items
        removed[is_live] = ~self.overlay.shown_R[rows[is_live] - self.overlay.items]
        return removed

    def is_eligible(self, tree: Tree, rows: Int64) -> Bool:
        """bool[W]: which items a request without a filter may get. tree: the version's first."""
        return eligible_rows(tree, self.overlay, rows) & ~self.is_removed(rows)

    def entry(self, item_id: str) -> LiveItem | None:
        """The state of an id that was put or deleted; None for others."""
        entry = self.table.entry(item_id)
        return None if entry is None or entry.handle >= self.overlay.handles else entry

    def leaves_of(self, tree: Tree, rows: Int64) -> Int64:
        """int64[W]: the nodes of items in a trace; a live leaf has N + its handle."""
        handles = self.overlay.handles_of(rows)
        trained = tree.leaf_of_item[np.where(handles < 0, rows, 0)]
        return np.where(handles < 0, trained, tree.node_count + handles)

    def path_of(self, tree: Tree, t: int, row: int) -> Int64:
        """int64[H + 1]: the nodes from the root to an item's leaf, in tree number t of a forest."""
        handle = int(self.overlay.handles_of(np.array([row]))[0])
        if handle < 0:
            path: Int64 = tree.ancestors(tree.leaf_of_item[row : row + 1])[0]
            return path
        leaves = self.overlay.trees[t]
        entry = leaves.of_handles(np.array([handle]))  # 0 if it was deleted meanwhile
        above = tree.ancestors(leaves.column(PARENT, entry))[0, 1:] if entry[0] else np.full(tree.height, -1)  # from the root to the parent
        return np.append(above, tree.node_count + handle)

    def fold_order(self, tree: Tree, t: int, nodes_W: Int64) -> Int64:
        """int64[W]: numbers in the order of (parent, slot), which leaves have after a fold. nodes_W: leaves of a trace of tree number t."""
        is_live_W, leaves = nodes_W >= tree.node_count, self.overlay.trees[t]
        trained_W = np.where(is_live_W, 0, nodes_W)
        parent_W = tree.parent[trained_W]
        slot_W = trained_W - tree.first_child[parent_W]
        entries = leaves.of_handles(nodes_W[is_live_W] - tree.node_count)
        parent_W[is_live_W], slot_W[is_live_W] = leaves.column(PARENT, entries), leaves.column(SLOT, entries)
        return np.argsort(np.lexsort((slot_W, parent_W)))

    def weights_of(self, t: int, handle: int, features: Int32) -> Float32:
        """float32[F]: the weights of some features in a live leaf of tree number t."""
        leaves = self.overlay.trees[t]
        weights, entry = np.zeros(len(features), np.float32), int(leaves.of_handles(np.array([handle]))[0])
        if entry and leaves.sparse is not None:
            span = slice(int(leaves.sparse.begin_P[entry]), int(leaves.sparse.end_P[entry]))
            _, to, source = np.intersect1d(features, leaves.sparse.feature[span], assume_unique=True, return_indices=True)
            weights[to] = leaves.sparse.weight[span][source]
        return weights

    def tail_part(self, tail: Tail, row: int, features: Int32, values: Float32) -> float:
        """The tail's part of an item's rank for a query of some features."""
        handle, leaves = int(self.overlay.handles_of(np.array([row]))[0]), self.overlay.trees[0]
        if handle < 0 or leaves.sparse is None:
            return tail.part(features, values, row)
        entry = int(leaves.of_handles(np.array([handle]))[0])  # 0, which has no features, if it was deleted meanwhile
        begin, end = int(leaves.sparse.tail_begin_P[entry]), int(leaves.sparse.tail_end_P[entry])
        return tail.part_of_row(features, values, leaves.sparse.tail_feature[begin:end], leaves.sparse.tail_value[begin:end])

    def sources(self, memory: Memory, history_T: Array, row: int) -> list[tuple[int, float]]:
        """The items of a history that lift an item, see `Memory.sources`."""

        def value_of(source: int) -> float:
            value = memory.value_of(source, row) if max(source, row) < self.overlay.items else 0.0
            if self.overlay.memory is None:
                return value
            targets, values = self.overlay.memory.of(source)
            return max(value, float(values[targets == row].max(initial=0)))

        return memory.sources(history_T, row, value_of)

    # -- the catalogue as `Items` ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.overlay.items + self.overlay.handles

    @property
    def fields(self) -> tuple[str, ...]:
        return self.table.fields

    def rows_of(self, ids: Sequence[str]) -> Int64:
        rows = self.table.rows_of(ids)
        rows[rows >= len(self)] = -1
        return rows

    def ids_of(self, rows: Int64) -> list[str]:
        return self.table.ids_of(rows)

    def values(self, field: str, rows: Int64) -> list[Any]:
        return self.table.values(field, rows)
