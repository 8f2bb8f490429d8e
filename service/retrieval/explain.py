"""Explanations of an answer: the nodes that each level of a traced search kept, the level on which a requested item was dropped, and the
features or past items that contributed to its key.

Knows trees, traces and filters. Does not know HTTP. Keys order the nodes of one level. A key is the node's rank, plus the memory's part if
the bundle has a memory. Only leaves have scores.

Legend: B queries, K beam, C candidates, S shards, W requested items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from espalier.arrays import Array, Float32, Int32, Int64
from espalier.bundle import Bundle
from espalier.masks.filters import Filter
from espalier.memory import Memory
from espalier.queries import TextKind
from espalier.search import LevelTrace, SearchResult
from espalier.shards.layout import node_shards
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

from ..live.views import View
from ..retrieval.request import CheckedRequest, EncodedRequest
from ..retrieval.second_stage import Candidates

MAX_FEATURES = 10
"""Most features that are listed for an item."""
MAX_SOURCES = 3
"""Most past items that are listed for an item."""


class RequestedItems:
    """The items of `explain_items`, the same for all queries of a request.

    rows_W      int64[W]   item rows; −1 if the catalogue does not have the id
    removed_W   bool[W]    whether the item is removed
    filtered_W  bool[W]    whether the request's filter excludes it
    """

    def __init__(self, checked: CheckedRequest, view: View, conditions: Filter | None) -> None:
        self.ids = checked.request.explain_items
        self.rows_W = view.items.rows_of(self.ids)
        row_W = np.maximum(self.rows_W, 0)
        self.removed_W = view.is_removed(row_W)
        self.filtered_W = np.zeros(len(row_W), np.bool_) if conditions is None else ~view.matches(conditions, row_W)


def explain(
    checked: CheckedRequest,
    view: View,
    encoded: EncodedRequest,
    result: SearchResult,
    b: int,
    requested: RequestedItems,
    final: Candidates,
) -> dict[str, Any]:
    """The explanation of query b. final: the candidates after the second stage, in the order of the answer."""
    query = _Query(checked, view, encoded, result, b, final)
    bundle, items = checked.model.bundle, []
    for w, (item_id, row) in enumerate(zip(requested.ids, requested.rows_W.tolist(), strict=True)):
        entry: dict[str, Any] = {"id": item_id}
        live_item = view.entry(item_id)
        if live_item is not None and live_item.is_deleted:
            entry["outcome"] = "deleted"
        elif row < 0:
            entry["outcome"] = "unknown"
        elif requested.removed_W[w]:
            entry["outcome"] = "removed"
        elif requested.filtered_W[w]:
            entry["outcome"] = "filtered"
        elif row in encoded.excluded[b] or (query.memory is not None and query.memory.leaves_out(encoded.queries.array[b], row)):
            entry["outcome"] = "excluded"
        else:
            entry |= query.outcome_of(row)
        if live_item is not None and not live_item.is_deleted:
            since = datetime.fromtimestamp(live_item.since, UTC).isoformat(timespec="milliseconds")
            entry["live"] = {"since": since, "sequence": live_item.sequence, "placed_by": live_item.by}
        if row >= 0 and isinstance(encoded.queries.rows, SparseRows):
            row_features = encoded.queries.rows.between(b, b + 1)
            entry["features"] = _features(bundle, view, row_features.indices, row_features.values, row)
            if bundle.tail is not None:
                entry["tail"] = view.tail_part(bundle.tail, row, row_features.indices, row_features.values)
        if row >= 0 and not query.merges_trees:
            entry["path"] = query.trees[0].ancestors_of(row)
        if row >= 0 and query.memory is not None:
            entry["memory"] = _memory(view, query.memory, encoded.queries.array[b], row)
        items.append(entry)
    with_nodes = checked.request.explain_nodes
    levels = [[level.summary() | (level.nodes() if with_nodes else {}) for level in tree.levels] for tree in query.trees]
    document: dict[str, Any] = {"levels": levels[0], "items": items}
    if query.merges_trees:
        document["trees"] = [{"levels": tree_levels} for tree_levels in levels]
    if query.reranking is not None:
        ids = view.items.ids_of(final.rows_BM[b, : final.count_B[b]])
        document["moved"] = query.reranking.moved(ids)
    return document


class _Query:
    """Query b of a traced search.

    trees            the search of the only tree, or of each tree of a forest
    retrieved_M      item rows that the search returned, best first
    count, eligible  how many of them the answer has, and how many passed `min_score`
    memory           the bundle's memory; without one, keys are ranks
    answered_S       bool[S]: which shards answered; empty without shards
    merges_trees     a result's rank is not the rank of one leaf, but is made from several trees or by stacking
    """

    def __init__(
        self, checked: CheckedRequest, view: View, encoded: EncodedRequest, result: SearchResult, b: int, final: Candidates
    ) -> None:
        bundle = checked.model.bundle
        traced = list(zip(bundle.alone, result.traces, strict=True))
        self.merges_trees = len(traced) > 1 or bundle.manifest.stacking is not None
        last_result = None if self.merges_trees else result
        self.trees = [
            _TreeSearch(view, t, bundle_tree.tree, [_Level(view, t, bundle_tree.tree, level, last_result, b) for level in trace])
            for t, (bundle_tree, trace) in enumerate(traced)
        ]
        self.answered_S = np.empty(0, np.bool_) if result.coverage is None else result.coverage.answered_BS[b]
        self.retrieved_M = result.item_rows_BM[b, : result.count_B[b]]
        self.ranks_M, self.keys_M = result.ranks_BM[b], result.keys_BM[b]
        self.count, self.eligible = int(final.count_B[b]), int(final.eligible_B[b])
        self.reranking, self.memory = _Reranking.of(checked, view, encoded, result, b, final), bundle.memory

    def outcome_of(self, row: int) -> dict[str, Any]:
        """The place at which an eligible item was returned, or the level on which it was dropped."""
        positions = np.flatnonzero(self.retrieved_M == row)
        if len(positions) == 0:
            dropped = self._outcome_if_not_retrieved(row) if self.merges_trees else self.trees[0].pruned(row, self.memory is not None)
            return dropped if dropped["outcome"] != "pruned" or self._is_searched(row) else {"outcome": "not_searched"}
        retrieved = int(positions[0])
        place = retrieved if self.reranking is None else self.reranking.place_of(retrieved)
        outcome = "below_min_score"
        if retrieved < self.eligible:
            outcome = "returned" if place < self.count else "below_m"
        entry = {"outcome": outcome, "rank": float(self.ranks_M[retrieved]), "place": place + 1}
        entry |= {"trees": self._in_trees(row)} if self.merges_trees else {"level": self.trees[0].tree.height}
        if self.memory is not None:
            entry["key"] = float(self.keys_M[retrieved])
        return entry if self.reranking is None else entry | self.reranking.describe(retrieved)

    def _outcome_if_not_retrieved(self, row: int) -> dict[str, Any]:
        """The outcome of an item that the search did not return: every tree pruned it, or its mean or stacking key was too low."""
        tree_outcomes = self._in_trees(row)
        scored = any(entry["outcome"] == "scored" for entry in tree_outcomes)
        cut = {"cut": float(self.ranks_M[len(self.retrieved_M) - 1])} if scored and len(self.retrieved_M) else {}
        return {"outcome": "below_m" if scored else "pruned", "trees": tree_outcomes} | cut

    def _is_searched(self, row: int) -> bool:
        """Whether the shard of an item answered: that of its parent in the first tree."""
        if self.answered_S.all():
            return True
        tree = self.trees[0].tree
        parent = self.trees[0].view.path_of(tree, 0, row)[-2]
        return bool(self.answered_S[node_shards(tree, len(self.answered_S))[parent]])

    def _in_trees(self, row: int) -> list[dict[str, Any]]:
        return [tree.outcome_of(row) for tree in self.trees]


@dataclass(frozen=True)
class _Reranking:
    """The re-ranking of one query's candidates.

    place_M        retrieved place of the candidate at each new place
    score_M        ranker's score at each new place; NaN if the ranker gave none
    features_NF    features of the first N retrieved candidates
    """

    names: Sequence[str]
    place_M: Int64
    score_M: Float32
    features_NF: Float32

    @staticmethod
    def of(
        checked: CheckedRequest, view: View, encoded: EncodedRequest, result: SearchResult, b: int, final: Candidates
    ) -> _Reranking | None:
        """The re-ranking of query b; None if nothing was re-ranked."""
        reranker = checked.model.reranker
        if final.reranked is None or reranker is None:
            return None
        count = min(int(final.eligible_B[b]), checked.depth)
        candidates = result.item_rows_BM[b, :count], result.ranks_BM[b, :count], result.scores_BM[b, :count]
        features_NF = reranker.features.of(encoded.queries, b, *candidates, encoded.caller_features[b], view.candidates)
        return _Reranking(reranker.features.names, final.reranked.retrieved_BM[b], final.reranked.score_BM[b], features_NF)

    def place_of(self, retrieved: int) -> int:
        return int(np.flatnonzero(self.place_M == retrieved)[0])

    def describe(self, retrieved: int) -> dict[str, Any]:
        entry: dict[str, Any] = {"retrieved_place": retrieved + 1}
        if retrieved < len(self.features_NF):
            entry["rerank_score"] = float(self.score_M[self.place_of(retrieved)])
            entry["rank_features"] = dict(zip(self.names, self.features_NF[retrieved].tolist(), strict=True))
        return entry

    def moved(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The items of the answer whose places the ranker changed."""
        places = zip(ids, self.place_M.tolist(), range(len(ids)), strict=False)
        return [{"id": item_id, "retrieved_place": old + 1, "place": new + 1} for item_id, old, new in places if old != new]


def _features(bundle: Bundle, view: View, indices: Int32, values: Float32, item: int) -> list[dict[str, Any]]:
    """The features of a query that contribute most to an item."""
    weights = np.zeros(len(indices), np.float64)
    for tree_index, (tree, chunks) in enumerate(bundle.trees):
        *inner_nodes, leaf = view.path_of(tree, tree_index, item)[1:].tolist()
        handle = leaf - tree.node_count
        weights += np.sum([chunks.weights_of(tree, node, indices) for node in inner_nodes if node >= 0], axis=0)
        weights += chunks.weights_of(tree, leaf, indices) if handle < 0 else view.weights_of(tree_index, handle, indices)
    contributions = weights / len(bundle.trees) * values
    order = np.argsort(-np.abs(contributions), kind="stable")[:MAX_FEATURES]
    order = order[contributions[order] != 0]
    text = isinstance(bundle.manifest.query, TextKind)
    names = bundle.vectoriser.features_of(indices[order]) if text else [str(index) for index in indices[order].tolist()]
    return [{"feature": name, "contribution": value} for name, value in zip(names, contributions[order].tolist(), strict=True)]


def _memory(view: View, memory: Memory, history_T: Array, item: int) -> dict[str, Any]:
    """The memory's part of an item's key, and the past items that contribute most to it."""
    sources = view.sources(memory, history_T, item)
    top_sources = sources[:MAX_SOURCES]
    ids = view.items.ids_of(np.array([source for source, _ in top_sources], np.int64))
    source_items = [{"id": item_id, "part": part} for item_id, (_, part) in zip(ids, top_sources, strict=True)]
    return {"part": sum(part for _, part in sources), "items": source_items}


class _Level:
    """One level of the search for query b: its candidates with their ranks and keys, and which of them were kept.

    t       the tree's number in a forest, from 0
    result  of a single tree: its items are the kept nodes of the last level. None in a forest, whose trees keep all leaves that they score
    """

    def __init__(self, view: View, t: int, tree: Tree, trace: LevelTrace, result: SearchResult | None, b: int) -> None:
        present_C = trace.candidates_BC[b] >= 0
        self.level, self.candidates_C = trace.level, trace.candidates_BC[b][present_C]
        self.ranks_C, self.keys_C = trace.candidate_ranks_BC[b][present_C], trace.candidate_keys_BC[b][present_C]
        kept_K = trace.nodes_BK[b]
        if result is not None and trace.level == tree.height:
            kept_K = view.leaves_of(tree, result.item_rows_BM[b, : result.count_B[b]])
        self.kept_C = np.isin(self.candidates_C, kept_K[kept_K >= 0])
        self.order_C = self.candidates_C if trace.level < tree.height else view.fold_order(tree, t, self.candidates_C)  # of equal keys

    def nodes(self) -> dict[str, Any]:
        """The candidates with their keys: first the kept ones, then the others, both by descending key."""
        order = np.lexsort((self.order_C, -self.keys_C, ~self.kept_C))
        return {"nodes": self.candidates_C[order], "keys": self.keys_C[order]}

    def ancestor(self, node: int) -> dict[str, Any]:
        """A node of this level: rank, key, place by key from 1, and whether it was kept. Other nodes than candidates have nulls."""
        entry: dict[str, Any] = {"level": self.level, "node": node, "rank": None, "key": None, "place": None, "kept": False}
        positions = np.flatnonzero(self.candidates_C == node)
        if len(positions) == 0:
            return entry
        key, order = self.keys_C[positions[0]], self.order_C[positions[0]]
        better_nodes = np.count_nonzero((self.keys_C > key) | ((self.keys_C == key) & (self.order_C < order)))
        place, kept = int(better_nodes) + 1, bool(self.kept_C[positions[0]])
        return entry | {"rank": float(self.ranks_C[positions[0]]), "key": float(key), "place": place, "kept": kept}

    def cut(self) -> float | None:
        return float(self.keys_C[self.kept_C].min()) if self.kept_C.any() else None

    def summary(self) -> dict[str, Any]:
        dropped = None if self.kept_C.all() else float(self.keys_C[~self.kept_C].max())
        kept_count = int(np.count_nonzero(self.kept_C))
        return {"level": self.level, "candidates": len(self.candidates_C), "kept": kept_count, "cut": self.cut(), "dropped": dropped}


@dataclass(frozen=True)
class _TreeSearch:
    """One query's search of one tree, level by level. tree_index: the tree's number in a forest, from 0."""

    view: View
    tree_index: int
    tree: Tree
    levels: Sequence[_Level]

    def pruned(self, row: int, with_keys: bool) -> dict[str, Any]:
        """The first level on which the search dropped an ancestor of an item."""
        for level, ancestor in zip(self.levels, self.ancestors_of(row), strict=True):
            if not ancestor["kept"]:
                entry = {"outcome": "pruned", "level": level.level, "rank": ancestor["rank"], "cut": level.cut()}
                return entry | {"key": ancestor["key"]} if with_keys else entry
        return {"outcome": "pruned"}

    def ancestors_of(self, row: int) -> list[dict[str, Any]]:
        """An item's ancestors on the levels of the search, its leaf included."""
        path = self.view.path_of(self.tree, self.tree_index, row)
        return [level.ancestor(int(path[level.level])) for level in self.levels]

    def outcome_of(self, row: int) -> dict[str, Any]:
        """Whether a tree of a forest scored an item or pruned it, on which level, and the rank there."""
        last = self.levels[-1]
        positions = np.flatnonzero(last.candidates_C == self.view.leaves_of(self.tree, np.array([row]))[0])
        if len(positions) == 0:
            return self.pruned(row, with_keys=False)
        return {"outcome": "scored", "level": last.level, "rank": float(last.ranks_C[positions[0]])}
