"""What one request sees of a version's catalogue: trained items, and the live ones that were applied when it came.

Item rows that came later are unknown to the request, because the engine may not have them yet. Knows rows, filters and overlays. Does not
know how items become live.

Legend: W rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.items import Items
from espalier.live.filtered import LiveFilters
from espalier.live.items import LiveItem, LiveItems
from espalier.live.masks import eligible_rows
from espalier.live.overlay import PARENT, Overlay
from espalier.masks.filters import Filter
from espalier.memory import Memory
from espalier.rerank.features import LiveCandidates
from espalier.search import NodeMask
from espalier.tail import Tail
from espalier.tree import Tree


@dataclass(frozen=True, eq=False)
class View:
    """A catalogue at a moment. Where nothing was ever put its overlay is empty, and it is that of the trained items.

    With live items it stands for its own items, see `Items`: those that came later have no row.

    is_frozen  whether others see live items, so that a search must be told to see none
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
        """What a re-ranker needs of live items; None where there are none."""
        return None if self.overlay.is_empty else LiveCandidates(self.table, self.overlay)

    @property
    def sequence(self) -> int | None:
        """The last operation that every answer to the request holds; None where there was none."""
        return self.overlay.sequence or None

    @property
    def count(self) -> int:
        """Items, whether eligible or not."""
        return self.overlay.items + len(self.overlay.trees[0]) - self.overlay.moved

    @property
    def standing(self) -> NodeMask | None:
        """The mask of a query without a filter; None where every item is eligible, or where the engine has it."""
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
        """The mask of a filter, if it is there. Takes microseconds."""
        return self.filters.cached(filter, self.overlay)

    def mask(self, filter: Filter) -> NodeMask:
        """The mask of the items that pass a filter by the fields that they have now, and are not removed."""
        return self.filters.mask(filter, self.overlay)

    def matches(self, filter: Filter, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: whether items pass a filter by the fields that they have now, removed or not."""
        return self.filters.matches(filter, rows)

    def is_removed(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: whether items are standing exclusions."""
        removed, is_live = self.filters.trained.is_removed(rows), rows >= self.overlay.items
        removed[is_live] = ~self.overlay.shown_R[rows[is_live] - self.overlay.items]
        return removed

    def is_eligible(self, tree: Tree, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: which items a request without a filter may get. tree: the version's first."""
        return eligible_rows(tree, self.overlay, rows) & ~self.is_removed(rows)

    def entry(self, item_id: str) -> LiveItem | None:
        """What was put or deleted under an id."""
        entry = self.table.entry(item_id)
        return None if entry is None or entry.handle >= self.overlay.handles else entry

    def leaves_of(self, tree: Tree, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[W]: the nodes of items as a trace has them; that of a live leaf is N + its handle."""
        handles = self.overlay.handles_of(rows)
        trained = tree.leaf_of_item[np.where(handles < 0, rows, 0)]
        return np.where(handles < 0, trained, tree.node_count + handles)

    def path_of(self, tree: Tree, place: int, row: int) -> NDArray[np.int64]:
        """int64[H + 1]: an item's leaf, and the nodes above it, in a tree of a forest (counted from 0)."""
        handle = int(self.overlay.handles_of(np.array([row]))[0])
        if handle < 0:
            path: NDArray[np.int64] = tree.ancestors(tree.leaf_of_item[row : row + 1])[0]
            return path
        leaves = self.overlay.trees[place]
        entry = leaves.of_handles(np.array([handle]))  # 0 where it was deleted meanwhile
        above = tree.ancestors(leaves.column(PARENT, entry))[0, 1:] if entry[0] else np.full(tree.height, -1)  # from the root to the parent
        return np.append(above, tree.node_count + handle)

    def weights_of(self, place: int, handle: int, features: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32[F]: the weights of some features in a live leaf."""
        leaves = self.overlay.trees[place]
        weights, entry = np.zeros(len(features), np.float32), int(leaves.of_handles(np.array([handle]))[0])
        if entry and leaves.sparse is not None:
            own = slice(int(leaves.sparse.begin_P[entry]), int(leaves.sparse.end_P[entry]))
            _, asked, found = np.intersect1d(features, leaves.sparse.feature[own], assume_unique=True, return_indices=True)
            weights[asked] = leaves.sparse.weight[own][found]
        return weights

    def tail_part(self, tail: Tail, row: int, features: NDArray[np.int32], values: NDArray[np.float32]) -> float:
        """What a tail adds to an item's rank for a query of some features."""
        handle, leaves = int(self.overlay.handles_of(np.array([row]))[0]), self.overlay.trees[0]
        if handle < 0 or leaves.sparse is None:
            return tail.part(features, values, row)
        entry = int(leaves.of_handles(np.array([handle]))[0])  # 0, of no features, where it was deleted meanwhile
        begin, end = int(leaves.sparse.tail_begin_P[entry]), int(leaves.sparse.tail_end_P[entry])
        return tail.part_of_row(features, values, leaves.sparse.tail_feature[begin:end], leaves.sparse.tail_value[begin:end])

    def sources(self, memory: Memory, history_T: NDArray[Any], row: int) -> list[tuple[int, float]]:
        """Which items of a history speak for an item, see `Memory.sources`."""

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

    def rows_of(self, ids: Sequence[str]) -> NDArray[np.int64]:
        rows = self.table.rows_of(ids)
        rows[rows >= len(self)] = -1
        return rows

    def ids_of(self, rows: NDArray[np.int64]) -> list[str]:
        return self.table.ids_of(rows)

    def values(self, field: str, rows: NDArray[np.int64]) -> list[Any]:
        return self.table.values(field, rows)
