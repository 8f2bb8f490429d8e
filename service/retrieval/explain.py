"""Why an answer is what it is: what each level of a traced search kept, where a requested item was dropped, which features or past items
spoke for it.

Knows trees, traces and filters. Does not know HTTP. Keys order the nodes of one level: their ranks, and the memory's part where the bundle
has one. Only those of leaves have a score.

Legend: B queries, K beam, C candidates, W requested items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.masks.filters import Filter
from espalier.memory import Memory
from espalier.queries import TextKind
from espalier.search import LevelTrace, SearchResult
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

from ..live.views import View
from ..retrieval.request import CheckedRequest, EncodedRequest
from ..retrieval.second_stage import Candidates

MAX_FEATURES = 10
"""Features that are listed of an item."""
MAX_SOURCES = 3
"""Past items that are listed of an item."""


class RequestedItems:
    """The items of `explain_items`, the same for all queries of a request.

    rows_W      int64[W]   item rows, −1 where the catalogue does not have the id
    removed_W   bool[W]    whether the item is a standing exclusion
    filtered_W  bool[W]    whether the request's filter excludes it
    """

    def __init__(self, checked: CheckedRequest, view: View, conditions: Filter | None) -> None:
        self.ids = checked.request.explain_items
        self.rows_W = view.items.rows_of(self.ids)
        known_W = np.maximum(self.rows_W, 0)
        self.removed_W = view.is_removed(known_W)
        self.filtered_W = np.zeros(len(known_W), np.bool_) if conditions is None else ~view.matches(conditions, known_W)


def explain(
    checked: CheckedRequest,
    view: View,
    encoded: EncodedRequest,
    result: SearchResult,
    b: int,
    requested: RequestedItems,
    final: Candidates,
) -> dict[str, Any]:
    """The explanation of query b. final: what of the result is returned, and in which order."""
    query = _Query(checked, view, encoded, result, b, final)
    bundle, items = checked.model.bundle, []
    for w, (item_id, row) in enumerate(zip(requested.ids, requested.rows_W.tolist(), strict=True)):
        entry: dict[str, Any] = {"id": item_id}
        put = view.entry(item_id)
        if put is not None and put.is_deleted:
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
        if put is not None and not put.is_deleted:
            since = datetime.fromtimestamp(put.since, UTC).isoformat(timespec="milliseconds")
            entry["live"] = {"since": since, "sequence": put.sequence, "placed_by": put.by}
        if row >= 0 and isinstance(encoded.queries.rows, SparseRows):
            own = encoded.queries.rows.between(b, b + 1)
            entry["features"] = _features(bundle, view, own.indices, own.values, row)
            if bundle.tail is not None:
                entry["tail"] = view.tail_part(bundle.tail, row, own.indices, own.values)
        if row >= 0 and not query.apart:
            entry["path"] = query.trees[0].way_to(row)
        if row >= 0 and query.memory is not None:
            entry["memory"] = _memory(view, query.memory, encoded.queries.array[b], row)
        items.append(entry)
    with_nodes = checked.request.explain_nodes
    levels = [[level.summary() | (level.nodes() if with_nodes else {}) for level in tree.levels] for tree in query.trees]
    document: dict[str, Any] = {"levels": levels[0], "items": items}
    if query.apart:
        document["trees"] = [{"levels": own} for own in levels]
    if query.reranking is not None:
        ids = view.items.ids_of(final.rows_BM[b, : final.count_B[b]])
        document["moved"] = query.reranking.moved(ids)
    return document


class _Query:
    """Query b of a traced search.

    trees            the only tree, or those of a forest
    found_M          item rows that the search found, best first
    count, eligible  how many are returned, and how many `min_score` left
    memory           the bundle's; without one keys are ranks
    apart            whether a result's rank is not that of a leaf: it comes of several trees, or of stacking
    """

    def __init__(
        self, checked: CheckedRequest, view: View, encoded: EncodedRequest, result: SearchResult, b: int, final: Candidates
    ) -> None:
        bundle = checked.model.bundle
        traced = list(zip(bundle.alone, result.traces, strict=True))
        self.apart = len(traced) > 1 or bundle.manifest.stacking is not None
        last = None if self.apart else result
        self.trees = [
            _TreeSearch(view, place, alone.tree, [_Level(view, alone.tree, level, last, b) for level in trace])
            for place, (alone, trace) in enumerate(traced)
        ]
        self.found_M = result.item_rows_BM[b, : result.count_B[b]]
        self.ranks_M, self.keys_M = result.ranks_BM[b], result.keys_BM[b]
        self.count, self.eligible = int(final.count_B[b]), int(final.eligible_B[b])
        self.reranking, self.memory = _Reranking.of(checked, encoded, result, b, final), bundle.memory

    def outcome_of(self, row: int) -> dict[str, Any]:
        """Where an eligible item was returned or dropped."""
        at = np.flatnonzero(self.found_M == row)
        if len(at) == 0:
            return self._below_m(row) if self.apart else self.trees[0].pruned(row, self.memory is not None)
        retrieved = int(at[0])
        place = retrieved if self.reranking is None else self.reranking.place_of(retrieved)
        outcome = "below_min_score"
        if retrieved < self.eligible:
            outcome = "returned" if place < self.count else "below_m"
        entry = {"outcome": outcome, "rank": float(self.ranks_M[retrieved]), "place": place + 1}
        entry |= {"trees": self._in_trees(row)} if self.apart else {"level": self.trees[0].tree.height}
        if self.memory is not None:
            entry["key"] = float(self.keys_M[retrieved])
        return entry if self.reranking is None else entry | self.reranking.describe(retrieved)

    def _below_m(self, row: int) -> dict[str, Any]:
        """An item that did not come: pruned in every tree, or of too low a mean, or of too low a key of stacking."""
        own = self._in_trees(row)
        scored = any(entry["outcome"] == "scored" for entry in own)
        cut = {"cut": float(self.ranks_M[len(self.found_M) - 1])} if scored and len(self.found_M) else {}
        return {"outcome": "below_m" if scored else "pruned", "trees": own} | cut

    def _in_trees(self, row: int) -> list[dict[str, Any]]:
        return [tree.outcome_of(row) for tree in self.trees]


@dataclass(frozen=True)
class _Reranking:
    """What the ranker did to one query's candidates, by their places after retrieval.

    place_M        the retrieved place of the candidate that is here now
    score_M        the ranker's scores, by the new places; NaN where it gave none
    features_NF    the features of the first N
    """

    names: Sequence[str]
    place_M: NDArray[np.int64]
    score_M: NDArray[np.float32]
    features_NF: NDArray[np.float32]

    @staticmethod
    def of(checked: CheckedRequest, encoded: EncodedRequest, result: SearchResult, b: int, final: Candidates) -> _Reranking | None:
        """None where nothing was re-ranked."""
        reranker = checked.model.reranker
        if final.reranked is None or reranker is None:
            return None
        score_M = final.reranked.score_BM[b]
        scored = int(np.count_nonzero(~np.isnan(score_M)))
        candidates = result.item_rows_BM[b, :scored], result.ranks_BM[b, :scored], result.scores_BM[b, :scored]
        live = checked.model.live.newest().candidates
        features_NF = reranker.features.of(encoded.queries, b, *candidates, encoded.caller_features[b], live)
        return _Reranking(reranker.features.names, final.reranked.retrieved_BM[b], score_M, features_NF)

    def place_of(self, retrieved: int) -> int:
        return int(np.flatnonzero(self.place_M == retrieved)[0])

    def describe(self, retrieved: int) -> dict[str, Any]:
        entry: dict[str, Any] = {"retrieved_place": retrieved + 1}
        if retrieved < len(self.features_NF):
            entry["rerank_score"] = float(self.score_M[self.place_of(retrieved)])
            entry["rank_features"] = dict(zip(self.names, self.features_NF[retrieved].tolist(), strict=True))
        return entry

    def moved(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The items of the answer whose place changed."""
        places = enumerate(zip(ids, self.place_M.tolist(), strict=False))
        return [{"id": item_id, "retrieved_place": was + 1, "place": place + 1} for place, (item_id, was) in places if was != place]


def _features(bundle: Bundle, view: View, indices: NDArray[np.int32], values: NDArray[np.float32], item: int) -> list[dict[str, Any]]:
    """The features of a query that contribute most to an item."""
    weights = np.zeros(len(indices), np.float64)
    for place, (tree, chunks) in enumerate(bundle.trees):
        *above, leaf = view.path_of(tree, place, item)[1:].tolist()
        handle = leaf - tree.node_count
        weights += np.sum([chunks.weights_of(tree, node, indices) for node in above if node >= 0], axis=0)
        weights += chunks.weights_of(tree, leaf, indices) if handle < 0 else view.weights_of(place, handle, indices)
    contributions = weights / len(bundle.trees) * values
    order = np.argsort(-np.abs(contributions), kind="stable")[:MAX_FEATURES]
    order = order[contributions[order] != 0]
    text = isinstance(bundle.manifest.query, TextKind)
    names = bundle.vectoriser.features_of(indices[order]) if text else [str(index) for index in indices[order].tolist()]
    return [{"feature": name, "contribution": value} for name, value in zip(names, contributions[order].tolist(), strict=True)]


def _memory(view: View, memory: Memory, history_T: NDArray[Any], item: int) -> dict[str, Any]:
    """What the memory adds to an item's key, and the past items that add most of it."""
    sources = view.sources(memory, history_T, item)
    most = sources[:MAX_SOURCES]
    ids = view.items.ids_of(np.array([source for source, _ in most], np.int64))
    past = [{"id": item_id, "part": part} for item_id, (_, part) in zip(ids, most, strict=True)]
    return {"part": sum(part for _, part in sources), "items": past}


class _Level:
    """The level of query b: its candidates with their ranks and keys, and which were kept.

    result  of the only tree, whose results are what the last level kept; None: each tree of a forest keeps what it scores
    """

    def __init__(self, view: View, tree: Tree, trace: LevelTrace, result: SearchResult | None, b: int) -> None:
        present_C = trace.candidates_BC[b] >= 0
        self.level, self.candidates_C = trace.level, trace.candidates_BC[b][present_C]
        self.ranks_C, self.keys_C = trace.candidate_ranks_BC[b][present_C], trace.candidate_keys_BC[b][present_C]
        kept = trace.nodes_BK[b]
        if result is not None and trace.level == tree.height:
            kept = view.leaves_of(tree, result.item_rows_BM[b, : result.count_B[b]])
        self.kept_C = np.isin(self.candidates_C, kept[kept >= 0])

    def nodes(self) -> dict[str, Any]:
        """Its candidates with their keys: those that were kept, then the others, each by key."""
        order = np.lexsort((self.candidates_C, -self.keys_C, ~self.kept_C))
        return {"nodes": self.candidates_C[order], "keys": self.keys_C[order]}

    def ancestor(self, node: int) -> dict[str, Any]:
        """A node of this level: its rank, its key, its place by key from 1, and whether it was kept. Nulls where it was no candidate."""
        entry: dict[str, Any] = {"level": self.level, "node": node, "rank": None, "key": None, "place": None, "kept": False}
        at = np.flatnonzero(self.candidates_C == node)
        if len(at) == 0:
            return entry
        key = self.keys_C[at[0]]
        before = np.count_nonzero((self.keys_C > key) | ((self.keys_C == key) & (self.candidates_C < node)))
        found = {"rank": float(self.ranks_C[at[0]]), "key": float(key), "place": int(before) + 1, "kept": bool(self.kept_C[at[0]])}
        return entry | found

    def cut(self) -> float | None:
        return float(self.keys_C[self.kept_C].min()) if self.kept_C.any() else None

    def summary(self) -> dict[str, Any]:
        dropped = None if self.kept_C.all() else float(self.keys_C[~self.kept_C].max())
        kept = int(np.count_nonzero(self.kept_C))
        return {"level": self.level, "candidates": len(self.candidates_C), "kept": kept, "cut": self.cut(), "dropped": dropped}


@dataclass(frozen=True)
class _TreeSearch:
    """One query's search of one tree, level by level. place: which tree of a forest, from 0."""

    view: View
    place: int
    tree: Tree
    levels: Sequence[_Level]

    def pruned(self, row: int, with_keys: bool) -> dict[str, Any]:
        """The level on which the search left an item's path."""
        for level, ancestor in zip(self.levels, self.way_to(row), strict=True):
            if not ancestor["kept"]:
                entry = {"outcome": "pruned", "level": level.level, "rank": ancestor["rank"], "cut": level.cut()}
                return entry | {"key": ancestor["key"]} if with_keys else entry
        return {"outcome": "pruned"}

    def way_to(self, row: int) -> list[dict[str, Any]]:
        """An item's ancestors on the levels of the search, and its leaf."""
        path = self.view.path_of(self.tree, self.place, row)
        return [level.ancestor(int(path[level.level])) for level in self.levels]

    def outcome_of(self, row: int) -> dict[str, Any]:
        """Whether a tree of a forest scored an item, and how."""
        last = self.levels[-1]
        at = np.flatnonzero(last.candidates_C == self.view.leaves_of(self.tree, np.array([row]))[0])
        if len(at) == 0:
            return self.pruned(row, with_keys=False)
        return {"outcome": "scored", "level": last.level, "rank": float(last.ranks_C[at[0]])}
