"""Merges the results of shards into the leaves of one search: the best m of all shards, and their traces and frontiers.

As in an engine, the items of one tree are ordered by key, then by leaf; those of a forest by rank, then by item row. All numbers are those
of the whole bundle. Knows results, not shards.

Legend: B queries, X concatenated results of all shards, M results, K beam, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from espalier.arrays import Array, Int64
from espalier.engines.stages import NO_RANK, NO_ROW, Leaves, TreeQuery, stacked
from espalier.masks.eligibility import NO_NODE
from espalier.search import NO_ITEM, Coverage, Frontier, LevelTrace, SearchResult
from espalier.tree import Tree


def merge_results(results: Sequence[SearchResult], query: TreeQuery, trees: Sequence[Tree]) -> Leaves:
    """The best items of all results, which may be empty. trees: those of the whole bundle; several are a forest."""
    batch, width = len(query), int(query.m_B.max(initial=0))
    padding = np.full((batch, width), NO_ITEM, np.int64), *np.full((2, batch, width), -np.inf, np.float32)
    lists = [padding, *((result.item_rows_BM, result.ranks_BM, result.keys_BM) for result in results)]
    rows_BX, ranks_BX, keys_BX = (np.concatenate(arrays, axis=1) for arrays in zip(*lists, strict=True))
    ties_BX = rows_BX if len(trees) > 1 else trees[0].leaf_of_item[rows_BX]  # for NO_ITEM (−1) any leaf will do: its key is −inf
    ranks_BX[rows_BX == NO_ITEM] = keys_BX[rows_BX == NO_ITEM] = -np.inf  # whatever number the shard sent
    order_BM = np.lexsort((ties_BX, -keys_BX), axis=1)[:, :width]
    rows_BM, ranks_BM, keys_BM = (np.take_along_axis(array, order_BM, axis=1)[:, None] for array in (rows_BX, ranks_BX, keys_BX))
    finite = [result.finite_B for result in results if result.finite_B is not None]
    tree_numbers, m_B = range(len(trees)), query.m_B if len(trees) == 1 else None
    traces = [_trace([result.traces[t] for result in results], m_B) for t in tree_numbers if query.trace and results]
    frontiers = [_frontier([result.frontiers[t] for result in results], batch) for t in tree_numbers if query.frontier]
    return Leaves(
        rows_BM,
        ranks_BM,
        keys_BM,
        np.minimum(np.count_nonzero(rows_BX != NO_ITEM, axis=1), query.m_B)[:, None],
        np.logical_and.reduce(finite) if finite else None,
        tuple(traces),
        tuple(frontiers),
    )


def joined_leaves(batches: Sequence[Leaves]) -> Leaves:
    """The merged leaves of several batches as those of one, padded to the widest. There are no traces: those are of single queries."""
    beams = zip(*(leaves.frontiers for leaves in batches), strict=True)
    finite = [np.ones(len(leaves.rows_BTM), np.bool_) if leaves.finite_B is None else leaves.finite_B for leaves in batches]
    return Leaves(
        stacked([leaves.rows_BTM[:, 0] for leaves in batches], NO_ROW)[:, None],
        stacked([leaves.ranks_BTM[:, 0] for leaves in batches], NO_RANK)[:, None],
        stacked([leaves.keys_BTM[:, 0] for leaves in batches], NO_RANK)[:, None],
        np.concatenate([leaves.count_BT for leaves in batches]),
        np.concatenate(finite),
        frontiers=tuple(
            Frontier(stacked([beam.nodes_BK for beam in of_tree], NO_ROW), stacked([beam.ranks_BK for beam in of_tree], NO_RANK))
            for of_tree in beams
        ),
        coverage=Coverage.joined([leaves.coverage for leaves in batches]),
    )


def _trace(traces: Sequence[Sequence[LevelTrace]], m_B: Int64 | None) -> tuple[LevelTrace, ...]:
    """The merged trace of one tree, on the levels that all shards' traces have. m_B: leaves to keep; None keeps all."""
    by_level = [{level.level: level for level in trace} for trace in traces]
    shared_levels = sorted(set(by_level[0]).intersection(*by_level[1:]))
    return tuple(_level([levels[h] for levels in by_level], m_B if h == shared_levels[-1] else None) for h in shared_levels)


def _level(levels: Sequence[LevelTrace], m_B: Int64 | None) -> LevelTrace:
    """One level of all shards. A node above the cut is in several shards: it is listed once, with its largest key."""
    nodes_BK, keys_BK, ranks_BK = _union([(level.nodes_BK, level.keys_BK, level.ranks_BK) for level in levels], m_B)
    candidates = [(level.candidates_BC, level.candidate_keys_BC, level.candidate_ranks_BC) for level in levels]
    candidates_BC, candidate_keys_BC, candidate_ranks_BC = _union(candidates, None)
    return replace(
        levels[0],
        nodes_BK=nodes_BK,
        keys_BK=keys_BK,
        ranks_BK=ranks_BK,
        candidates_BC=candidates_BC,
        candidate_keys_BC=candidate_keys_BC,
        candidate_ranks_BC=candidate_ranks_BC,
    )


def _frontier(frontiers: Sequence[Frontier], batch: int) -> Frontier:
    padding = np.full((batch, 1), NO_NODE, np.int64), *np.full((2, batch, 1), -np.inf, np.float32)
    lists = [padding, *((frontier.nodes_BK, frontier.ranks_BK, frontier.ranks_BK) for frontier in frontiers)]
    nodes_BK, ranks_BK, _ = _union(lists, None)
    return Frontier(nodes_BK, ranks_BK)


def _union(lists: Sequence[tuple[Int64, Array, Array]], m_B: Int64 | None) -> tuple[Int64, Array, Array]:
    """Merge lists of nodes with two numbers each: every node once, ascending, with its largest numbers, then padding.

    m_B  how many nodes to keep of each query, by the first number, then the lower node; None keeps all
    """
    nodes_BX, first_BX, second_BX = (np.concatenate(arrays, axis=1) for arrays in zip(*lists, strict=True))
    order_BX = np.lexsort((-second_BX, -first_BX, np.where(nodes_BX == NO_NODE, np.iinfo(np.int64).max, nodes_BX)), axis=1)
    nodes_BX, first_BX, second_BX = (np.take_along_axis(array, order_BX, axis=1) for array in (nodes_BX, first_BX, second_BX))
    keep_BX = nodes_BX != NO_NODE
    keep_BX[:, 1:] &= nodes_BX[:, 1:] != nodes_BX[:, :-1]
    if m_B is not None:
        best_BX = np.lexsort((nodes_BX, np.where(keep_BX, -first_BX, np.inf)), axis=1)
        position_BX = np.empty_like(best_BX)
        np.put_along_axis(position_BX, best_BX, np.broadcast_to(np.arange(best_BX.shape[1]), best_BX.shape), axis=1)
        keep_BX &= position_BX < m_B[:, None]
    order_BX = np.argsort(~keep_BX, axis=1, kind="stable")[:, : max(1, int(keep_BX.sum(axis=1).max(initial=0)))]
    keep_BX = np.take_along_axis(keep_BX, order_BX, axis=1)
    nodes_BX = np.where(keep_BX, np.take_along_axis(nodes_BX, order_BX, axis=1), NO_NODE)
    first_BX, second_BX = (
        np.where(keep_BX, np.take_along_axis(array, order_BX, axis=1), np.asarray(-np.inf, array.dtype)) for array in (first_BX, second_BX)
    )
    return nodes_BX, first_BX, second_BX
