"""The overflow lists of a bundle's trees: live leaves, listed under their parents on the level above the leaves.

After a search, the live leaves under the nodes of its beam are scored and merged with the trained leaves. Every engine uses this code, and
so does a router: its shards return the nodes of their beams.

Legend: B queries, T trees, M results, K beam, C live leaves that a query scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.overflow import NO_MEMORY, ScoredLive, joined
from espalier.engines.overflow_graph import GraphLeaves
from espalier.engines.overflow_linear import LinearLeaves
from espalier.engines.results import stacked_levels
from espalier.engines.stages import Leaves, TreeQuery
from espalier.live.overlay import HANDLE, LiveLeaves, Overlay
from espalier.manifest import LinearScorer
from espalier.memory_lists import LiveEntries, MemoryTree
from espalier.read_only import read_only
from espalier.search import LevelTrace

Int64 = NDArray[np.int64]
Floats = NDArray[np.float32]


class BestLeaves(NamedTuple):
    """The best leaves of one tree, best first: item rows, ranks and keys [B, M], and how many leaves each query has."""

    rows_BM: Int64
    ranks_BM: Floats
    keys_BM: Floats
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
    ) -> tuple[BestLeaves, Floats]:
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
        keys_C: Floats | None,
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
    nodes: int, last: LevelTrace, leaves: LiveLeaves, scored: ScoredLive, m_B: Int64 | None, keys_C: Floats | None
) -> LevelTrace:
    """The last level with its live leaves, numbered N + handle, after the trained leaves; the best m of all are kept."""
    live_keys_C = scored.ranks_C if keys_C is None else keys_C
    levels = []
    for b, span in enumerate(scored.spans):
        live = span.start + np.flatnonzero(np.isfinite(live_keys_C[span]))
        live = live[np.argsort(leaves.column(HANDLE, scored.entry_C[live]))]
        nodes_C = np.append(last.candidates_BC[b], nodes + leaves.column(HANDLE, scored.entry_C[live]))
        ranks_C = np.append(last.candidate_ranks_BC[b], scored.ranks_C[live])
        keys_C = np.append(last.candidate_keys_BC[b], live_keys_C[live])
        best = np.argsort(-keys_C, kind="stable")[: None if m_B is None else m_B[b]]
        best = np.sort(best[keys_C[best] > -np.inf])
        kept, candidates = (nodes_C[None, best], ranks_C[None, best]), (nodes_C[None], ranks_C[None])
        levels.append(LevelTrace(last.level, *kept, *candidates, keys_C[None, best], keys_C[None]))
    return stacked_levels(last.level, levels)
