"""A search from queries to items, all stages in a row.

    encode    query.onnx turns histories and vectors into query states; features stay as they are (`encode.py`)
    search    an engine of `engines/__init__.py` searches each tree and returns the leaves that the last beam scored
    merge     live items under the beams are scored and added; a forest's trees are averaged, with its tail
    reorder   stacking reorders the best candidates

Steps that score single items come before the cut to m, so they run inside a shard. The step that orders candidates comes last, so it runs
at the router, whose tree search asks shards. With live items the answer is that of the bundle after a fold (espalier.live.overlay).

Legend: B queries, T trees, M results, R handles of live items.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from espalier.arrays import Int64, read_only
from espalier.bundle import Bundle
from espalier.engines.encode import Encoder, check_queries
from espalier.engines.forest_mean import BLOCK, ForestMean, LiveLists, LiveRows, most_leaves
from espalier.engines.overflow import BestLeaves, OverflowLists
from espalier.engines.stacker import STRETCH, Stacker
from espalier.engines.stages import GivenQueries, Leaves, TreeQuery, TreeSearch, joined
from espalier.live.masks import eligible_with_live_items
from espalier.live.overlay import Overlay
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.memory_lists import NO_LIVE_ITEMS, LiveEntries, MemoryTree
from espalier.queries import HistoryKind, QueryBatch, VectorKind, blank_queries
from espalier.scores import finish
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult

MESSAGE = 64
"""Most queries of one message to shards: golden queries come all at once."""


class _Live(NamedTuple):
    """The live items, in the form each stage reads. memory: None if the bundle has none; rows: None unless it is a forest."""

    overlay: Overlay
    memory: LiveEntries | None
    rows: LiveRows | None


def _entries_of(overlay: Overlay) -> LiveEntries:
    """The live items as the memory reads them; a bundle with a memory has one tree."""
    live = overlay.memory
    memory = NO_LIVE_ITEMS.memory if live is None else (live.entries, live.value)
    return LiveEntries(overlay.handles, memory, overlay.trees[0].entries, *read_only(overlay.handle_I))


class Pipeline:
    """Searches one bundle. Any number of threads may search, if `trees` allows it.

    trees              the tree search of the bundle
    counts_live_items  whether live items count in histories, once there are some; if not, they are unknown there
    """

    def __init__(self, bundle: Bundle, trees: TreeSearch) -> None:
        self.bundle, self.tree_search = bundle, trees
        self._trees = [alone.tree for alone in bundle.alone]
        self._unrestricted = [unrestricted_mask(tree) for tree in self._trees]
        single = SearchParams.uniform(1, 1, 1)  # a single query without a filter is the usual case
        trees_and_masks = zip(self._trees, self._unrestricted, strict=True)
        self._single_eligible_T = tuple(eligible_nodes(tree, single, every) for tree, every in trees_and_masks)
        self._encoder = Encoder(bundle, trees.encodes)
        shard_items = None if bundle.shard is None else bundle.shard.items
        self._memory = None if bundle.memory is None else MemoryTree(bundle.memory, bundle.tree, shard_items)
        self._mean = ForestMean(bundle) if bundle.manifest.trees else None
        self._ranking = bundle.manifest.ranking if self._mean is None else bundle.manifest.result_ranking
        self._stacker = None if bundle.stacking is None else Stacker(bundle, bundle.stacking)
        self._overflow = OverflowLists(bundle)
        self._live: _Live | None = None
        self.counts_live_items = False

    @property
    def name(self) -> str:
        """See `Engine`."""
        return self.tree_search.name

    @property
    def rounding(self) -> float:
        """See `Engine`."""
        return self.tree_search.rounding * (1 if self._stacker is None else STRETCH)

    def set_overlay(self, overlay: Overlay | None) -> None:
        """Set the live items for all later calls; None: there are none. Any thread may call it."""
        if overlay is None or overlay.is_empty:
            self._live = None
            return
        self.counts_live_items = self._encoder.take_live_items()
        self._overflow.open()
        memory = None if self._memory is None else _entries_of(overlay)
        self._live = _Live(overlay, memory, None if self._mean is None else LiveRows.of(overlay))

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and its live items."""
        if self._stacker is None:
            return self.candidates(queries, params, context)
        live, items = self._live, self._trees[0].item_count
        candidates_B = self._stacker.candidate_counts(params.m_B, items + (0 if live is None else live.overlay.handles))
        return self._stacker.ordered(queries, self.candidates(queries, replace(params, m_B=candidates_B), context), params.m_B)

    def candidates(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """The best m items before the reorder stage; `GivenQueries` may ask for the beams above the leaves too."""
        return self._run(queries, params, context, isinstance(queries, GivenQueries) and queries.frontier)

    def parents(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """The best trained items, with the beams above the leaves: new items that match the queries belong there."""
        return self._run(queries, params, SearchContext(for_write=True), True, merges=False)

    def warm_up(self) -> None:
        """See `Engine`. Golden queries do not warm a bundle that has none."""
        self.tree_search.warm_up()
        self.candidates(blank_queries(self.bundle.manifest.query, 1), SearchParams.uniform(1, 1, 1))

    def close(self) -> None:
        """See `Engine`."""
        self.tree_search.close()

    # -- the stages -----------------------------------------------------------------------------------------------------

    def _run(self, queries: QueryBatch, params: SearchParams, context: SearchContext, frontier: bool, merges: bool = True) -> SearchResult:
        """encode, search, merge: the best m items, and with `frontier` the beams above the leaves. merges: include live items."""
        live = self._live
        if live is not None and self._is_as_trained(live.overlay, queries, params):
            live = None
        query = self._encoded(queries, params, context, live, frontier)
        size = self._block_size(query)
        live = live if merges else None
        blocks = [query]
        if size < len(queries):
            blocks = [query.take(np.arange(begin, min(begin + size, len(queries)))) for begin in range(0, len(queries), size)]
        return joined([self._block(block, live, frontier) for block in blocks])

    def _block(self, query: TreeQuery, live: _Live | None, frontier: bool) -> SearchResult:
        leaves = self.tree_search.search(query)
        result = self._merged(query, leaves, live)
        return replace(result, frontiers=leaves.frontiers, leaf_states_BS=query.leaf_states(leaves)) if frontier else result

    def _is_as_trained(self, overlay: Overlay, queries: QueryBatch, params: SearchParams) -> bool:
        """Whether an overlay cannot change a search: no live item is left, or masks limit every query to trained items; and the request
        names no live item.
        """
        if params.exclude_BE is not None or isinstance(queries, GivenQueries):
            return False
        if isinstance(queries.kind, HistoryKind) and queries.array.max(initial=-1) >= self._trees[0].item_count:
            return False
        if params.mask_B is None:
            return overlay.is_as_trained
        return all(mask is not None and mask.live_R is None and mask.at is None for mask in params.mask_B)

    def _block_size(self, query: TreeQuery) -> int:
        batch = len(query.queries)
        if self.tree_search.merges:
            return batch if query.trace else MESSAGE
        if batch < 2 or query.trace:
            return 1
        return batch if self._mean is None else max(1, BLOCK // most_leaves(self._trees, int(query.beam_size_B.max())))

    def _encoded(self, queries: QueryBatch, params: SearchParams, context: SearchContext, live: _Live | None, frontier: bool) -> TreeQuery:
        """The queries with their states, the eligible nodes of each tree, and the nodes with memory."""
        overlay = None if live is None else live.overlay
        handles = 0 if overlay is None else overlay.handles
        check_queries(self.bundle, queries, handles)
        params.check(len(queries), self._trees[0].item_count + handles, self._trees[0].node_count)
        if overlay is not None:
            params = _with_current_masks(overlay, params)
        encoded = self._encoder.of(queries, params.beam_size_B, params.trace, overlay, params.mask_B)
        if self._memory is not None:
            params = _excluding(params, self._memory.left_out(encoded.queries.array))
        eligible_T = self._single_eligible_T
        may_differ = overlay is not None and (not overlay.is_as_trained or params.exclude_BE is not None)
        if len(queries) != 1 or may_differ or params.mask_B is not None or params.exclude_BE is not None:
            eligible_T = tuple(
                eligible_with_live_items(tree, params, every, t, overlay)
                if overlay is not None and may_differ
                else eligible_nodes(tree, params, every, t)
                for t, (tree, every) in enumerate(zip(self._trees, self._unrestricted, strict=True))
            )
        memory = queries.memory if isinstance(queries, GivenQueries) else None
        if memory is None and self._memory is not None:
            memory = self._memory.lists(encoded.queries.array, eligible_T[0], None if live is None else live.memory)
        return TreeQuery(
            encoded.queries,
            encoded.states_BLS,
            params.beam_size_B,
            params.m_B,
            eligible_T,
            memory,
            params.trace,
            frontier or (overlay is not None and len(overlay.trees[0]) > 0),
            encoded.encoded_B,
            context,
        )

    def _merged(self, query: TreeQuery, leaves: Leaves, live: _Live | None) -> SearchResult:
        """The best m items of the leaves that the trees scored and of the live items under their beams."""
        best_leaves = BestLeaves(leaves.rows_BTM[:, 0], leaves.ranks_BTM[:, 0], leaves.keys_BTM[:, 0], leaves.count_BT[:, 0])
        finite_B, traces = leaves.finite_B, leaves.traces
        if traces and not self.tree_search.merges:
            starts = [tree.start_level(int(query.beam_size_B[0])) for tree in self._trees]
            traces = tuple(tuple(level for level in levels if level.level >= start) for start, levels in zip(starts, traces, strict=True))
        scored_T = [] if live is None else self._overflow.scored(live.overlay, query, leaves)
        if self._mean is not None:
            lists = None if live is None or live.rows is None or not scored_T else (live.rows, LiveLists.of(live.overlay, scored_T))
            mean = self._mean.best_with if self.tree_search.merges else self._mean.best
            rows_BM, ranks_BM = mean(query.queries, leaves, query.m_B, lists)
            best_leaves = BestLeaves(rows_BM, ranks_BM, ranks_BM, best_leaves.count_B)
            if live is not None and scored_T:
                traces = self._overflow.with_traces(live.overlay, traces, scored_T, None, None)
        elif live is not None and scored_T:
            memory = None if self._memory is None or live.memory is None else (self._memory, live.memory)
            best_leaves, keys_C = self._overflow.join(live.overlay, query, best_leaves, scored_T[0], memory)
            traces = self._overflow.with_traces(live.overlay, traces, scored_T, query.m_B, keys_C)
            if finite_B is not None:
                finite_B = finite_B & scored_T[0].finite_B
        result = finish(
            self._ranking,
            query.m_B,
            query.eligible_T[0].items_B,
            best_leaves.rows_BM,
            best_leaves.ranks_BM,
            traces,
            finite_B if isinstance(query.queries.kind, VectorKind) else None,
            best_leaves.keys_BM,
        )
        if (coverage := leaves.coverage) is None:
            return result
        if not coverage.answered_BS.all():  # the shards that did not answer may have more items
            result = replace(result, complete_B=result.count_B >= query.m_B)
        return replace(result, coverage=coverage)


def _excluding(params: SearchParams, rows_BE: Int64 | None) -> SearchParams:
    if rows_BE is None:
        return params
    return replace(params, exclude_BE=rows_BE if params.exclude_BE is None else np.concatenate([params.exclude_BE, rows_BE], axis=1))


def _with_current_masks(overlay: Overlay, params: SearchParams) -> SearchParams:
    """Parameters whose masks are of the overlay that is searched. A request's masks may be of an older overlay.

    An item that has moved since then is no longer at its old leaf, and an older mask does not open its new one.
    """
    if params.mask_B is None:
        return params
    current_masks = {id(mask): None if mask is None or mask.at is None else mask.at(overlay) for mask in params.mask_B}
    if not any(current_masks.values()):
        return params
    return replace(params, mask_B=tuple(current_masks[id(mask)] or mask for mask in params.mask_B))
