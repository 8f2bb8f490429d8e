"""Any engine of one tree, with live items: `search(bundle + overlay)` equals `search(fold(bundle, overlay))`.

The wrapped engine searches the trained tree, with masks that leave parents open above eligible live leaves, and gives its beam on the level
above the leaves. One more pass scores the live leaves under it, and joins them to the trained ones: by key, then by (parent, slot), which
is the order of the leaves in a fold. The overlay is read once a call, so a call sees one sequence number.

Legend: B queries, M results, C live leaves under a query's beam, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.live.candidates import NO_MEMORY, ScoredLive, joined
from espalier.engines.live.encoder import LiveEncoder, opened_encoder
from espalier.engines.live.graph_leaves import GraphLeaves
from espalier.engines.live.histories import histories_of
from espalier.engines.live.linear_leaves import LinearLeaves
from espalier.engines.live.parts import Part, together
from espalier.engines.live.traces import Candidates, with_live
from espalier.engines.live.visible import Visibility, Visible, masks_of
from espalier.engines.live.warm_up import search_with_live_items
from espalier.live.memory import LiveMemoryTree
from espalier.live.overlay import LiveLeaves, Overlay
from espalier.manifest import LinearScorer
from espalier.masks.eligibility import every_item
from espalier.memory_lists import MemoryTree
from espalier.queries import HistoryKind, QueryBatch, blank_queries
from espalier.read_only import read_only
from espalier.scores import finish, scores_of_ranks
from espalier.search import NO_ITEM, Engine, Frontier, SearchParams, SearchResult


class LiveSearch(Engine, Protocol):
    """An engine whose items come and go."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        ...


class LeafScorer(Protocol):
    """Scores live leaves."""

    def scored(
        self, leaves: LiveLeaves, queries: QueryBatch, frontier: Frontier, live_BR: Sequence[NDArray[np.bool_] | None]
    ) -> ScoredLive:
        """The eligible live leaves under each query's beam.

        live_BR  bool[R] of each query: its eligible handles, later ones are not; None: no live leaf. Queries of one mask share an array
        """
        ...


class Now(NamedTuple):
    """What is live.

    memory  None where the bundle has none
    leaves  parent_X, slot_X and row_X, the item rows of live leaves
    """

    overlay: Overlay
    memory: LiveMemoryTree | None
    leaves: tuple[NDArray[np.int64], ...]


class LiveEngine:
    """See the module. Its name and rounding are those of the engine that it wraps.

    bundle  of one tree
    inner   opened on it
    place   which tree of a forest it is, from 0
    """

    def __init__(self, bundle: Bundle, inner: Engine, place: int = 0) -> None:
        self.bundle, self.inner, self._place = bundle, inner, place
        self._tree, self._ranking = bundle.tree, bundle.manifest.ranking
        self._visibility = Visibility(bundle.tree, place)
        self._scorer = _leaf_scorer(bundle)
        self._arrays = read_only(self._tree.leaf_of_item, self._tree.parent, self._tree.first_child)
        info = bundle.manifest.memory
        self._remembers, self._key_weight = info is not None, np.float32(0 if info is None else info.weight)
        self._memory_tree: MemoryTree | None = None  # opened with the first live item: an engine may search without the file of it
        self._encoder: LiveEncoder | None = None
        self._is_ready = False
        self._now: Now | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def rounding(self) -> float:
        return self.inner.rounding

    def warm_up(self) -> None:
        """Build what the wrapped engine needs, and what live items add to its searches."""
        self.inner.warm_up()
        search_with_live_items(self.bundle, self.set_overlay, self.search)

    def prepare(self, params: SearchParams) -> None:
        exclude_BE = None if params.exclude_BE is None else np.where(params.exclude_BE < self._tree.item_count, params.exclude_BE, NO_ITEM)
        now = self._now
        has_leaves = now is not None and self._has_leaves(now)
        self.inner.prepare(replace(params, frozen_B=None, frontier=has_leaves or params.frontier, exclude_BE=exclude_BE))

    def close(self) -> None:
        self.inner.close()

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; from any thread."""
        if overlay is None or overlay.is_empty:
            self._now = None
            return
        if self._memory_tree is None and self.bundle.memory is not None:
            self._memory_tree = MemoryTree(self.bundle.memory, self._tree)
        memory = None if self._memory_tree is None else LiveMemoryTree(self._memory_tree, overlay)
        leaves = overlay.trees[self._place]
        now = Now(overlay, memory, read_only(leaves.parent_X, leaves.slot_X, overlay.item_R[leaves.handle_X]))
        if not self._is_ready:
            self._get_ready(now)
        self._now = now

    def _get_ready(self, now: Now) -> None:
        """Open and load what searches with live items need beside the wrapped engine, so that the first one does not wait for it."""
        manifest, scorer = self.bundle.manifest, self.bundle.manifest.scorer
        if isinstance(manifest.query, HistoryKind):
            self._encoder = opened_encoder(self.bundle)
        usual = replace(SearchParams.uniform(1, manifest.search.beam_size, manifest.search.m), frontier=True)
        self.inner.prepare(usual)
        states_BS = None
        if not isinstance(scorer, LinearScorer):
            states_BS = np.zeros((1, scorer.state_dim), np.float32)
            states_BLS = np.zeros((1, scorer.state_levels, scorer.state_dim), np.float32)
            for mask in (None, every_item(self._tree)) if self._encoder is not None else ():
                self.inner.prepare(replace(usual, mask_B=(mask,), states_BLS=states_BLS))
        parents_Y = now.overlay.trees[self._place].parent_Y
        if len(parents_Y):
            one = SearchParams.uniform(1, 1, 1, np.zeros((1, 1), np.int64))
            self._visibility.of(now.overlay, one)
            beam = Frontier(parents_Y[None, :1], np.zeros((1, 1), np.float32), states_BS)
            none = np.full((1, 1), NO_ITEM), np.full((1, 1), -np.inf, np.float32)
            found = finish(manifest.result_ranking, one.m_B, one.m_B, *none, trace=None, frontiers=(beam,))
            self._joined(now, blank_queries(manifest.query, 1), one, Visible(None, [now.overlay.leaf_R], one.m_B, None), found)
        self._is_ready = True

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and the overlay."""
        now, batch = self._now, len(queries)
        if now is None:
            return self.inner.search(queries, params)
        overlay, params = now.overlay, masks_of(now.overlay, params)
        params.check(batch, overlay.items + overlay.handles, self._tree.node_count)
        if params.frozen_B is not None and params.exclude_BE is None and params.frozen_B.all() and _knows(overlay, queries):
            return self.inner.search(queries, replace(params, frozen_B=None))
        seen, has_leaves = self._visibility.of(overlay, params), self._has_leaves(now)
        frontier = has_leaves or params.frontier
        knobs = replace(params, mask_B=seen.mask_B, exclude_BE=seen.exclude_BE, frozen_B=None, frontier=frontier)
        found, queries = self._found(now, queries, knobs, params.frozen_B)
        if has_leaves:
            found = self._joined(now, queries, params, seen, found)
        frontiers = found.frontiers if params.frontier else ()
        return replace(found, complete_B=found.count_B >= np.minimum(params.m_B, seen.eligible_B), frontiers=frontiers)

    def _has_leaves(self, now: Now) -> bool:
        """Not once all that came has gone again, nor where trained items were deleted and nothing came."""
        return len(now.overlay.trees[self._place]) > 0

    # -- before the search ----------------------------------------------------------------------------------------------

    def _found(
        self, now: Now, queries: QueryBatch, params: SearchParams, frozen_B: NDArray[np.bool_] | None
    ) -> tuple[SearchResult, QueryBatch]:
        """What the wrapped engine finds, and the queries without items that are unknown to them."""
        batch = len(queries)
        if not isinstance(queries.kind, HistoryKind):
            return self.inner.search(queries, params), queries
        histories = histories_of(now.overlay, np.asarray(queries.array, np.int64), frozen_B, self._encoder is not None)
        if histories.rows_BT is not queries.array:
            queries = QueryBatch(queries.kind, histories.rows_BT)
        groups = histories.groups(apart=self._remembers)
        if groups[0][1:] == (False, False) and len(groups) == 1:
            return self.inner.search(queries, replace(params, memory=now.memory)), queries
        parts = []
        for members, is_live, is_frozen in groups:
            own, knobs = (queries, params) if len(members) == batch else (queries.take(members), params.take(members))
            if is_live and self._encoder is not None:
                leaves = now.overlay.trees[self._place]
                states_BLS = self._encoder.states(leaves, histories.rows_BT[members], histories.handles_BT[members])
                knobs = replace(knobs, states_BLS=states_BLS)
            parts.append(Part(members, self.inner.search(own, replace(knobs, memory=None if is_frozen else now.memory))))
        return together(batch, int(params.m_B.max(initial=0)), parts), queries

    # -- after the search -----------------------------------------------------------------------------------------------

    def _joined(self, now: Now, queries: QueryBatch, params: SearchParams, seen: Visible, found: SearchResult) -> SearchResult:
        """The result with the live items in it."""
        leaves = now.overlay.trees[self._place]
        scored = self._scorer.scored(leaves, queries, found.frontiers[0], seen.live_BR)
        finite_B, trace, keys_C = found.finite_B, found.trace, scored.ranks_C
        if len(scored.position_C):
            of_found = read_only(found.item_rows_BM, found.ranks_BM, found.keys_BM, found.count_B)
            of_scored = read_only(scored.begin_B, scored.position_C, scored.ranks_C)
            given = of_found, of_scored, now.leaves, self._arrays, *read_only(params.m_B)
            if now.memory is None:
                new = joined(*given, NO_MEMORY)
            else:
                with now.memory.arrays() as arrays:
                    new = joined(*given, (self._key_weight, *read_only(queries.array), *arrays))
            rows_BM, ranks_BM, keys_BM, count_B, keys_C = new
            scores_BM = scores_of_ranks(self.bundle.manifest.result_ranking, keys_BM)
            found = replace(found, item_rows_BM=rows_BM, scores_BM=scores_BM, ranks_BM=ranks_BM, keys_BM=keys_BM, count_B=count_B)
        if finite_B is not None and scored.finite_B is not None:
            finite_B = finite_B & scored.finite_B
        if trace is not None:
            finite_C = np.isfinite(keys_C)
            own_C = [np.arange(own.start, own.stop)[finite_C[own]] for own in scored.spans]
            lives = [Candidates(leaves.handle_X[scored.position_C[own]], scored.ranks_C[own], keys_C[own]) for own in own_C]
            trace = (*trace[:-1], with_live(self._tree.node_count, trace[-1], lives, params.m_B))
        return replace(found, trace=trace, finite_B=finite_B)


def _knows(overlay: Overlay, queries: QueryBatch) -> bool:
    """Whether no history holds an item that the bundle does not have."""
    return not isinstance(queries.kind, HistoryKind) or int(queries.array.max(initial=NO_ITEM)) < overlay.items


def _leaf_scorer(bundle: Bundle) -> LeafScorer:
    """What scores the live leaves of a bundle of one tree."""
    if isinstance(bundle.manifest.scorer, LinearScorer):
        return LinearLeaves(bundle.manifest.ranking, bundle.chunks.width)
    return GraphLeaves(bundle)
