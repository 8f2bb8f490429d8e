"""Any engine of one tree, with live items: `search(bundle + overlay)` equals `search(fold(bundle, overlay))`.

The wrapped engine searches the trained tree, with masks that leave parents open above eligible live leaves, and gives its beam on the level
above the leaves. One more pass scores the live leaves under it, and joins them to the trained ones: by key, then by (parent, slot), which
is the order of the leaves in a fold. The overlay is read once a call, so a call sees one sequence number.

Legend: B queries, M results, C live leaves under a query's beam, R handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.live.encoder import LiveEncoder, opened_encoder
from espalier.engines.live.histories import histories_of
from espalier.engines.live.leaf_scores import LeafScorer, leaf_scorer
from espalier.engines.live.parts import Part, together
from espalier.engines.live.traces import with_live
from espalier.engines.live.visible import Visible, visible
from espalier.engines.reference_scores import ranks_of
from espalier.live.masks import of_handles
from espalier.live.memory import LiveMemoryTree
from espalier.live.overlay import Overlay
from espalier.queries import HistoryKind, QueryBatch
from espalier.scores import scores_of_ranks
from espalier.search import NO_ITEM, Engine, SearchParams, SearchResult

if TYPE_CHECKING:
    from espalier.memory_lists import MemoryLookup

Int64 = NDArray[np.int64]


class LiveSearch(Engine, Protocol):
    """An engine whose items come and go."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        ...


class Now(NamedTuple):
    """What is live, and the memory with it; None where the bundle has none."""

    overlay: Overlay
    memory: LiveMemoryTree | None


class Remembering(Engine, Protocol):
    """An engine of a bundle with a memory, which may be replaced between searches."""

    memory_tree: MemoryLookup | None


class LiveEngine:
    """See the module. Its name and rounding are those of the engine that it wraps.

    bundle  of one tree
    inner   opened on it
    place   which tree of a forest it is, from 0
    """

    def __init__(self, bundle: Bundle, inner: Engine, place: int = 0) -> None:
        self.bundle, self.inner, self._place = bundle, inner, place
        self._tree, self._ranking = bundle.tree, bundle.manifest.ranking
        self._scorer: LeafScorer = leaf_scorer(bundle)
        self._memory = bundle.memory if bundle.manifest.memory is not None else None
        self._key_weight = np.float32(0 if self._memory is None else self._memory.key_weight)
        self._trained_memory = None if self._memory is None else cast(Remembering, inner).memory_tree
        self._encoder: LiveEncoder | None = None
        self._is_encoder_open = False
        self._now: Now | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def rounding(self) -> float:
        return self.inner.rounding

    def warm_up(self) -> None:
        self.inner.warm_up()

    def prepare(self, params: SearchParams) -> None:
        exclude_BE = None if params.exclude_BE is None else np.where(params.exclude_BE < self._tree.item_count, params.exclude_BE, NO_ITEM)
        self.inner.prepare(replace(params, frozen_B=None, frontier=self._now is not None, exclude_BE=exclude_BE))

    def close(self) -> None:
        self.inner.close()

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; from any thread."""
        if overlay is None or overlay.is_empty:
            self._now = None
            return
        if not self._is_encoder_open and isinstance(self.bundle.manifest.query, HistoryKind):
            self._encoder, self._is_encoder_open = opened_encoder(self.bundle), True
        memory = None if self._memory is None else LiveMemoryTree(self._memory, self._tree, overlay)
        self._now = Now(overlay, memory)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and the overlay."""
        now, batch = self._now, len(queries)
        if now is None:
            return self.inner.search(queries, params)
        overlay = now.overlay
        params.check(batch, overlay.items + overlay.handles, self._tree.node_count)
        seen = visible(self._tree, self._place, overlay, params)
        knobs = replace(params, mask_B=seen.mask_B, exclude_BE=seen.exclude_BE, frozen_B=None, frontier=True)
        found, queries = self._found(now, queries, knobs, params.frozen_B)
        return self._joined(now, queries, params, seen, found)

    # -- before the search ----------------------------------------------------------------------------------------------

    def _found(
        self, now: Now, queries: QueryBatch, params: SearchParams, frozen_B: NDArray[np.bool_] | None
    ) -> tuple[SearchResult, QueryBatch]:
        """What the wrapped engine finds, and the queries without items that are unknown to them."""
        batch = len(queries)
        if not isinstance(queries.kind, HistoryKind):
            return self.inner.search(queries, params), queries
        histories = histories_of(now.overlay, np.asarray(queries.array, np.int64), frozen_B, self._encoder is not None)
        queries = QueryBatch(queries.kind, histories.rows_BT)
        parts = []
        for members, is_live, is_frozen in histories.groups(apart=self._memory is not None):
            own, knobs = (queries, params) if len(members) == batch else (queries.take(members), params.take(members))
            if is_live and self._encoder is not None:
                leaves = now.overlay.trees[self._place]
                states_BLS = self._encoder.states(leaves, histories.rows_BT[members], histories.handles_BT[members])
                knobs = replace(knobs, states_BLS=states_BLS)
            parts.append(Part(members, self._remembering(self._trained_memory if is_frozen else now.memory, own, knobs)))
        return together(batch, int(params.m_B.max(initial=0)), parts), queries

    def _remembering(self, memory: MemoryLookup | None, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """A search of the wrapped engine with a memory in place of its own."""
        if self._memory is None:
            return self.inner.search(queries, params)
        inner = cast(Remembering, self.inner)
        try:
            inner.memory_tree = memory
            return inner.search(queries, params)
        finally:
            inner.memory_tree = self._trained_memory

    # -- after the search -----------------------------------------------------------------------------------------------

    def _joined(self, now: Now, queries: QueryBatch, params: SearchParams, seen: Visible, found: SearchResult) -> SearchResult:
        """The result with the live items in it."""
        tree = self._tree
        rows_BM, ranks_BM, keys_BM = found.item_rows_BM.copy(), found.ranks_BM.copy(), found.keys_BM.copy()
        finite_B = None if found.finite_B is None else found.finite_B.copy()
        count_B = found.count_B.copy()
        lives: list[_Live | None] = []
        for b, live_R in enumerate(seen.live_BR):
            live = None if live_R is None else self._live(now, queries, b, live_R, found)
            lives.append(live)
            if live is None:
                continue
            if finite_B is not None and not live.finite:
                finite_B[b] = False
            rows = found.item_rows_BM[b, : found.count_B[b]]
            leaf = tree.leaf_of_item[rows]
            parent = np.concatenate([tree.parent[leaf], live.parent_C])
            slot = np.concatenate([leaf - tree.first_child[tree.parent[leaf]], live.slot_C])
            keys = np.concatenate([found.keys_BM[b, : len(rows)], live.keys_C])
            order = np.lexsort((slot, parent, -keys))[: params.m_B[b]]
            count = count_B[b] = len(order)
            rows_BM[b, :count] = np.concatenate([rows, live.rows_C])[order]
            ranks_BM[b, :count] = np.concatenate([found.ranks_BM[b, : len(rows)], live.ranks_C])[order]
            keys_BM[b, :count] = keys[order]
        trace = None
        if found.trace is not None:
            *above, last = found.trace
            trace = (*above, with_live(tree.node_count, last, lives, params.m_B))
        return replace(
            found,
            item_rows_BM=rows_BM,
            scores_BM=scores_of_ranks(self.bundle.manifest.result_ranking, keys_BM),
            ranks_BM=ranks_BM,
            keys_BM=keys_BM,
            count_B=count_B,
            complete_B=count_B >= np.minimum(params.m_B, seen.eligible_B),
            trace=trace,
            finite_B=finite_B,
        )

    def _live(self, now: Now, queries: QueryBatch, b: int, live_R: NDArray[np.bool_], found: SearchResult) -> _Live | None:
        """The live leaves under a query's beam with their ranks; None where there are none."""
        leaves, frontier = now.overlay.trees[self._place], found.frontiers[0]
        kept_K = frontier.nodes_BK[b]
        kept_K = kept_K[kept_K >= 0]
        positions_C, of_C = leaves.under(kept_K)
        eligible_C = of_handles(live_R, leaves.handle_X[positions_C])
        positions_C, of_C = positions_C[eligible_C], of_C[eligible_C]
        if not len(positions_C):
            return None
        state_S = None if frontier.states_BS is None else frontier.states_BS[b]
        logits_C = self._scorer.logits(leaves, positions_C, queries, b, state_S)
        ranks_C = ranks_of(self._ranking, logits_C, frontier.ranks_BK[b][of_C])
        keys_C = ranks_C
        if now.memory is not None:
            with np.errstate(over="ignore"):
                keys_C = ranks_C + self._key_weight * now.memory.of_live_leaves(queries.array[b], leaves.handle_X[positions_C])
        present_C = np.isfinite(logits_C) & np.isfinite(ranks_C) & np.isfinite(keys_C)
        finite = bool(np.isfinite(logits_C).all())
        positions_C, ranks_C, keys_C = positions_C[present_C], ranks_C[present_C], keys_C[present_C]
        handle_C = leaves.handle_X[positions_C]
        rows_C = now.overlay.item_R[handle_C]
        return _Live(rows_C, ranks_C, keys_C, leaves.parent_X[positions_C], leaves.slot_X[positions_C], handle_C, finite)


class _Live(NamedTuple):
    """Live leaves that a query scored; those whose key is not finite are left out. finite: whether all logits were."""

    rows_C: Int64
    ranks_C: NDArray[np.float32]
    keys_C: NDArray[np.float32]
    parent_C: Int64
    slot_C: Int64
    handle_C: Int64
    finite: bool
