"""The overflow lists of a bundle's trees: live leaves, hung under the nodes of the level above the leaves.

What a fold would make children of those nodes is scored under the beams that a search kept, and joins what it found. The same for every
engine, and for a router, whose shards say which nodes their beams kept.

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
    """What a search of one tree found, best first: item rows and numbers [B, M], and how many each query has."""

    rows_BM: Int64
    ranks_BM: Floats
    keys_BM: Floats
    count_B: Int64


class OverflowLists:
    """Those of one bundle, whose snapshots come and go. Any number of threads may call it."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        tree, info = bundle.tree, bundle.manifest.memory
        self._nodes_T = [alone.tree.node_count for alone in bundle.alone]
        self._tree = read_only(tree.leaf_of_item, tree.parent, tree.first_child)
        self._key_weight = np.float32(0 if info is None else info.weight)
        self._scorer: GraphLeaves | LinearLeaves | None = None

    def open(self) -> None:
        """Read what live leaves are scored by, before the first search with them."""
        if self._scorer is None:
            scorer, ranking = self._bundle.manifest.scorer, self._bundle.manifest.ranking
            self._scorer = LinearLeaves(ranking, scorer.features) if isinstance(scorer, LinearScorer) else GraphLeaves(self._bundle)

    def scored(self, overlay: Overlay, query: TreeQuery, leaves: Leaves) -> list[ScoredLive]:
        """The live leaves under the beams of a search, in each tree; none where nothing hangs there."""
        if self._scorer is None or not len(overlay.trees[0]):
            return []
        states_BS = query.leaf_states(leaves)
        return [
            self._scorer.scored(own, query.queries, frontier, states_BS, eligible.live_BR)
            for own, frontier, eligible in zip(overlay.trees, leaves.frontiers, query.eligible_T, strict=True)
        ]

    def join(
        self, overlay: Overlay, query: TreeQuery, found: BestLeaves, scored: ScoredLive, memory: tuple[MemoryTree, LiveEntries] | None
    ) -> tuple[BestLeaves, Floats]:
        """The best m of what a tree and its overflow lists have, and the keys of all live leaves, float32[C]."""
        if not len(scored.entry_C):
            return found, scored.ranks_C
        of_leaves = overlay.trees[0].entries.rows, *read_only(overlay.item_R)
        of_scored = read_only(scored.begin_B, scored.entry_C, scored.ranks_C)
        given = read_only(*found), of_scored, of_leaves, self._tree, *read_only(query.m_B)
        if memory is None:
            *new, keys_C = joined(*given, NO_MEMORY)
        else:
            (tree, live), (history_BT,) = memory, read_only(np.asarray(query.queries.array, np.int64))
            with tree.sums.of(overlay.handles) as sums:
                *new, keys_C = joined(*given, (self._key_weight, history_BT, tree.trained, live.memory, *sums))
        return BestLeaves(*new), keys_C

    def with_traces(
        self,
        overlay: Overlay,
        traces: tuple[tuple[LevelTrace, ...], ...],
        scored_T: Sequence[ScoredLive],
        m_B: Int64 | None,
        keys_C: Floats | None,
    ) -> tuple[tuple[LevelTrace, ...], ...]:
        """Traces whose last levels have the live leaves that were scored.

        m_B     how many leaves are kept; None: all
        keys_C  what those of the only tree were ordered by; None: their ranks
        """
        return tuple(
            (*trace[:-1], _with_live(nodes, trace[-1], overlay.trees[place], scored_T[place], m_B, keys_C))
            for place, (trace, nodes) in enumerate(zip(traces, self._nodes_T, strict=False))
        )


def _with_live(
    nodes: int, last: LevelTrace, leaves: LiveLeaves, scored: ScoredLive, m_B: Int64 | None, keys_C: Floats | None
) -> LevelTrace:
    """The last level with the live leaves, as nodes N + handle behind the trained ones; the best m of both are kept."""
    live_keys_C = scored.ranks_C if keys_C is None else keys_C
    levels = []
    for b, own in enumerate(scored.spans):
        live = own.start + np.flatnonzero(np.isfinite(live_keys_C[own]))
        live = live[np.argsort(leaves.column(HANDLE, scored.entry_C[live]))]
        nodes_C = np.append(last.candidates_BC[b], nodes + leaves.column(HANDLE, scored.entry_C[live]))
        ranks_C = np.append(last.candidate_ranks_BC[b], scored.ranks_C[live])
        keys_C = np.append(last.candidate_keys_BC[b], live_keys_C[live])
        best = np.argsort(-keys_C, kind="stable")[: None if m_B is None else m_B[b]]
        best = np.sort(best[keys_C[best] > -np.inf])
        kept, candidates = (nodes_C[None, best], ranks_C[None, best]), (nodes_C[None], ranks_C[None])
        levels.append(LevelTrace(last.level, *kept, *candidates, keys_C[None, best], keys_C[None]))
    return stacked_levels(last.level, levels)
