"""`sparse-cpu`: bundles of linear node scorers, searched by compiled loops over their chunks.

Knows masks, exclusions, traces and frontiers. Does not know how a level is scored and pruned: see `chunk_search.py`.

Legend: B queries, T trees, X excluded nodes, N nodes, M results, K beam, H levels below the root.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.engines.linear.chunk_search import BeamParams, ChunkResults, ChunkSearch
from espalier.engines.stages import Leaves, TreeQuery, TreeSearch
from espalier.masks.eligibility import EligibleNodes
from espalier.search import Frontier, LevelTrace, NodeMask


class SparseSearch(TreeSearch):
    """See the module. `rounding` bounds differences of ranks whose float32 sums have another order, for logits of a few units."""

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
        """See `TreeSearch`. Raises InvalidQuery as `ChunkSearch.search` does."""
        is_forest = len(self._trees) > 1
        m_B = np.zeros(len(query), np.int64) if is_forest else query.m_B  # 0: all leaves that are scored
        results: list[ChunkResults] = []
        for t, search in enumerate(self._searches):
            is_joint = len(search.trees) > 1
            eligible_T = query.eligible_T if is_joint else query.eligible_T[t : t + 1]
            params = BeamParams(query.beam_size_B, m_B, self._groups(eligible_T[0], is_joint), _excluded(search, eligible_T))
            results.append(search.search(query.queries.features, params, query.trace, query.frontier))
        return self._leaves(query, results)

    def _groups(self, eligible: EligibleNodes, is_joint: bool) -> list[tuple[Int64, Bool | None]] | None:
        """The groups of `BeamParams`. is_joint: the nodes of all trees are numbered one after the other."""
        groups = [
            (members, self._joint_mask(mask) if is_joint else None if mask is None else mask.eligible_N)
            for members, mask in eligible.groups
        ]
        return None if all(eligible_N is None for _, eligible_N in groups) else groups

    def _joint_mask(self, first: NodeMask | None) -> Bool | None:
        """One mask over the nodes of all trees. The first tree's mask knows the other trees' masks, unless the query has no filter."""
        return first.every_tree_N if first is not None and first.others else self._every_N

    def _leaves(self, query: TreeQuery, results: list[ChunkResults]) -> Leaves:
        """The results of the searches by item, tree after tree. A padding leaf of −1 is clipped to the root, which holds no item."""
        batch, trees = len(query), len(self._trees)
        if len(results) == 1:
            leaves_BM, ranks_BM, count_B, *_ = results[0]
            shape = batch, trees, leaves_BM.shape[1]
            rows_BTM, ranks_BTM = self._item_N[0].take(leaves_BM, mode="clip").reshape(shape), ranks_BM.reshape(shape)
            count_BT = count_B.reshape(batch, trees)
        else:
            rows = [item_N.take(result.leaves_BM, mode="clip") for item_N, result in zip(self._item_N, results, strict=True)]
            width = max(rows_BM.shape[1] for rows_BM in rows)
            rows_BTM, ranks_BTM = np.full((batch, trees, width), -1, np.int64), np.full((batch, trees, width), -np.inf, np.float32)
            for t, (rows_BM, result) in enumerate(zip(rows, results, strict=True)):
                rows_BTM[:, t, : rows_BM.shape[1]], ranks_BTM[:, t, : rows_BM.shape[1]] = rows_BM, result.ranks_BM
            count_BT = np.stack([result.count_B for result in results], axis=1)
        traces = tuple(self._trace(results, t) for t in range(trees)) if query.trace else ()
        frontiers: tuple[Frontier, ...] = ()
        if query.frontier and query.trace:
            frontiers = tuple(map(_above_leaves, traces))
        elif query.frontier:
            frontiers = tuple(self._frontier(results, t) for t in range(trees))
        return Leaves(rows_BTM, ranks_BTM, ranks_BTM, count_BT, traces=traces, frontiers=frontiers)

    def _of_tree(self, results: list[ChunkResults], t: int) -> tuple[ChunkResults, slice, int]:
        """The results that hold a tree's, the tree's rows in them, and the number of its root."""
        if len(results) > 1:
            return results[t], slice(None), 0
        return results[0], slice(t, None, len(self._trees)), sum(tree.node_count for tree in self._trees[:t])

    def _frontier(self, results: list[ChunkResults], t: int) -> Frontier:
        result, rows, root = self._of_tree(results, t)
        if result.frontier is None:
            raise ValueError("a search without its frontier")
        return Frontier(_numbers(result.frontier.nodes_BK[rows], root), result.frontier.ranks_BK[rows])

    def _trace(self, results: list[ChunkResults], t: int) -> tuple[LevelTrace, ...]:
        """Every level of a tree: with γ > 0 all are scored."""
        result, rows, root = self._of_tree(results, t)
        levels = []
        for h in range(self._trees[t].height):
            candidates_1C, ranks_1C, kept_1K, kept_ranks_1K = (array[rows, h] for array in result.trace)
            count, kept_count = np.count_nonzero(candidates_1C >= 0), np.count_nonzero(kept_1K >= 0)
            candidates_1C, ranks_1C = _numbers(candidates_1C[:, :count], root), ranks_1C[:, :count].copy()
            kept_1K, kept_ranks_1K = _numbers(kept_1K[:, :kept_count], root), kept_ranks_1K[:, :kept_count].copy()
            levels.append(LevelTrace(h + 1, kept_1K, kept_ranks_1K, candidates_1C, ranks_1C, kept_ranks_1K, ranks_1C))
        return tuple(levels)


def _numbers(nodes: Int64, root: int) -> Int64:
    """Node numbers within a tree, from numbers in which its root is `root`."""
    return np.where(nodes < 0, nodes, nodes - root)


def _excluded(search: ChunkSearch, eligible_T: tuple[EligibleNodes, ...]) -> Int64 | None:
    """int64[B, X]: the nodes that queries exclude, as the search numbers them."""
    if eligible_T[0].excluded is None:  # then no tree has any
        return None
    arrays, root = [], 0
    for tree, eligible in zip(search.trees, eligible_T, strict=True):
        if eligible.excluded is not None:
            for nodes_BX in (eligible.excluded.leaves_BX, eligible.excluded.inner_BX):
                arrays.append(np.where(nodes_BX < 0, nodes_BX, nodes_BX + root))
        root += tree.node_count
    return np.concatenate(arrays, axis=1) if arrays else None


def _above_leaves(trace: tuple[LevelTrace, ...]) -> Frontier:
    """The frontier, from a trace of all levels below the root."""
    if len(trace) > 1:
        return Frontier(trace[-2].nodes_BK, trace[-2].ranks_BK)
    root_B1 = np.zeros((len(trace[0].nodes_BK), 1), np.int64)
    return Frontier(root_B1, root_B1.astype(np.float32))
