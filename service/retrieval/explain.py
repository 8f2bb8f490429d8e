"""Why an answer is what it is: what each level of a traced search kept, where a wanted item fell out, which features spoke for it.

Knows trees, traces and filters. Does not know HTTP. Ranks are given as they are: they order the nodes of one level, and only those of the
leaves have a score.

Legend: B queries, K beam, C candidates, W wanted items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.masks.filters import Filter
from espalier.queries import QueryBatch, TextKind
from espalier.rerank.features import Sent
from espalier.rerank.ranker import Reranker
from espalier.search import LevelTrace, SearchResult
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree
from service.models.registry import LoadedModel
from service.retrieval.second_stage import Ordered

MOST_FEATURES = 10
"""Features that are told of an item."""


@dataclass(frozen=True)
class Wanted:
    """Items that the caller asks about.

    rows_W      int64[W]   item rows, −1 where the catalogue does not have the id
    removed_W   bool[W]    whether the item is a standing exclusion
    filtered_W  bool[W]    whether the request's filter leaves it out
    """

    ids: Sequence[str]
    rows_W: NDArray[np.int64]
    removed_W: NDArray[np.bool_]
    filtered_W: NDArray[np.bool_]

    @staticmethod
    def of(ids: Sequence[str], model: LoadedModel, conditions: Filter | None) -> Wanted:
        """The same for all queries of a request."""
        rows_W = model.bundle.items.rows_of(ids)
        known_W = np.maximum(rows_W, 0)
        none_W = np.zeros(len(rows_W), np.bool_)
        filtered_W = none_W if conditions is None else ~model.filters.matches(conditions, known_W)
        return Wanted(ids, rows_W, model.filters.is_removed(known_W), filtered_W)


def explain(
    model: LoadedModel,
    queries: QueryBatch,
    result: SearchResult,
    b: int,
    wanted: Wanted,
    excluded: NDArray[np.int64],
    final: Ordered,
    sent: Sequence[Sent],
) -> dict[str, Any]:
    """The explanation of query b.

    excluded  item rows that the query excludes
    final     what of the result went out, and in which order; sent: the features that came with each query, where a ranker followed
    """
    tree = model.bundle.tree
    found = result.item_rows_BM[b, : result.count_B[b]]
    levels = [_Level.of(tree, trace, result, b) for trace in result.trace or ()]
    stage = None if final.reranked is None or model.reranker is None else _Stage.of(model.reranker, queries, result, b, final, sent)
    items = []
    for item_id, row, removed, filtered in zip(
        wanted.ids, wanted.rows_W.tolist(), wanted.removed_W.tolist(), wanted.filtered_W.tolist(), strict=True
    ):
        entry: dict[str, Any] = {"id": item_id}
        if row < 0:
            entry["outcome"] = "unknown"
        elif removed:
            entry["outcome"] = "removed"
        elif filtered:
            entry["outcome"] = "filtered"
        elif row in excluded:
            entry["outcome"] = "excluded"
        elif row in found:
            retrieved = int(np.flatnonzero(found == row)[0])
            place = retrieved if stage is None else stage.place_of(retrieved)
            returned = "returned" if place < final.count_B[b] else "below_m"
            entry["outcome"] = returned if retrieved < final.eligible_B[b] else "below_min_score"
            entry |= {"level": tree.height, "rank": float(result.ranks_BM[b, retrieved]), "place": place + 1}
            entry |= {} if stage is None else stage.told_of(retrieved)
        else:
            entry |= _fell_out(levels, tree.ancestors(tree.leaf_of_item[row : row + 1])[0])
        if row >= 0 and isinstance(queries.rows, SparseRows):
            entry["features"] = _features(model.bundle, queries.rows, b, row)
        items.append(entry)
    document: dict[str, Any] = {"levels": [level.summary() for level in levels], "items": items}
    return document if stage is None else document | {"moved": stage.moved(model.bundle.items.ids_of(final.rows_BM[b, : final.count_B[b]]))}


@dataclass(frozen=True)
class _Stage:
    """What the ranker did to one query's candidates, by their retrieved places.

    place_M        the retrieved place of what stands here now
    score_M        the ranker's scores, by the new places; NaN where it gave none
    features_NF    what it was told of the first N
    """

    names: Sequence[str]
    place_M: NDArray[np.int64]
    score_M: NDArray[np.float32]
    features_NF: NDArray[np.float32]

    @staticmethod
    def of(reranker: Reranker, queries: QueryBatch, result: SearchResult, b: int, final: Ordered, sent: Sequence[Sent]) -> _Stage:
        if final.reranked is None:
            raise ValueError("nothing was re-ranked")
        score_M = final.reranked.score_BM[b]
        scored = int(np.count_nonzero(~np.isnan(score_M)))
        candidates = result.item_rows_BM[b, :scored], result.ranks_BM[b, :scored], result.scores_BM[b, :scored]
        features_NF = reranker.features.of(queries, b, *candidates, sent[b])
        return _Stage(reranker.features.names, final.reranked.place_BM[b], score_M, features_NF)

    def place_of(self, retrieved: int) -> int:
        return int(np.flatnonzero(self.place_M == retrieved)[0])

    def told_of(self, retrieved: int) -> dict[str, Any]:
        entry: dict[str, Any] = {"retrieved_place": retrieved + 1}
        if retrieved < len(self.features_NF):
            entry["rerank_score"] = float(self.score_M[self.place_of(retrieved)])
            entry["rank_features"] = dict(zip(self.names, self.features_NF[retrieved].tolist(), strict=True))
        return entry

    def moved(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """The items of the answer that stood elsewhere."""
        places = enumerate(zip(ids, self.place_M.tolist(), strict=False))
        return [{"id": item_id, "retrieved_place": was + 1, "place": place + 1} for place, (item_id, was) in places if was != place]


def _features(bundle: Bundle, rows: SparseRows, b: int, item: int) -> list[dict[str, Any]]:
    """The features of query b that count most for an item."""
    own = slice(int(rows.indptr[b]), int(rows.indptr[b + 1]))
    indices, values = rows.indices[own], rows.values[own]
    path = bundle.tree.ancestors(bundle.tree.leaf_of_item[item : item + 1])[0]
    path_weights = [bundle.chunks.weights_of(bundle.tree, int(node), indices) for node in path[1:]]
    contributions = np.sum(path_weights, axis=0) * values
    order = np.argsort(-np.abs(contributions), kind="stable")[:MOST_FEATURES]
    order = order[contributions[order] != 0]
    text = isinstance(bundle.manifest.query, TextKind)
    names = bundle.vectoriser.features_of(indices[order]) if text else [str(index) for index in indices[order].tolist()]
    return [{"feature": name, "contribution": value} for name, value in zip(names, contributions[order].tolist(), strict=True)]


@dataclass(frozen=True)
class _Level:
    """One query's level: its candidates with their ranks, and which were kept."""

    level: int
    candidates_C: NDArray[np.int64]
    ranks_C: NDArray[np.float32]
    kept_C: NDArray[np.bool_]

    @staticmethod
    def of(tree: Tree, trace: LevelTrace, result: SearchResult, b: int) -> _Level:
        present_C = trace.candidates_BC[b] >= 0
        candidates_C, ranks_C = trace.candidates_BC[b][present_C], trace.candidate_ranks_BC[b][present_C]
        kept = trace.nodes_BK[b]
        if trace.level == tree.height:
            kept = tree.leaf_of_item[result.item_rows_BM[b, : result.count_B[b]]]
        return _Level(trace.level, candidates_C, ranks_C, np.isin(candidates_C, kept[kept >= 0]))

    def cut(self) -> float | None:
        return float(self.ranks_C[self.kept_C].min()) if self.kept_C.any() else None

    def summary(self) -> dict[str, Any]:
        dropped = None if self.kept_C.all() else float(self.ranks_C[~self.kept_C].max())
        kept = int(np.count_nonzero(self.kept_C))
        return {"level": self.level, "candidates": len(self.candidates_C), "kept": kept, "cut": self.cut(), "dropped": dropped}


def _fell_out(levels: Sequence[_Level], path: NDArray[np.int64]) -> dict[str, Any]:
    """The level on which an item's path (node numbers by level) was left."""
    for level in levels:
        at = np.flatnonzero(level.candidates_C == path[level.level])
        if len(at) == 0 or not level.kept_C[at[0]]:
            rank = float(level.ranks_C[at[0]]) if len(at) else None
            return {"outcome": "pruned", "level": level.level, "rank": rank, "cut": level.cut()}
    return {"outcome": "pruned"}
