"""An engine whose answers are known beforehand and whose calls are recorded; it can be held, and it can fail."""

from __future__ import annotations

import threading

import numpy as np

from espalier.arrays import Int64
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, NO_ITEM, SearchContext, SearchParams, SearchResult


class FakeEngine:
    """Answers the lowest eligible item rows, scored 1, 1/2, 1/3, …, of which a search reaches at most `beam_size`.

    calls    (queries, params) of every search; contexts: theirs
    started  set when a search has begun
    go       a search waits for it; set unless a test clears it
    failure  raised by the next search

    leaf_of_item  where a mask says whether an item is eligible; without a tree the item row itself
    """

    name, rounding = "fake", 0.0

    def __init__(self, items: int, leaf_of_item: Int64 | None = None) -> None:
        self.items = items
        self.leaf_of_item = np.arange(items) if leaf_of_item is None else leaf_of_item
        self.calls: list[tuple[QueryBatch, SearchParams]] = []
        self.contexts: list[SearchContext] = []
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.warm = self.closed = False

    def warm_up(self) -> None:
        self.warm = True

    def close(self) -> None:
        self.closed = True

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        params.check(len(queries), self.items)
        if not len(queries):  # the golden queries of a test's bundle
            none = np.empty((0, 0), np.float32)
            return SearchResult(none.astype(np.int64), none, none, none, params.m_B, np.empty(0, np.bool_))
        self.calls.append((queries, params))
        self.contexts.append(context)
        self.started.set()
        assert self.go.wait(10), "the test forgot to let the engine go"
        failure, self.failure = self.failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame
        batch, width = len(queries), int(params.m_B.max())
        rows_BM = np.full((batch, width), NO_ITEM, np.int64)
        scores_BM = np.zeros((batch, width), np.float32)
        count_B, complete_B = np.zeros(batch, np.int64), np.zeros(batch, np.bool_)
        for b in range(batch):
            mask = None if params.mask_B is None else params.mask_B[b]
            eligible = np.arange(self.items) if mask is None else np.flatnonzero(mask.eligible_N[self.leaf_of_item])
            eligible = eligible if params.exclude_BE is None else np.setdiff1d(eligible, params.exclude_BE[b])
            found = eligible[: min(params.m_B[b], params.beam_size_B[b])]
            rows_BM[b, : len(found)], count_B[b] = found, len(found)
            scores_BM[b, : len(found)] = 1 / np.arange(1, len(found) + 1)
            complete_B[b] = len(found) == min(params.m_B[b], len(eligible))
        return SearchResult(rows_BM, scores_BM, scores_BM, scores_BM, count_B, complete_B)
