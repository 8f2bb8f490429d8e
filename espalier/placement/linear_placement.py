"""Places live items in a bundle of linear scorers, by x: the normalised sum of the item's own text and of its events' features.

    parents  the beam of a search with x, in each tree; without x, the parents of the items of `like`
    row      see `linear_rows.py`; neighbours are the items of `like`, else the nearest by their own texts

Without x, a row is the mean weights of the items of `like`. In a tail an item's row is x.

Legend: F features, K neighbours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.items import Items
from espalier.live.overlay import PARENT, Overlay
from espalier.live.rows import LiveRow
from espalier.masks.eligibility import bundle_alone
from espalier.placement.evidence import Evidence, finds_by_words, joined_text, own_columns, own_fields, own_length, own_weights
from espalier.placement.linear_rows import NEIGHBOURS, NO_WEIGHTS, LinearRows, Weights, added
from espalier.placement.near_items import NearItems
from espalier.placement.parents import MOST, Parents, Search, summed
from espalier.queries import QueryBatch, TextKind
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.text.sparse_rows import SparseRows, concatenated

BEAM = 24
"""Candidate parents of an item. The search also scores their leaves, which takes most of the time of a placement."""
BLOCK = 4096
"""Items whose texts are read at a time."""
SAMPLE = 256
"""Trained items, evenly spaced, whose words say how much an item's own words weigh."""


class LinearPlacement:
    """See the module. Properties of the bundle are computed when the first item needs them.

    columns  of the item table with an item's own text; None: those of the model's configuration, else all columns of strings
    """

    content = None

    def __init__(self, bundle: Bundle, columns: Sequence[str] | None = None) -> None:
        self.bundle, self.takes_fields = bundle, finds_by_words(bundle)
        self._own_length = own_length(bundle) if self.takes_fields else 1.0
        self._columns = columns
        self._lock = threading.Lock()

    @cached_property
    def _rows(self) -> list[LinearRows]:
        trees = [LinearRows(tree, chunks) for tree, chunks in self.bundle.trees]
        if self.takes_fields:
            for rows in trees:
                rows.length = np.float32(self._own_scale(rows)) or rows.length
        return trees

    def _own_scale(self, rows: LinearRows) -> float:
        """The median factor between the own words of SAMPLE trained items and their weights; 0 if they have no words."""
        items, factors = self.bundle.items, []
        sample = np.unique(np.linspace(0, len(items) - 1, SAMPLE).astype(np.int64))
        columns = [items.values(name, sample) for name in self._column_weights]
        for item, values in zip(sample.tolist(), zip(*columns, strict=True), strict=True):
            own, length = self._own_words(dict(zip(self._column_weights, values, strict=True)))
            if length > 0:
                factors.append(_product(own.row(0), rows.weights_of(item)) / length)
        return float(np.median(factors)) if factors else 0.0

    @cached_property
    def _column_weights(self) -> dict[str, float]:
        return own_weights(self.bundle)

    def _document_features(self, item: Evidence) -> tuple[SparseRows, float]:
        """[1, F], the features of a new item's row: its document, as trained items have it, and events; and the length of the row.

        The texts of all columns have the length that training gives them; events bring the length nearer to 1, as queries do there.
        """
        if item.document is None:
            return query_features(item), 1.0
        own, length = self._own_words(item.fields or {})
        if length == 0 or item.has_text:
            return _sum([item.document.normalised(), item.events.features]), 1.0
        return _sum([own, item.events.features]), length ** (1 / (1 + len(item.events)))

    def _own_words(self, fields: Mapping[str, Any]) -> tuple[SparseRows, float]:
        """[1, F], of length 1, and the length that training gives it."""
        weights = self._column_weights
        rows = [self.bundle.vectoriser.documents([joined_text([fields.get(name)])]) for name in weights]
        squares = _sum(
            [replace(row, values=np.square(np.float32(weight) * row.values)) for row, weight in zip(rows, weights.values(), strict=True)]
        )
        length = float(np.sqrt(squares.values.sum(dtype=np.float64))) / self._own_length
        return replace(squares, values=np.sqrt(squares.values)).normalised(), length**0.5

    @cached_property
    def _trained(self) -> NodeMask:
        """The mask of queries that see only trained items, so that placements do not depend on other live items."""
        return bundle_alone([tree for tree, _ in self.bundle.trees])

    @cached_property
    def _near(self) -> NearItems | None:
        """An index of the items' own texts; None for models of features."""
        if not isinstance(self.bundle.manifest.query, TextKind):
            return None
        columns, items = text_columns(self.bundle) if self._columns is None else self._columns, self.bundle.items
        if not columns:
            return None
        blocks = []
        for begin in range(0, len(items), BLOCK):
            rows = np.arange(begin, min(begin + BLOCK, len(items)))
            values = [items.values(name, rows) for name in columns]
            blocks.append(self.bundle.vectoriser.transform([joined_text(fields) for fields in zip(*values, strict=True)]))
        return NearItems(concatenated(blocks))

    def place(self, items: Sequence[Evidence], catalogue: Items, overlay: Overlay, search: Search) -> list[tuple[Parents, ...]]:
        """The candidate parents of each item in each tree."""
        if not items:
            return []
        with self._lock:
            leaves, index, _ = self._rows, self._near, self._column_weights
        queries = concatenated([query_features(item) for item in items]).normalised()
        document_rows, lengths = zip(*map(self._document_features, items), strict=True)
        documents = concatenated(document_rows).normalised()
        with_features = np.flatnonzero(np.diff(queries.indptr) > 0)
        parents = self._searched(queries.take(with_features), search)
        near: dict[int, tuple[Sequence[int], Sequence[float]]] = {}
        if index is not None:
            without_like = [i for i in with_features.tolist() if not len(items[i].like) and not self._is_learned(items[i])]
            item_nK, cosine_nK = index.nearest(queries.take(np.array(without_like, np.int64)), NEIGHBOURS)
            near = {i: (item_nK[k].tolist(), cosine_nK[k].tolist()) for k, i in enumerate(without_like)}
        query_of = {int(i): b for b, i in enumerate(with_features)}
        candidates = []
        for i, item in enumerate(items):
            x, trees = documents.row(i), []
            for tree in range(len(leaves)):
                nodes = parents[tree][query_of[i]] if i in query_of else self._parents_of(item.like, tree, overlay)
                row = self._row(leaves[tree], tree, x, lengths[i], item, near.get(i, ((), ())), overlay)
                trees.append(Parents(nodes.tolist(), row))
            candidates.append(tuple(trees))
        return candidates

    def _searched(self, queries: SparseRows, search: Search) -> list[list[Int64]]:
        """For each tree and query the parents that the search finds, best first."""
        if not len(queries):
            return [[] for _ in self.bundle.trees]
        params = SearchParams.uniform(len(queries), min(BEAM, self.bundle.manifest.search.max_beam_size), 1, mask=self._trained)
        parents = []
        for frontier in search(QueryBatch(self.bundle.manifest.query, queries), params).frontiers:
            order = np.argsort(-frontier.ranks_BK, axis=1, kind="stable")[:, :BEAM]
            best_BK = np.take_along_axis(frontier.nodes_BK, order, 1)
            parents.append([nodes[nodes >= 0] for nodes in best_BK])
        return parents

    def _row(
        self,
        leaves: LinearRows,
        tree: int,
        x: Weights,
        length: float,
        item: Evidence,
        near: tuple[Sequence[int], Sequence[float]],
        overlay: Overlay,
    ) -> Callable[[int], LiveRow]:
        """Returns a function that makes the row on first use; it is the same under every parent."""
        cached: list[LiveRow] = []

        def row(_: int) -> LiveRow:
            if not cached:
                like_weights = [self._weights(leaves, tree, int(row), overlay) for row in item.like]
                count = np.float32(len(like_weights))
                mean = added([(feature, weight / count) for feature, weight in like_weights]) if like_weights else None
                own, bias, tail = (x[0], leaves.length * np.float32(length) * x[1]), None, NO_WEIGHTS
                if self._is_learned(item):
                    own, bias = self._with_learned(own, leaves, item)
                if tree == 0 and self.bundle.tail is not None:
                    tail = x
                cached.append(leaves.row(own, near[0], near[1], mean, tail, self.takes_fields, bias))
            return cached[0]

        return row

    def _is_learned(self, item: Evidence) -> bool:
        """Whether an item keeps what training knew of it."""
        return NO_ITEM < item.trained_row < self.bundle.manifest.trained_items.items and self.takes_fields

    def _with_learned(self, own: Weights, leaves: LinearRows, item: Evidence) -> tuple[Weights, float]:
        """The weights of a trained item's features now with what training knew of it, and its bias; see `linear_rows.py`.

        An item that had no own words, or has none now, keeps all of it.
        """
        before, length = self._own_words(own_fields(self.bundle, item.trained_row))
        now, _ = self._own_words(item.fields or {})
        if item.document is not None and (item.has_text or not len(now.indices)):
            now = item.document.normalised()
        cosine = _product(before.row(0), now.row(0)) if len(before.indices) and len(now.indices) else 1.0
        trained, scale = leaves.weights_of(item.trained_row), float(leaves.length) * length
        share = max(_product(before.row(0), trained) / scale, 0.0) if scale > 0 else 1.0
        parts = [(1 - cosine * (1 - share), own), (cosine, trained), (-cosine * share * scale, before.row(0))]
        bias = leaves.bias + cosine * (leaves.bias_of(item.trained_row) - leaves.bias)
        return added([(feature, np.float32(factor) * weight) for factor, (feature, weight) in parts]), bias

    def _weights(self, leaves: LinearRows, tree: int, item: int, overlay: Overlay) -> Weights:
        entry, pool = overlay.live_leaf(item, tree), overlay.trees[tree].sparse
        if not entry or pool is None:
            return leaves.weights_of(item)
        span = slice(int(pool.begin_P[entry]), int(pool.end_P[entry]))
        return pool.feature[span], pool.weight[span]

    def _parents_of(self, like: Int64, tree: int, overlay: Overlay) -> Int64:
        """The parents of some items; parents of more of them come first."""
        parents = []
        for item in like.tolist():
            entry, trained = overlay.live_leaf(item, tree), self.bundle.trees[tree].tree
            parent = overlay.trees[tree].entries.rows[entry, PARENT] if entry else trained.parent[trained.leaf_of_item[item]]
            parents.append(int(parent))
        nodes, count = summed([np.array(parents, np.int64)], [np.ones(len(parents))])
        return nodes[np.argsort(-count, kind="stable")[:MOST]]


def query_features(item: Evidence) -> SparseRows:
    """[1, F]: the sum of an item's text, as a query, and events."""
    return _sum([*([] if item.text_query is None else [item.text_query.features]), item.events.features])


def _product(one: Weights, other: Weights) -> float:
    """The inner product of two sparse rows."""
    _, of_one, of_other = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    return float(one[1][of_one] @ other[1][of_other])


def _sum(summands: Sequence[SparseRows]) -> SparseRows:
    """[1, F]: the sum of all rows."""
    rows = summands[0] if len(summands) == 1 else concatenated(summands)
    if len(rows) == 1:  # a row's features are distinct and ascend
        return rows
    feature, value = added([(rows.indices, rows.values)])
    return SparseRows(np.array([0, len(feature)]), feature, value, rows.width)


def text_columns(bundle: Bundle) -> tuple[str, ...]:
    """The columns with an item's own text: those of the model's configuration, else all columns of strings."""
    strings = (name for name in bundle.items.fields if name != "id" and str(bundle.items.column(name).type).endswith("string"))
    return own_columns(bundle) or tuple(strings)
