"""Places live items in a bundle of linear scorers, by x: the normalised sum of the item's own text and of its events' features.

    parents  the beam of a search with x, of each tree; without x those of the items that it is like
    row      see `linear_rows.py`; neighbours are the items that it is like, else the nearest by their own texts

Without x, a row is the mean of the weights of the items that it is like. In a tail an item's row is x.

Legend: F features, K neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.items import Items
from espalier.live.overlay import PARENT, Overlay
from espalier.live.rows import LiveRow
from espalier.masks.eligibility import bundle_alone
from espalier.placement.evidence import Evidence, finds_by_words, joined_text, own_columns, own_weights
from espalier.placement.linear_rows import NEIGHBOURS, LinearRows, Weights, added
from espalier.placement.near_items import NearItems
from espalier.placement.parents import MOST, Parents, Search, summed
from espalier.queries import QueryBatch, TextKind
from espalier.search import NodeMask, SearchParams
from espalier.text.sparse_rows import SparseRows, concatenated

Int64 = NDArray[np.int64]

BEAM = 24
"""Clusters that are candidates for an item: their leaves are scored too, which is most of the time that an item takes."""
BLOCK = 4096
"""Items whose texts are read at a time."""


class LinearPlacement:
    """See the module. What it needs to know of the bundle it finds out with the first item.

    columns  of the item table that are an item's own text; None: what the model was trained with, else all columns of strings
    """

    def __init__(self, bundle: Bundle, columns: Sequence[str] | None = None) -> None:
        self.bundle, self.takes_fields = bundle, finds_by_words(bundle)
        self._columns = columns
        self._lock = threading.Lock()

    @cached_property
    def _rows(self) -> list[LinearRows]:
        return [LinearRows(tree, chunks) for tree, chunks in self.bundle.trees]

    @cached_property
    def _column_weights(self) -> dict[str, float]:
        return own_weights(self.bundle)

    def _written(self, item: Evidence) -> SparseRows:
        """[1, F]: what a new item's row is made of: its words, as trained items have them, and events."""
        texts = {name: joined_text([(item.fields or {}).get(name)]) for name in self._column_weights} if item.words is not None else {}
        if not any(texts.values()):
            return own_features(item) if item.words is None else _sum([item.words.normalised(), item.events.features])
        rows = [self.bundle.vectoriser.documents([text]) for text in texts.values()]
        weights = self._column_weights.values()
        weighed = [replace(row, values=np.float32(weight) * row.values) for row, weight in zip(rows, weights, strict=True)]
        return _sum([_sum(weighed).normalised(), item.events.features])

    @cached_property
    def _trained(self) -> NodeMask:
        """Of queries that see the bundle alone: the same evidence says the same, whatever else is live."""
        return bundle_alone([tree for tree, _ in self.bundle.trees])

    @cached_property
    def _near(self) -> NearItems | None:
        """An index of the items' own texts; None for models of features."""
        if not isinstance(self.bundle.manifest.query, TextKind):
            return None
        columns, items = text_columns(self.bundle) if self._columns is None else self._columns, self.bundle.items
        if not columns:
            return None
        parts = []
        for begin in range(0, len(items), BLOCK):
            rows = np.arange(begin, min(begin + BLOCK, len(items)))
            values = [items.values(name, rows) for name in columns]
            parts.append(self.bundle.vectoriser.transform([joined_text(fields) for fields in zip(*values, strict=True)]))
        return NearItems(concatenated(parts))

    def place(self, items: Sequence[Evidence], known: Items, overlay: Overlay, search: Search) -> list[tuple[Parents, ...]]:
        """For each item and tree the parents that it may go to."""
        if not items:
            return []
        with self._lock:
            leaves, index, _ = self._rows, self._near, self._column_weights
        own = concatenated([own_features(item) for item in items]).normalised()
        written = concatenated([self._written(item) for item in items]).normalised()
        with_features = np.flatnonzero(np.diff(own.indptr) > 0)
        parents = self._searched(own.take(with_features), search)
        near: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        if index is not None:
            asked = [i for i in with_features.tolist() if not len(items[i].like)]
            item_nK, cosine_nK = index.nearest(own.take(np.array(asked, np.int64)), NEIGHBOURS)
            near = {i: (item_nK[k].tolist(), cosine_nK[k].tolist()) for k, i in enumerate(asked)}
        place_of = {int(i): k for k, i in enumerate(with_features)}
        found = []
        for i, item in enumerate(items):
            entries = slice(int(written.indptr[i]), int(written.indptr[i + 1]))
            x = written.indices[entries], written.values[entries]
            trees = []
            for tree in range(len(leaves)):
                nodes = parents[tree][place_of[i]] if i in place_of else self._parents_of(item.like, tree, overlay)
                row = self._row(leaves[tree], tree, x, item.like, near.get(i, ((), ())), overlay)
                trees.append(Parents(nodes.tolist(), row))
            found.append(tuple(trees))
        return found

    def _searched(self, own: SparseRows, search: Search) -> list[list[Int64]]:
        """For each tree and query the parents that the search finds, best first."""
        if not len(own):
            return [[] for _ in self.bundle.trees]
        params = SearchParams.uniform(len(own), min(BEAM, self.bundle.manifest.search.max_beam_size), 1, mask=self._trained)
        parents = []
        for frontier in search(QueryBatch(self.bundle.manifest.query, own), params).frontiers:
            order = np.argsort(-frontier.ranks_BK, axis=1, kind="stable")[:, :BEAM]
            best_BK = np.take_along_axis(frontier.nodes_BK, order, 1)
            parents.append([nodes[nodes >= 0] for nodes in best_BK])
        return parents

    def _row(
        self,
        leaves: LinearRows,
        tree: int,
        x: Weights,
        like: Int64,
        near: tuple[Sequence[int], Sequence[float]],
        overlay: Overlay,
    ) -> Callable[[int], LiveRow]:
        """Makes the row, which is the same under every parent."""
        made: list[LiveRow] = []

        def row(_: int) -> LiveRow:
            if not made:
                liked = [self._weights(leaves, tree, int(item), overlay) for item in like]
                of_like = added([(feature, weight / np.float32(len(liked))) for feature, weight in liked]) if liked else None
                made.append(leaves.row(x, near[0], near[1], of_like, in_tail=tree == 0 and self.bundle.tail is not None))
            return made[0]

        return row

    def _weights(self, leaves: LinearRows, tree: int, item: int, overlay: Overlay) -> Weights:
        """The weights of an item's leaf."""
        entry, pool = overlay.live_leaf(item, tree), overlay.trees[tree].sparse
        if not entry or pool is None:
            return leaves.weights_of(item)
        own = slice(int(pool.begin_P[entry]), int(pool.end_P[entry]))
        return pool.feature[own], pool.weight[own]

    def _parents_of(self, like: Int64, tree: int, overlay: Overlay) -> Int64:
        """The parents of some items, those of most of them first."""
        parents = []
        for item in like.tolist():
            entry, trained = overlay.live_leaf(item, tree), self.bundle.trees[tree].tree
            parent = overlay.trees[tree].entries.rows[entry, PARENT] if entry else trained.parent[trained.leaf_of_item[item]]
            parents.append(int(parent))
        nodes, count = summed([np.array(parents, np.int64)], [np.ones(len(parents))])
        return nodes[np.argsort(-count, kind="stable")[:MOST]]


def own_features(item: Evidence) -> SparseRows:
    """[1, F]: the sum of an item's text, as a query, and events."""
    return _sum([*([] if item.own is None else [item.own.features]), item.events.features])


def _sum(parts: Sequence[SparseRows]) -> SparseRows:
    """[1, F]: of all rows."""
    rows = parts[0] if len(parts) == 1 else concatenated(parts)
    if len(rows) == 1:  # a row's features are distinct and ascend
        return rows
    feature, value = added([(rows.indices, rows.values)])
    return SparseRows(np.array([0, len(feature)]), feature, value, rows.width)


def text_columns(bundle: Bundle) -> tuple[str, ...]:
    """The columns of the item table that hold an item's own text, by the model's configuration, else all that hold strings."""
    strings = (name for name in bundle.items.fields if name != "id" and str(bundle.items.column(name).type).endswith("string"))
    return own_columns(bundle) or tuple(strings)
