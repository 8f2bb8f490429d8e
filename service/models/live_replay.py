"""The probe's queries to a version with live items: do searches return new items, and do they still return the old ones?

The canary searches for the items that were put last. It tries the queries that an item was placed by, one after the other, until one
returns the item: an item whose queries differ much is placed between them. Displacement is measured on held-out queries. Each is searched
with live items right after the probe searched it without, so that only the live catalogue differs. Both take turns with the probe's other
queries; the total rate stays the same. Knows queries and item rows. Does not know where an item was placed.

Legend: M results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.checks.golden import encode_queries
from espalier.errors import InvalidQuery
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import SearchParams, SearchResult

from ..live.live_version import LiveVersion

M = 50
"""m of the searches: a new item should be among so many results, and recall@m is compared. At most the bundle's max_m."""
CANARY_ANSWERS = 64
"""The canary's recall is the mean over so many items, the last that were searched for."""
MAX_TRIES = 5
"""Most queries that are tried for an item."""
MIN_CANARY_ANSWERS = 8
"""Items before the canary's recall is reported: one missed item is no reason for an alert."""
MIN_GAINS = 32
"""Held-out queries that were compared before displacement is reported, or all if there are fewer."""


class LiveQuery(NamedTuple):
    """One query with the items that it should return.

    expected_rows  item rows
    frozen_M       the rows that the bundle answered without live items; None for the canary
    """

    queries: QueryBatch
    params: SearchParams
    expected_rows: Int64
    frozen_M: Int64 | None


class LiveReplay:
    """The queries to one version that serves, and the measurements from its last answers.

    heldout  most held-out queries that are compared
    """

    def __init__(self, bundle: Bundle, live: LiveVersion, heldout: int) -> None:
        search = bundle.manifest.search
        self._bundle, self._live = bundle, live
        self._m = min(M, search.max_m)
        self._canary_params = SearchParams.uniform(1, search.beam_size, self._m)
        self._due: deque[LiveQuery] = deque()
        self._query: LiveQuery | None = None  # the one whose answer comes next
        self._tries: deque[LiveQuery] = deque()  # an item's queries that were not tried yet
        self._hits: deque[bool] = deque(maxlen=CANARY_ANSWERS)
        self._gains: deque[float] = deque(maxlen=max(heldout, 1))
        self._min_gains = min(MIN_GAINS, max(heldout, 1))

    def after(self, queries: QueryBatch, params: SearchParams, relevant: Int64, answer: SearchResult) -> None:
        """After a held-out query without live items: make the same query with live items due, and then one of the canary."""
        self._due.clear()
        if self._live.is_empty:
            for history in (self._hits, self._gains, self._tries):
                history.clear()
            return
        expected_rows = relevant[self._live.eligible(relevant)]
        if len(expected_rows):
            self._due.append(LiveQuery(queries, replace(params, mask_B=None), expected_rows, answer.item_rows_BM[0, : self._m]))
        canary = self._canary()
        if canary is not None:
            self._due.append(canary)

    def next(self) -> tuple[QueryBatch, SearchParams] | None:
        """The query that is due, if any."""
        self._query = self._due.popleft() if self._due else None
        return None if self._query is None else (self._query.queries, self._query.params)

    def take(self, result: SearchResult) -> None:
        query = self._query
        if query is None:
            return
        rows_M = result.item_rows_BM[0, : self._m]
        if query.frozen_M is None:
            hit = bool(np.isin(query.expected_rows, rows_M).all())
            if hit or not self._tries:
                self._hits.append(hit)
                self._tries.clear()
        else:
            self._gains.append(_recall(query.expected_rows, rows_M) - _recall(query.expected_rows, query.frozen_M))

    @property
    def canary_recall(self) -> float | None:
        """Share of new items that one of their queries returned; None before MIN_CANARY_ANSWERS items, NaN if there are no new items."""
        if self._live.is_empty or not len(self._live.recent):
            return float("nan")
        return float(np.mean(self._hits)) if len(self._hits) >= MIN_CANARY_ANSWERS else None

    @property
    def displacement(self) -> float | None:
        """Mean recall with live items minus recall without, over the last round. None before enough answers, 0 without live items."""
        if self._live.is_empty:
            return 0.0
        return float(np.mean(self._gains)) if len(self._gains) >= self._min_gains else None

    def _canary(self) -> LiveQuery | None:
        if not self._tries:
            recent = self._live.recent.next()
            if recent is None:
                return None
            item_id, queries = recent
            row = self._live.items.rows_of([item_id])
            if row[0] >= 0:
                tries = [self._encode(query, row) for query in queries[:MAX_TRIES]]
                self._tries.extend(live_query for live_query in tries if live_query is not None)
        if self._tries and not self._live.eligible(self._tries[0].expected_rows)[0]:  # deleted, expired, or on the list of removed items
            self._tries.clear()
        return self._tries.popleft() if self._tries else None

    def _encode(self, query: object, row: Int64) -> LiveQuery | None:
        """One query that should return the item of a row. None if the query is invalid here, or a history without known items."""
        try:
            queries = encode_queries(self._bundle, self._live.items, [query])
        except InvalidQuery:  # put under a version with another kind of query
            return None
        if isinstance(queries.kind, HistoryKind) and not (queries.array >= 0).any():
            return None
        return LiveQuery(queries, self._canary_params, row, None)


def _recall(expected_rows: Int64, rows_M: Int64) -> float:
    return float(np.isin(expected_rows, rows_M).mean())
