"""The overflow lists of a bundle's trees: live leaves, listed under their parents on the level above the leaves.

After a search, the live leaves under the nodes of its beam are scored (`overflow_scores.py`) and merged with the trained leaves. Every
engine uses this code, and so does a router: its shards return the nodes of their beams. The merge orders leaves by key, then by (parent,
slot), which is the order of leaves after a fold. So the answer is that of the folded bundle.

Legend: B queries, T trees, M results, C live leaves that a query scored, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Float32, Int64, read_only
from espalier.bundle import Bundle
from espalier.compiled_code import compiled
from espalier.engines.best_nodes import best_first
from espalier.engines.overflow_scores import LARGEST, GraphLeaves, LinearLeaves, ScoredLive
from espalier.engines.stages import Leaves, TreeQuery, stacked_levels
from espalier.entry_lists import KEY, OTHER_KEY
from espalier.live.overlay import HANDLE, SLOT, LiveLeaves, Overlay
from espalier.manifest import LinearScorer
from espalier.memory import NO_REPEAT
from espalier.memory_lists import NO_LIVE_ITEMS, LiveEntries, MemoryTree
from espalier.memory_sums import of_leaves
from espalier.search import LevelTrace

_NO_ROWS = np.empty(0, np.int64)
_NO_TRAINED = read_only(_NO_ROWS, np.empty(0, np.int32), np.empty(0, np.int16), np.empty(0, np.float32), NO_REPEAT, _NO_ROWS)
NO_MEMORY = np.float32(0), *read_only(np.empty((0, 0), np.int64)), _NO_TRAINED, NO_LIVE_ITEMS.memory, np.empty(0), np.empty(0)
"""The argument `memory` of `joined` for a bundle without a memory."""


class BestLeaves(NamedTuple):
    """The best leaves of one tree, best first: item rows, ranks and keys [B, M], and how many leaves each query has."""

    rows_BM: Int64
    ranks_BM: Float32
    keys_BM: Float32
    count_B: Int64


class OverflowLists:
    """The overflow lists of one bundle; each call brings its snapshot. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        tree, info = bundle.tree, bundle.manifest.memory
        self._nodes_T = [alone.tree.node_count for alone in bundle.alone]
        self._tree = read_only(tree.leaf_of_item, tree.parent, tree.first_child)
        self._key_weight = np.float32(0 if info is None else info.weight)
        self._scorer: GraphLeaves | LinearLeaves | None = None

    def open(self) -> None:
        """Load the scorer of live leaves, before the first search with live items."""
        if self._scorer is None:
            scorer, ranking = self._bundle.manifest.scorer, self._bundle.manifest.ranking
            self._scorer = LinearLeaves(ranking, scorer.features) if isinstance(scorer, LinearScorer) else GraphLeaves(self._bundle)

    def scored(self, overlay: Overlay, query: TreeQuery, leaves: Leaves) -> list[ScoredLive]:
        """The scored live leaves under the beams of a search, in each tree; an empty list if there are no live leaves."""
        if self._scorer is None or not len(overlay.trees[0]):
            return []
        states_BS = query.leaf_states(leaves)
        return [
            self._scorer.scored(live_leaves, query.queries, frontier, states_BS, eligible.live_BR)
            for live_leaves, frontier, eligible in zip(overlay.trees, leaves.frontiers, query.eligible_T, strict=True)
        ]

    def join(
        self, overlay: Overlay, query: TreeQuery, best_leaves: BestLeaves, scored: ScoredLive, memory: tuple[MemoryTree, LiveEntries] | None
    ) -> tuple[BestLeaves, Float32]:
        """The best m of a tree's leaves and the live leaves of its overflow lists; and the keys of all live leaves, float32[C]."""
        if not len(scored.entry_C):
            return best_leaves, scored.ranks_C
        of_leaves = overlay.trees[0].entries.rows, *read_only(overlay.item_R)
        of_scored = read_only(scored.begin_B, scored.entry_C, scored.ranks_C)
        arguments = read_only(*best_leaves), of_scored, of_leaves, self._tree, *read_only(query.m_B)
        if memory is None:
            *merged, keys_C = joined(*arguments, NO_MEMORY)
        else:
            (tree, live), (history_BT,) = memory, read_only(np.asarray(query.queries.array, np.int64))
            with tree.sums.of(overlay.handles) as sums:
                *merged, keys_C = joined(*arguments, (self._key_weight, history_BT, tree.trained, live.memory, *sums))
        return BestLeaves(*merged), keys_C

    def with_traces(
        self,
        overlay: Overlay,
        traces: tuple[tuple[LevelTrace, ...], ...],
        scored_T: Sequence[ScoredLive],
        m_B: Int64 | None,
        keys_C: Float32 | None,
    ) -> tuple[tuple[LevelTrace, ...], ...]:
        """Traces with the scored live leaves on their last levels.

        m_B     how many leaves are kept; None: all
        keys_C  the keys of the live leaves of a single tree; None: their ranks are their keys
        """
        return tuple(
            (*trace[:-1], _with_live(nodes, trace[-1], overlay.trees[t], scored_T[t], m_B, keys_C))
            for t, (trace, nodes) in enumerate(zip(traces, self._nodes_T, strict=False))
        )


def _with_live(
    nodes: int, last: LevelTrace, leaves: LiveLeaves, scored: ScoredLive, m_B: Int64 | None, keys_C: Float32 | None
) -> LevelTrace:
    """The last level with its live leaves, numbered N + handle, after the trained leaves; the best m of all are kept."""
    live_keys_C = scored.ranks_C if keys_C is None else keys_C
    levels = []
    for b, (begin, end) in enumerate(pairwise(scored.begin_B.tolist())):
        live = begin + np.flatnonzero(np.isfinite(live_keys_C[begin:end]))
        live = live[np.argsort(leaves.column(HANDLE, scored.entry_C[live]))]
        nodes_C = np.append(last.candidates_BC[b], nodes + leaves.column(HANDLE, scored.entry_C[live]))
        ranks_C = np.append(last.candidate_ranks_BC[b], scored.ranks_C[live])
        keys_C = np.append(last.candidate_keys_BC[b], live_keys_C[live])
        best = np.argsort(-keys_C, kind="stable")[: None if m_B is None else m_B[b]]
        best = np.sort(best[keys_C[best] > -np.inf])
        kept, candidates = (nodes_C[None, best], ranks_C[None, best]), (nodes_C[None], ranks_C[None])
        levels.append(LevelTrace(last.level, *kept, *candidates, keys_C[None, best], keys_C[None]))
    return stacked_levels(last.level, levels)


@compiled()
def in_fold_order(order: Array, keys: Array, entry_C: Array, rows: Array) -> None:
    """Order leaves of equal keys as a fold does, the lower (parent, slot) first; the leaves are already ordered by key."""
    begin, count = 0, len(order)
    while begin < count:
        end = begin + 1
        while end < count and keys[order[end]] == keys[order[begin]]:
            end += 1
        if end - begin > 1:
            run = order[begin:end].copy()
            for column in (SLOT, KEY):
                run = run[best_first(-rows[entry_C[run], column], len(run))]
            order[begin:end] = run
        begin = end


@compiled()
def joined(trained_leaves: Any, scored: Any, leaves: Any, tree: Any, m_B: Array, memory: Any) -> tuple[Array, Array, Array, Array, Array]:
    """The best m of trained and live leaves, best first: item rows int64[B, M], ranks and keys float32[B, M], their number int64[B]; and
    the keys of all live leaves, float32[C], also of those whose keys are not finite, which cannot be results.

    trained_leaves  item_rows_BM, ranks_BM, keys_BM, count_B of the trained tree
    scored          begin_B, entry_C, ranks_C
    leaves          the rows of the entries of live leaves, and item_R
    tree            leaf_of_item, parent, first_child
    memory          λ, 0 without a memory; history_BT; trained, live, sum_L, sum_R of `of_leaves`
    Of equal keys the lower (parent, slot) comes first.
    """
    rows_BM, ranks_BM, keys_BM, count_B = trained_leaves
    begin_B, entry_C, ranks_C = scored
    rows, item_R = leaves
    leaf_of_item, parent_N, first_child = tree
    key_weight, history_BT, memory_entries, live_entries, sum_L, sum_R = memory
    keys_C, row_C = ranks_C, np.empty(len(entry_C), np.int64)
    for c in range(len(entry_C)):
        row_C[c] = item_R[rows[entry_C[c], OTHER_KEY]]
    if key_weight > 0:
        leaf_offset = len(parent_N) - len(sum_L)
        sums = memory_entries, live_entries, leaf_of_item, leaf_offset, sum_L, sum_R
        keys_C = ranks_C + key_weight * of_leaves(history_BT, begin_B, row_C, *sums)
    new_rows_BM, new_count_B = np.full(rows_BM.shape, -1, np.int64), count_B.copy()
    new_ranks_BM, new_keys_BM = np.full(rows_BM.shape, -np.inf, np.float32), np.full(rows_BM.shape, -np.inf, np.float32)
    best_C = np.empty(len(keys_C), np.int64)
    for b in range(len(m_B)):
        lowest = keys_BM[b, m_B[b] - 1] if 0 < m_B[b] == count_B[b] else np.float32(-np.inf)
        live_count, i, j, count = 0, 0, 0, 0
        for c in range(begin_B[b], begin_B[b + 1]):
            if abs(keys_C[c]) <= LARGEST and keys_C[c] >= lowest:
                best_C[live_count] = c
                live_count += 1
        order = best_first(keys_C[best_C[:live_count]], live_count)
        in_fold_order(order, keys_C[best_C[:live_count]], entry_C[best_C[:live_count]], rows)
        while count < m_B[b] and (i < count_B[b] or j < live_count):
            is_live_next = i == count_B[b]
            if not is_live_next and j < live_count:
                c = best_C[order[j]]
                is_live_next = keys_C[c] > keys_BM[b, i]
                if keys_C[c] == keys_BM[b, i]:
                    leaf, x = leaf_of_item[rows_BM[b, i]], entry_C[c]
                    p = parent_N[leaf]
                    is_live_next = rows[x, KEY] < p or (rows[x, KEY] == p and rows[x, SLOT] < leaf - first_child[p])
            if is_live_next:
                c = best_C[order[j]]
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = row_C[c], ranks_C[c], keys_C[c]
                j += 1
            else:
                new_rows_BM[b, count], new_ranks_BM[b, count], new_keys_BM[b, count] = rows_BM[b, i], ranks_BM[b, i], keys_BM[b, i]
                i += 1
            count += 1
        new_count_B[b] = count
    return new_rows_BM, new_ranks_BM, new_keys_BM, new_count_B, keys_C
