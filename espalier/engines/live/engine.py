"""Any engine of one tree, with live items: `search(bundle + overlay)` equals `search(fold(bundle, overlay))`.

The wrapped engine searches the trained tree, with masks that leave parents open above eligible live leaves, and gives its beam on the level
above the leaves. One more pass scores the live leaves under it, and joins them to the trained ones: by key, then by (parent, slot), which
is the order of the leaves in a fold. The overlay is read once a call, so a call sees one sequence number.

Legend: B queries, M results, C live leaves under a query's beam, R handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.live.leaf_scores import LeafScorer, leaf_scorer
from espalier.engines.live.traces import with_live
from espalier.engines.live.visible import Visible, visible
from espalier.engines.reference_scores import ranks_of
from espalier.errors import InvalidQuery
from espalier.live.masks import of_handles
from espalier.live.overlay import Overlay
from espalier.queries import PADDING, HistoryKind, QueryBatch
from espalier.scores import scores_of_ranks
from espalier.search import NO_ITEM, Engine, SearchParams, SearchResult

Int64 = NDArray[np.int64]


class LiveSearch(Engine, Protocol):
    """An engine whose items come and go."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        ...


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
        self._overlay: Overlay | None = None

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
        self.inner.prepare(replace(params, frozen_B=None, frontier=self._overlay is not None, exclude_BE=exclude_BE))

    def close(self) -> None:
        self.inner.close()

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; from any thread."""
        self._overlay = overlay

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and the overlay."""
        overlay, batch = self._overlay, len(queries)
        if overlay is None or overlay.is_empty:
            return self.inner.search(queries, params)
        params.check(batch, overlay.items + overlay.handles, self._tree.node_count)
        seen = visible(self._tree, self._place, overlay, params)
        knobs = replace(params, mask_B=seen.mask_B, exclude_BE=seen.exclude_BE, frozen_B=None, frontier=True)
        own, knobs = self._encoded(overlay, queries, knobs, params.frozen_B)
        found = self.inner.search(own, knobs)
        return self._joined(overlay, queries, params, seen, found)

    # -- before the search ----------------------------------------------------------------------------------------------

    def _encoded(
        self, overlay: Overlay, queries: QueryBatch, params: SearchParams, frozen_B: NDArray[np.bool_] | None
    ) -> tuple[QueryBatch, SearchParams]:
        """Queries and parameters as the wrapped engine takes them: live items of histories are counted by their rows."""
        if not isinstance(queries.kind, HistoryKind):
            return queries, params
        highest = int(queries.array.max(initial=PADDING))
        if highest >= overlay.items + overlay.handles:
            raise InvalidQuery("queries", highest, f"item rows from 0 to {overlay.items + overlay.handles - 1}, or {PADDING} as padding")
        if highest >= overlay.items:
            return QueryBatch(queries.kind, np.where(queries.array >= overlay.items, PADDING, queries.array)), params
        return queries, params

    # -- after the search -----------------------------------------------------------------------------------------------

    def _joined(self, overlay: Overlay, queries: QueryBatch, params: SearchParams, seen: Visible, found: SearchResult) -> SearchResult:
        """The result with the live items in it."""
        tree = self._tree
        rows_BM, ranks_BM, keys_BM = found.item_rows_BM.copy(), found.ranks_BM.copy(), found.keys_BM.copy()
        finite_B = None if found.finite_B is None else found.finite_B.copy()
        count_B = found.count_B.copy()
        lives: list[_Live | None] = []
        for b, live_R in enumerate(seen.live_BR):
            live = None if live_R is None else self._live(overlay, queries, b, live_R, found)
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

    def _live(self, overlay: Overlay, queries: QueryBatch, b: int, live_R: NDArray[np.bool_], found: SearchResult) -> _Live | None:
        """The live leaves under a query's beam with their ranks; None where there are none."""
        leaves, frontier = overlay.trees[self._place], found.frontiers[0]
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
        present_C = np.isfinite(logits_C) & np.isfinite(ranks_C) & np.isfinite(keys_C)
        finite = bool(np.isfinite(logits_C).all())
        positions_C, ranks_C, keys_C = positions_C[present_C], ranks_C[present_C], keys_C[present_C]
        handle_C = leaves.handle_X[positions_C]
        return _Live(overlay.item_R[handle_C], ranks_C, keys_C, leaves.parent_X[positions_C], leaves.slot_X[positions_C], handle_C, finite)


class _Live(NamedTuple):
    """Live leaves that a query scored; those whose key is not finite are left out. finite: whether all logits were."""

    rows_C: Int64
    ranks_C: NDArray[np.float32]
    keys_C: NDArray[np.float32]
    parent_C: Int64
    slot_C: Int64
    handle_C: Int64
    finite: bool
