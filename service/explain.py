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
from espalier.filters import Filter
from espalier.queries import QueryBatch, TextKind
from espalier.search import LevelTrace, SearchResult
from espalier.sparse import SparseRows
from espalier.tree import Tree
from service.registry import LoadedModel

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
    bundle: Bundle, queries: QueryBatch, result: SearchResult, b: int, wanted: Wanted, excluded: NDArray[np.int64], count: int
) -> dict[str, Any]:
    """The explanation of query b.

    excluded  item rows that the query excludes
    count     items that were returned, after `min_score`
    """
    tree = bundle.tree
    found = result.item_rows_BM[b, : result.count_B[b]]
    levels = [_Level.of(tree, trace, result, b) for trace in result.trace or ()]
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
            place = int(np.flatnonzero(found == row)[0])
            entry["outcome"] = "returned" if place < count else "below_min_score"
            entry |= {"level": tree.height, "rank": float(result.ranks_BM[b, place]), "place": place + 1}
        else:
            entry |= _fell_out(levels, tree.ancestors(tree.leaf_of_item[row : row + 1])[0])
        if row >= 0 and isinstance(queries.rows, SparseRows):
            entry["features"] = _features(bundle, queries.rows, b, row)
        items.append(entry)
    return {"levels": [level.summary() for level in levels], "items": items}


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
        real_C = trace.candidates_BC[b] >= 0
        candidates_C, ranks_C = trace.candidates_BC[b][real_C], trace.candidate_ranks_BC[b][real_C]
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
