"""A search from queries to items, all stages in a row.

    encode    query.onnx makes states of histories and vectors; features go as they are (`encode.py`)
    search    the beam search of each tree, by one of the engines of `engines/__init__.py`, up to the leaves that its beam scored
    merge     the overflow lists of live items under the beams, and the mean over a forest's trees with its tail
    reorder   stacking orders the best candidates anew

What counts per item comes before any cut, so inside a shard; what orders candidates comes last, so at the router, whose search asks shards.
With live items the answer is that of the bundle that they would be folded into (espalier.live.overlay).

Legend: B queries, T trees, M results, R handles of live items.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.encode import Encoder, check_queries
from espalier.engines.forest_mean import BLOCK, ForestMean, LiveLists, LiveRows, most_leaves
from espalier.engines.overflow_lists import BestLeaves, OverflowLists
from espalier.engines.reorder import STRETCH, Stacker
from espalier.engines.results import joined_parents
from espalier.engines.stages import GivenQueries, Leaves, ParentsFound, ShardResult, TreeQuery, TreeSearch
from espalier.live.masks import eligible_with_live_items
from espalier.live.overlay import Overlay
from espalier.masks.eligibility import eligible_nodes, unrestricted_mask
from espalier.memory_lists import NO_LIVE_ITEMS, LiveEntries, MemoryTree
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.read_only import read_only
from espalier.scores import finish
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult

MESSAGE = 64
"""Queries that shards are asked at a time: golden queries come all at once."""


class _Live(NamedTuple):
    """What is live, as the stages take it. memory: None where the bundle has none; rows: of a forest."""

    overlay: Overlay
    memory: LiveEntries | None
    rows: LiveRows | None


def _entries_of(overlay: Overlay) -> LiveEntries:
    """What is live, as the memory of its only tree takes it."""
    live = overlay.memory
    memory = NO_LIVE_ITEMS.memory if live is None else (live.entries, live.value)
    return LiveEntries(overlay.handles, memory, overlay.trees[0].entries, *read_only(overlay.handle_I))


class Pipeline:
    """Searches one bundle. Any number of threads may search where those of `trees` may.

    trees  searches its trees
    """

    def __init__(self, bundle: Bundle, trees: TreeSearch) -> None:
        self.bundle, self.tree_search = bundle, trees
        self._trees = [alone.tree for alone in bundle.alone]
        self._unrestricted = [unrestricted_mask(tree) for tree in self._trees]
        one = SearchParams.uniform(1, 1, 1)  # a single query without a filter is the usual case
        self._one_eligible_T = tuple(eligible_nodes(tree, one, every) for tree, every in zip(self._trees, self._unrestricted, strict=True))
        self._encoder = Encoder(bundle, trees.encodes)
        own = None if bundle.shard is None else bundle.shard.items
        self._memory = None if bundle.memory is None else MemoryTree(bundle.memory, bundle.tree, own)
        self._mean = ForestMean(bundle) if bundle.manifest.trees else None
        self._ranking = bundle.manifest.ranking if self._mean is None else bundle.manifest.result_ranking
        self._stacker = None if bundle.stacking is None else Stacker(bundle, bundle.stacking)
        self._overflow = OverflowLists(bundle)
        self._live: _Live | None = None

    @property
    def name(self) -> str:
        """See `Engine`."""
        return self.tree_search.name

    @property
    def rounding(self) -> float:
        """See `Engine`."""
        return self.tree_search.rounding * (1 if self._stacker is None else STRETCH)

    def set_overlay(self, overlay: Overlay | None) -> None:
        """What is live from the next call on; None: nothing. From any thread."""
        if overlay is None or overlay.is_empty:
            self._live = None
            return
        self._encoder.take_live_items()
        self._overflow.open()
        memory = None if self._memory is None else _entries_of(overlay)
        self._live = _Live(overlay, memory, None if self._mean is None else LiveRows.of(overlay))

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters do not fit the bundle and what is live."""
        if self._stacker is None:
            return self.candidates(queries, params, context)
        live, items = self._live, self._trees[0].item_count
        wanted_B = self._stacker.wanted(params.m_B, items + (0 if live is None else live.overlay.handles))
        return self._stacker.ordered(queries, self.candidates(queries, replace(params, m_B=wanted_B), context), params.m_B)

    def candidates(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """The best m items before the last stage; for `GivenQueries` that want them with the beams above the leaves."""
        wants_frontier = isinstance(queries, GivenQueries) and queries.frontier
        found = self._run(queries, params, context, wants_frontier)
        return ShardResult.of(found.result, found.frontiers) if wants_frontier else found.result

    def parents(self, queries: QueryBatch, params: SearchParams) -> ParentsFound:
        """The beams above the leaves, and the trained items that were found under them: where items belong that the queries led to."""
        return self._run(queries, params, NO_CONTEXT, True, merges=False)

    def warm_up(self) -> None:
        """See `Engine`."""
        self.tree_search.warm_up()

    def close(self) -> None:
        """See `Engine`."""
        self.tree_search.close()

    # -- the stages -----------------------------------------------------------------------------------------------------

    def _run(self, queries: QueryBatch, params: SearchParams, context: SearchContext, frontier: bool, merges: bool = True) -> ParentsFound:
        """encode, search, merge: the best m items, and with `frontier` the beams above the leaves. merges: live items are found, too."""
        live = self._live
        if live is not None and self._is_as_trained(live.overlay, queries, params):
            live = None
        query = self._encoded(queries, params, context, live, frontier)
        size = self._at_once(query)
        live = live if merges else None
        blocks = [query]
        if size < len(queries):
            blocks = [query.take(np.arange(begin, min(begin + size, len(queries)))) for begin in range(0, len(queries), size)]
        return joined_parents([self._block(block, live) for block in blocks])

    def _block(self, query: TreeQuery, live: _Live | None) -> ParentsFound:
        """Queries that are searched at a time."""
        leaves = self.tree_search.search(query)
        return ParentsFound(self._merged(query, leaves, live), leaves.frontiers, query.leaf_states(leaves))

    def _is_as_trained(self, overlay: Overlay, queries: QueryBatch, params: SearchParams) -> bool:
        """Whether an overlay makes no difference to a search: all that came has gone again, or the queries see the bundle alone, and
        nothing in the request may name what is live.
        """
        if params.exclude_BE is not None or isinstance(queries, GivenQueries):
            return False
        if isinstance(queries.kind, HistoryKind) and queries.array.max(initial=-1) >= self._trees[0].item_count:
            return False
        if params.mask_B is None:
            return overlay.is_as_trained
        return all(mask is not None and mask.live_R is None and mask.at is None for mask in params.mask_B)

    def _at_once(self, query: TreeQuery) -> int:
        """How many queries are searched at a time."""
        batch = len(query.queries)
        if self.tree_search.merges:
            return batch if query.trace else MESSAGE
        if batch < 2 or query.trace:
            return 1
        return batch if self._mean is None else max(1, BLOCK // most_leaves(self._trees, int(query.beam_size_B.max())))

    def _encoded(self, queries: QueryBatch, params: SearchParams, context: SearchContext, live: _Live | None, frontier: bool) -> TreeQuery:
        """The queries' states, what each may visit of each tree, and what it remembers."""
        overlay = None if live is None else live.overlay
        handles = 0 if overlay is None else overlay.handles
        check_queries(self.bundle, queries, handles)
        params.check(len(queries), self._trees[0].item_count + handles, self._trees[0].node_count)
        if overlay is not None:
            params = _brought_forward(overlay, params)
        encoded = self._encoder.of(queries, params.beam_size_B, params.trace, overlay, params.mask_B)
        if self._memory is not None:
            params = _excluding(params, self._memory.left_out(encoded.queries.array))
        eligible_T = self._one_eligible_T
        may_differ = overlay is not None and (not overlay.is_as_trained or params.exclude_BE is not None)
        if len(queries) != 1 or may_differ or params.mask_B is not None or params.exclude_BE is not None:
            eligible_T = tuple(
                eligible_with_live_items(tree, params, every, place, overlay)
                if overlay is not None and may_differ
                else eligible_nodes(tree, params, every, place)
                for place, (tree, every) in enumerate(zip(self._trees, self._unrestricted, strict=True))
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
        """The best m items of what the trees found, and of what is live under their beams."""
        found = BestLeaves(leaves.rows_BTM[:, 0], leaves.ranks_BTM[:, 0], leaves.keys_BTM[:, 0], leaves.count_BT[:, 0])
        finite_B, traces = leaves.finite_B, leaves.traces
        if traces and not self.tree_search.merges:
            starts = [tree.start_level(int(query.beam_size_B[0])) for tree in self._trees]
            traces = tuple(tuple(level for level in own if level.level >= start) for start, own in zip(starts, traces, strict=True))
        scored_T = [] if live is None else self._overflow.scored(live.overlay, query, leaves)
        if self._mean is not None:
            lists = None if live is None or live.rows is None or not scored_T else (live.rows, LiveLists.of(live.overlay, scored_T))
            best = self._mean.best_with if self.tree_search.merges else self._mean.best
            rows_BM, ranks_BM = best(query.queries, leaves, query.m_B, lists)
            found = BestLeaves(rows_BM, ranks_BM, ranks_BM, found.count_B)
            if live is not None and scored_T:
                traces = self._overflow.with_traces(live.overlay, traces, scored_T, None, None)
        elif live is not None and scored_T:
            memory = None if self._memory is None or live.memory is None else (self._memory, live.memory)
            found, keys_C = self._overflow.join(live.overlay, query, found, scored_T[0], memory)
            traces = self._overflow.with_traces(live.overlay, traces, scored_T, query.m_B, keys_C)
            if finite_B is not None and scored_T[0].finite_B is not None:
                finite_B = finite_B & scored_T[0].finite_B
        result = finish(
            self._ranking,
            query.m_B,
            query.eligible_T[0].items_B,
            found.rows_BM,
            found.ranks_BM,
            traces,
            finite_B if isinstance(query.queries.kind, VectorKind) else None,
            found.keys_BM,
        )
        if (coverage := leaves.coverage) is None:
            return result
        if not coverage.answered_BS.all():  # nobody knows how many items the other shards have for a query
            result = replace(result, complete_B=result.count_B >= query.m_B)
        return replace(result, coverage=coverage)


def _excluding(params: SearchParams, rows_BE: NDArray[np.int64] | None) -> SearchParams:
    """Parameters with more item rows that queries exclude."""
    if rows_BE is None:
        return params
    return replace(params, exclude_BE=rows_BE if params.exclude_BE is None else np.concatenate([params.exclude_BE, rows_BE], axis=1))


def _brought_forward(overlay: Overlay, params: SearchParams) -> SearchParams:
    """Parameters with masks of the overlay that is searched: a request's masks are of the one with which it came, which may be older.

    An item that moved in between has left its old place, and an older mask does not open its new one.
    """
    if params.mask_B is None:
        return params
    found = {id(mask): None if mask is None or mask.at is None else mask.at(overlay) for mask in params.mask_B}
    if not any(found.values()):
        return params
    return replace(params, mask_B=tuple(found[id(mask)] or mask for mask in params.mask_B))
