"""The results of shards as the leaves of one search: the best m of all, and traces and frontiers with the nodes of all.

Of one tree, items are ordered by key, then by leaf, as one engine would order them; of a forest by rank, then by item row. All numbers are
those of the whole bundle. Knows results, not shards.

Legend: B queries, X results of all shards together, M results, K beam, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier, Leaves, ShardResult, TreeQuery
from espalier.masks.eligibility import NO_NODE
from espalier.search import NO_ITEM, LevelTrace
from espalier.tree import Tree

Array = NDArray[Any]
Int64 = NDArray[np.int64]


def merged(results: Sequence[ShardResult], query: TreeQuery, trees: Sequence[Tree]) -> Leaves:
    """One list of the best items of all results, of which there may be none. trees: the whole ones; several are a forest's."""
    batch, width = len(query), int(query.m_B.max(initial=0))
    nothing = np.full((batch, width), NO_ITEM, np.int64), *np.full((2, batch, width), -np.inf, np.float32)
    parts = [nothing, *((result.item_rows_BM, result.ranks_BM, result.keys_BM) for result in results)]
    rows_BX, ranks_BX, keys_BX = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    place_BX = rows_BX if len(trees) > 1 else trees[0].leaf_of_item[rows_BX]  # −1 takes any leaf: its key is −inf
    ranks_BX[rows_BX == NO_ITEM] = keys_BX[rows_BX == NO_ITEM] = -np.inf  # whatever a shard says of it
    order_BM = np.lexsort((place_BX, -keys_BX), axis=1)[:, :width]
    rows_BM, ranks_BM, keys_BM = (np.take_along_axis(array, order_BM, axis=1)[:, None] for array in (rows_BX, ranks_BX, keys_BX))
    finite = [result.finite_B for result in results if result.finite_B is not None]
    of_trees, kept_B = range(len(trees)), query.m_B if len(trees) == 1 else None
    traces = [_trace([result.traces[t] for result in results], kept_B) for t in of_trees if query.trace and results]
    frontiers = [_frontier([result.frontiers[t] for result in results], batch) for t in of_trees if query.frontier]
    return Leaves(
        rows_BM,
        ranks_BM,
        keys_BM,
        np.minimum(np.count_nonzero(rows_BX != NO_ITEM, axis=1), query.m_B)[:, None],
        np.logical_and.reduce(finite) if finite else None,
        tuple(traces),
        tuple(frontiers),
    )


def _trace(traces: Sequence[Sequence[LevelTrace]], m_B: Int64 | None) -> tuple[LevelTrace, ...]:
    """Of one tree, the levels that every shard's trace has. m_B: how many leaves are kept in the end; None: all."""
    by_level = [{level.level: level for level in trace} for trace in traces]
    shared = sorted(set(by_level[0]).intersection(*by_level[1:]))
    return tuple(_level([own[h] for own in by_level], m_B if h == shared[-1] else None) for h in shared)


def _level(levels: Sequence[LevelTrace], m_B: Int64 | None) -> LevelTrace:
    """A node that several shards have, above the cut, stands once; it is kept where one of them kept it, with the larger key."""
    kept = _union([(level.nodes_BK, level.keys_BK, level.ranks_BK) for level in levels], m_B)
    candidates = _union([(level.candidates_BC, level.candidate_keys_BC, level.candidate_ranks_BC) for level in levels], None)
    return replace(
        levels[0],
        nodes_BK=kept[0],
        keys_BK=kept[1],
        ranks_BK=kept[2],
        candidates_BC=candidates[0],
        candidate_keys_BC=candidates[1],
        candidate_ranks_BC=candidates[2],
    )


def _frontier(frontiers: Sequence[Frontier], batch: int) -> Frontier:
    nothing = np.full((batch, 1), NO_NODE, np.int64), *np.full((2, batch, 1), -np.inf, np.float32)
    nodes_BK, ranks_BK, _ = _union([nothing, *((own.nodes_BK, own.ranks_BK, own.ranks_BK) for own in frontiers)], None)
    return Frontier(nodes_BK, ranks_BK)


def _union(parts: Sequence[tuple[Int64, Array, Array]], m_B: Int64 | None) -> tuple[Int64, Array, Array]:
    """The nodes of some parts, ascending and each once, with the largest of two numbers of each, and padding behind them.

    m_B  how many to keep of each query, by the first number, then the lower node; None: all
    """
    nodes_BX, first_BX, second_BX = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order_BX = np.lexsort((-second_BX, -first_BX, np.where(nodes_BX == NO_NODE, np.iinfo(np.int64).max, nodes_BX)), axis=1)
    nodes_BX, first_BX, second_BX = (np.take_along_axis(array, order_BX, axis=1) for array in (nodes_BX, first_BX, second_BX))
    keep_BX = nodes_BX != NO_NODE
    keep_BX[:, 1:] &= nodes_BX[:, 1:] != nodes_BX[:, :-1]
    if m_B is not None:
        best_BX = np.lexsort((nodes_BX, np.where(keep_BX, -first_BX, np.inf)), axis=1)
        place_BX = np.empty_like(best_BX)
        np.put_along_axis(place_BX, best_BX, np.broadcast_to(np.arange(best_BX.shape[1]), best_BX.shape), axis=1)
        keep_BX &= place_BX < m_B[:, None]
    order_BX = np.argsort(~keep_BX, axis=1, kind="stable")[:, : max(1, int(keep_BX.sum(axis=1).max(initial=0)))]
    kept_BX = np.take_along_axis(keep_BX, order_BX, axis=1)
    nodes_BX = np.where(kept_BX, np.take_along_axis(nodes_BX, order_BX, axis=1), NO_NODE)
    first_BX, second_BX = (
        np.where(kept_BX, np.take_along_axis(array, order_BX, axis=1), np.asarray(-np.inf, array.dtype)) for array in (first_BX, second_BX)
    )
    return nodes_BX, first_BX, second_BX
