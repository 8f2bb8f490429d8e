"""A forest with live items: `search(bundle + overlay)` equals `search(fold(bundle, overlay))`.

In each tree the live leaves under its beam are scored beside the trained ones; all of them take part in the mean of an item's scores,
before any cut to m. A live item is one item in all trees. In the mean it goes by a number, I + its handle, and the result has its item row:
that of a trained item whose row was changed is its old one, by which ties are broken.

Legend: B queries, T trees, C live leaves under a query's beam, I trained items, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.engines.forest import ForestEngine, ScoredLeaves
from espalier.engines.linear.engine import SparseForestEngine, check_kind
from espalier.engines.linear.joint_search import JointSearch
from espalier.engines.live.candidates import ScoredLive
from espalier.engines.live.joint_forest import JointOverlay
from espalier.engines.live.linear_leaves import LinearLeaves
from espalier.engines.live.traces import Candidates, with_live
from espalier.engines.live.visible import Visibility, Visible, masks_of
from espalier.engines.live.warm_up import search_with_live_items
from espalier.live.overlay import Overlay
from espalier.queries import QueryBatch
from espalier.read_only import read_only
from espalier.scores import finish
from espalier.search import NO_ITEM, SearchParams, SearchResult

Int64 = NDArray[np.int64]
Array = NDArray[Any]


class LiveForestEngine:
    """See the module. Its name and rounding are those of the forest's engine.

    inner  of all trees; nobody else uses it
    """

    def __init__(self, inner: ForestEngine) -> None:
        self.bundle, self.inner = inner.bundle, inner
        self._trees = [alone.tree for alone in inner.bundle.alone]
        self._visibility = [Visibility(tree, place) for place, tree in enumerate(self._trees)]
        width = inner.bundle.chunks.width
        self._leaves = [LinearLeaves(alone.manifest.ranking, width) for alone in inner.bundle.alone]
        self._joint = inner.joint if isinstance(inner, SparseForestEngine) else None
        self._live: _Now | None = None
        self._is_ready = False

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def rounding(self) -> float:
        return self.inner.rounding

    def warm_up(self) -> None:
        """Build what the trees' search needs, and load what live items add to it."""
        self.inner.warm_up()
        search_with_live_items(self.bundle, self.set_overlay, self.search)

    def prepare(self, params: SearchParams) -> None:
        self.inner.prepare(replace(params, frozen_B=None, mask_B=None, exclude_BE=None, frontier=self._live is not None))

    def close(self) -> None:
        self.inner.close()

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        if overlay is not None and not overlay.is_empty and not self._is_ready:
            search = self.bundle.manifest.search
            self.inner.prepare(replace(SearchParams.uniform(1, search.beam_size, search.m), frontier=True))
            self._is_ready = True
        self._live = None if overlay is None or overlay.is_empty else self._now(overlay)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and the overlay."""
        live = self._live
        return self.inner.search(queries, params) if live is None else self._search(live, queries, params)

    def _now(self, overlay: Overlay) -> _Now:
        of_items = _item_arrays(overlay)
        together = None if self._joint is None else JointOverlay(self._trees, overlay, of_items)
        return _Now(overlay, of_items, together)

    def _search(self, live: _Now, queries: QueryBatch, params: SearchParams) -> SearchResult:
        overlay, params = live.overlay, masks_of(live.overlay, params)
        params.check(len(queries), overlay.items + overlay.handles)
        if self._joint is not None and live.together is not None and len(queries) == 1 and not _is_restricted(params):
            check_kind(queries, self.bundle)
            return self._in_one_call(self._joint, live, live.together, queries, params)
        knobs_T = [params.of_tree(place) for place in range(len(self._trees))]
        seen_T = [seen.of(overlay, knobs) for seen, knobs in zip(self._visibility, knobs_T, strict=True)]
        for place, seen in enumerate(seen_T):
            knobs_T[place] = replace(params, mask_B=seen.mask_B, exclude_BE=seen.exclude_BE, frozen_B=None, frontier=True)
        parts = _Parts(overlay, live.of_items, self._leaves, seen_T, [])
        result = self.inner.search_trees(queries, params, knobs_T, parts)
        complete_B = result.count_B >= np.minimum(params.m_B, seen_T[0].eligible_B)
        result = replace(result, complete_B=complete_B)
        return result if result.trace is None else self._traced(result, overlay, parts.scored)

    def _in_one_call(
        self, joint: JointSearch, live: _Now, together: JointOverlay, queries: QueryBatch, params: SearchParams
    ) -> SearchResult:
        """The search of a single query; see `joint_forest`."""
        shape = 1, int(params.m_B[0])
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        knobs = params.beam_size_B, params.m_B
        with self.inner.means_scratch.of(live.overlay.handles) as scratch:
            together.search(joint, queries.features, knobs, *scratch, (rows_BM, ranks_BM))
        eligible_B = np.full(1, live.overlay.eligible)
        return finish(self.inner.result_ranking, params.m_B, eligible_B, rows_BM, ranks_BM, None)

    def _traced(self, result: SearchResult, overlay: Overlay, scored_T: Sequence[ScoredLive]) -> SearchResult:
        """With the live leaves in the last level of each tree, as candidates that are all kept."""
        traces = []
        for place, (trace, scored) in enumerate(zip(result.traces, scored_T, strict=True)):
            handle_X = overlay.trees[place].handle_X
            lives = []
            for begin, end in zip(scored.begin_B[:-1], scored.begin_B[1:], strict=True):
                ranks_C = scored.ranks_C[begin:end]
                lives.append(Candidates(handle_X[scored.position_C[begin:end]], ranks_C, ranks_C))
            last = trace[-1]
            every_B = np.full(len(lives), last.candidates_BC.shape[1] + max(len(live.handle_C) for live in lives))
            traces.append((*trace[:-1], with_live(self._trees[place].node_count, last, lives, every_B)))
        return replace(result, trace=traces[0], other_traces=tuple(traces[1:]))


class _Now(NamedTuple):
    """What is live. of_items: `live` of `best_means`; together: for searches in one call, None where there are none."""

    overlay: Overlay
    of_items: tuple[Any, ...]
    together: JointOverlay | None


def _is_restricted(params: SearchParams) -> bool:
    """Whether a single query has a mask of its own or exclusions, sees the bundle alone, or brings more than its answer."""
    asks_more = params.trace or params.frontier or params.exclude_BE is not None
    return asks_more or params.frozen_B is not None or (params.mask_B is not None and params.mask_B[0] is not None)


class _Parts(NamedTuple):
    """`LiveParts` of one call. scored: of each tree, of the last block of queries."""

    overlay: Overlay
    arrays: tuple[Any, ...]
    leaves: Sequence[LinearLeaves]
    seen_T: Sequence[Visible]
    scored: list[ScoredLive]

    @property
    def handles(self) -> int:
        """See `LiveParts`."""
        return self.overlay.handles

    def of_tree(self, place: int, queries: QueryBatch, members: Int64, found: ScoredLeaves) -> tuple[Int64, Int64, NDArray[np.float32]]:
        """See `LiveParts`."""
        if found.frontier is None:
            raise ValueError("leaves without the beam above them")
        own, live_BR = self.overlay.trees[place], self.seen_T[place].live_BR
        scored = self.leaves[place].scored(own, queries, found.frontier, [live_BR[b] for b in members.tolist()])
        self.scored.append(scored)
        return scored.begin_B, self.overlay.items + own.handle_X[scored.position_C], scored.ranks_C


def _item_arrays(overlay: Overlay) -> tuple[Any, ...]:
    """`live` of `best_means`: I, the items' rows, and their rows of the tail, which come with their leaves in the first tree."""
    leaves = overlay.trees[0]
    if leaves.sparse is None:
        raise ValueError("live leaves without weights")
    pool = leaves.sparse
    begin_R, end_R = np.zeros((2, overlay.handles), np.int64)
    begin_R[leaves.handle_X], end_R[leaves.handle_X] = pool.tail_begin_P[leaves.place_X], pool.tail_end_P[leaves.place_X]
    return overlay.items, *read_only(overlay.item_R, begin_R, end_R, pool.tail_feature, pool.tail_value)
