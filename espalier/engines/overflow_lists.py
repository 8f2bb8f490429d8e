"""The overflow lists of a bundle's trees: live leaves, hung under the nodes of the level above the leaves.

What a fold would make children of those nodes is scored under the beams that a search kept, and joins what it found. The same for every
engine, and for a router, whose shards say which nodes their beams kept.

Legend: B queries, T trees, M results, K beam, C live leaves that a query scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.overflow import NO_MEMORY, ScoredLive, joined
from espalier.engines.overflow_graph import GraphLeaves
from espalier.engines.overflow_linear import LinearLeaves
from espalier.engines.stages import Frontier, Leaves, TreeQuery
from espalier.live.overlay import HANDLE, LiveLeaves, Overlay
from espalier.manifest import LinearScorer
from espalier.memory_lists import LiveEntries, MemoryTree
from espalier.read_only import read_only
from espalier.search import LevelTrace

Int64 = NDArray[np.int64]
Floats = NDArray[np.float32]


class LeafScorer(Protocol):
    """Scores live leaves."""

    def scored(
        self,
        leaves: LiveLeaves,
        query: TreeQuery,
        frontier: Frontier,
        states_BS: Floats | None,
        live_BR: Sequence[NDArray[np.bool_] | None],
    ) -> ScoredLive:
        """The eligible live leaves under each query's beam.

        states_BS  the queries' states on the leaf level, of scorers that are graphs
        live_BR    see `EligibleNodes`. Queries of one mask share an array
        """
        ...


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
        self._scorers: list[LeafScorer] = []

    def open(self) -> None:
        """Read what live leaves are scored by, before the first search with them."""
        if not self._scorers:
            manifest = self._bundle.manifest
            if isinstance(manifest.scorer, LinearScorer):
                self._scorers = [LinearLeaves(manifest.ranking, manifest.scorer.features) for _ in self._nodes_T]
            else:
                self._scorers = [GraphLeaves(self._bundle)]

    def scored(self, overlay: Overlay, query: TreeQuery, leaves: Leaves) -> list[ScoredLive]:
        """The live leaves under the beams of a search, in each tree; none where nothing hangs there."""
        if not len(overlay.trees[0]):
            return []
        states_BS = leaves.leaf_states_BS
        if states_BS is None and query.states_BLS is not None:
            states_BS = query.states_BLS[:, -1]
        return [
            scorer.scored(own, query, frontier, states_BS, eligible.live_BR)
            for scorer, own, frontier, eligible in zip(self._scorers, overlay.trees, leaves.frontiers, query.eligible_T, strict=True)
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
    count_B = np.diff(scored.begin_B)
    batch, most = len(count_B), int(count_B.max(initial=0))
    keys_C = scored.ranks_C if keys_C is None else keys_C
    nodes_BC, ranks_BC, keys_BC = np.full((batch, most), -1), np.full((batch, most), -np.inf, np.float32), None
    keys_BC = ranks_BC.copy()
    for b, own in enumerate(scored.spans):
        handle_C = np.where(np.isfinite(keys_C[own]), leaves.column(HANDLE, scored.entry_C[own]), -1)
        order = np.argsort(handle_C)[np.count_nonzero(handle_C < 0) :]
        nodes_BC[b, : len(order)] = nodes + handle_C[order]
        ranks_BC[b, : len(order)], keys_BC[b, : len(order)] = scored.ranks_C[own][order], keys_C[own][order]
    candidates_BC = np.concatenate([last.candidates_BC, nodes_BC], axis=1)
    candidate_ranks_BC = np.concatenate([last.candidate_ranks_BC, ranks_BC], axis=1)
    candidate_keys_BC = np.concatenate([last.candidate_keys_BC, keys_BC], axis=1)
    if m_B is None:
        m_B = np.full(batch, candidates_BC.shape[1])
    width = min(int(m_B.max(initial=0)), candidates_BC.shape[1])
    kept = [np.full((batch, width), filler, array.dtype) for filler, array in ((-1, nodes_BC), (-np.inf, ranks_BC), (-np.inf, keys_BC))]
    for b in range(batch):
        best = np.argsort(-candidate_keys_BC[b], kind="stable")[: m_B[b]]
        best = np.sort(best[candidate_keys_BC[b, best] > -np.inf])
        for array, source in zip(kept, (candidates_BC, candidate_ranks_BC, candidate_keys_BC), strict=True):
            array[b, : len(best)] = source[b, best]
    return replace(
        last,
        nodes_BK=kept[0],
        ranks_BK=kept[1],
        keys_BK=kept[2],
        candidates_BC=candidates_BC,
        candidate_ranks_BC=candidate_ranks_BC,
        candidate_keys_BC=candidate_keys_BC,
    )
