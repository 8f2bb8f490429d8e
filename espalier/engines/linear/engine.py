"""`sparse-cpu`: bundles of linear node scorers, searched by compiled loops over their chunks.

Knows masks, exclusions, traces and frontiers. Does not know how a level is scored and pruned: see `chunk_search.py`.

Legend: B queries, T trees, X excluded nodes, N nodes, M results, K beam, H levels below the root.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch, Found
from espalier.engines.stages import Frontier, Leaves, TreeQuery, TreeSearch
from espalier.masks.eligibility import EligibleNodes
from espalier.search import LevelTrace, NodeMask

Array = NDArray[Any]
Int64 = NDArray[np.int64]


class SparseSearch(TreeSearch):
    """See the module. `rounding` bounds the difference of ranks whose float32 sums have another order, for logits of a few units. One
    search at a time.
    """

    name = "sparse-cpu"
    rounding = 1e-4

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self._trees = [tree for tree, _ in bundle.trees]
        self._searches = ChunkSearch.of_forest(bundle.trees, bundle.manifest.ranking, threads)
        nodes = [np.concatenate([np.full(tree.leaf_offset, -1, np.int64), tree.leaf_item]) for tree in self._trees]
        self._item_N = nodes if len(self._searches) == len(nodes) else [np.concatenate(nodes)]
        every_N = np.concatenate([tree.items_below > 0 for tree in self._trees])
        self._every_N = None if every_N.all() else every_N

    def close(self) -> None:
        """End its threads."""
        for search in self._searches:
            search.close()

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`. Raises InvalidQuery where features are not those of the scorers."""
        is_forest = len(self._trees) > 1
        m_B = np.zeros(len(query), np.int64) if is_forest else query.m_B  # 0: all leaves that are scored
        parts: list[Found] = []
        for place, search in enumerate(self._searches):
            is_joint = len(search.trees) > 1
            eligible_T = query.eligible_T if is_joint else query.eligible_T[place : place + 1]
            params = BeamParams(query.beam_size_B, m_B, self._groups(eligible_T[0], is_joint), _excluded(search, eligible_T))
            parts.append(search.search(query.queries.features, params, query.trace, query.frontier))
        return self._leaves(query, parts)

    def _groups(self, eligible: EligibleNodes, is_joint: bool) -> list[tuple[Int64, NDArray[np.bool_] | None]] | None:
        """The queries of each mask, as `BeamParams` has them. is_joint: the nodes of all trees are numbered one after the other."""
        groups = [
            (members, self._joint_mask(mask) if is_joint else None if mask is None else mask.eligible_N)
            for members, mask in eligible.groups
        ]
        return None if all(eligible_N is None for _, eligible_N in groups) else groups

    def _joint_mask(self, first: NodeMask | None) -> NDArray[np.bool_] | None:
        """The mask of all trees together, by that of the first tree: it holds the others, unless it is that of a query without a filter."""
        return first.every_tree_N if first is not None and first.others else self._every_N

    def _leaves(self, query: TreeQuery, parts: list[Found]) -> Leaves:
        """What the searches found, by item, tree after tree. A leaf of −1, padding, is clipped to the root, which holds no item."""
        batch, trees = len(query), len(self._trees)
        if len(parts) == 1:
            leaves_BM, ranks_BM, count_B = parts[0][:3]
            shape = batch, trees, leaves_BM.shape[1]
            rows_BTM, ranks_BTM = self._item_N[0].take(leaves_BM, mode="clip").reshape(shape), ranks_BM.reshape(shape)
            count_BT = count_B.reshape(batch, trees)
        else:
            rows = [item_N.take(part.leaves_BM, mode="clip") for item_N, part in zip(self._item_N, parts, strict=True)]
            width = max(part.shape[1] for part in rows)
            rows_BTM, ranks_BTM = np.full((batch, trees, width), -1, np.int64), np.full((batch, trees, width), -np.inf, np.float32)
            for t, (own, part) in enumerate(zip(rows, parts, strict=True)):
                rows_BTM[:, t, : own.shape[1]], ranks_BTM[:, t, : own.shape[1]] = own, part.ranks_BM
            count_BT = np.stack([part.count_B for part in parts], axis=1)
        traces = tuple(self._trace(parts, t) for t in range(trees)) if query.trace else ()
        frontiers: tuple[Frontier, ...] = ()
        if query.frontier and query.trace:
            frontiers = tuple(map(_above_leaves, traces))
        elif query.frontier:
            frontiers = tuple(self._frontier(parts, t) for t in range(trees))
        return Leaves(rows_BTM, ranks_BTM, ranks_BTM, count_BT, traces=traces, frontiers=frontiers)

    def _own(self, parts: list[Found], t: int) -> tuple[Found, slice, int]:
        """The search of a tree, its rows of the results, and the number of its root there."""
        if len(parts) > 1:
            return parts[t], slice(None), 0
        return parts[0], slice(t, None, len(self._trees)), sum(tree.node_count for tree in self._trees[:t])

    def _frontier(self, parts: list[Found], t: int) -> Frontier:
        part, rows, root = self._own(parts, t)
        if part.frontier is None:
            raise ValueError("a search without its frontier")
        return Frontier(_numbers(part.frontier.nodes_BK[rows], root), part.frontier.ranks_BK[rows])

    def _trace(self, parts: list[Found], t: int) -> tuple[LevelTrace, ...]:
        """Every level of a tree: with γ > 0 all are scored."""
        part, rows, root = self._own(parts, t)
        levels = []
        for h in range(self._trees[t].height):
            candidates_1C, ranks_1C, kept_1K, kept_ranks_1K = (array[rows, h] for array in part.trace)
            count, kept = np.count_nonzero(candidates_1C >= 0), np.count_nonzero(kept_1K >= 0)
            candidates_1C, ranks_1C = _numbers(candidates_1C[:, :count], root), ranks_1C[:, :count].copy()
            kept_1K, kept_ranks_1K = _numbers(kept_1K[:, :kept], root), kept_ranks_1K[:, :kept].copy()
            levels.append(LevelTrace(h + 1, kept_1K, kept_ranks_1K, candidates_1C, ranks_1C, kept_ranks_1K, ranks_1C))
        return tuple(levels)


def _numbers(nodes: Int64, root: int) -> Int64:
    """A tree's own node numbers, of numbers that begin with its root's."""
    return np.where(nodes < 0, nodes, nodes - root)


def _excluded(search: ChunkSearch, eligible_T: tuple[EligibleNodes, ...]) -> Int64 | None:
    """int64[B, X]: the nodes that queries must not visit besides, as the search numbers them."""
    if eligible_T[0].excluded is None:  # then no tree has any
        return None
    parts, root = [], 0
    for tree, eligible in zip(search.trees, eligible_T, strict=True):
        if eligible.excluded is not None:
            for nodes_BX in (eligible.excluded.leaves_BX, eligible.excluded.inner_BX):
                parts.append(np.where(nodes_BX < 0, nodes_BX, nodes_BX + root))
        root += tree.node_count
    return np.concatenate(parts, axis=1) if parts else None


def _above_leaves(trace: tuple[LevelTrace, ...]) -> Frontier:
    """The frontier of a trace of every level but the root's."""
    if len(trace) > 1:
        return Frontier(trace[-2].nodes_BK, trace[-2].ranks_BK)
    root_B1 = np.zeros((len(trace[0].nodes_BK), 1), np.int64)
    return Frontier(root_B1, root_B1.astype(np.float32))
