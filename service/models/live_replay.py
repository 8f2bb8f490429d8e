"""What the probe asks of a version with live items: whether new items are found, and whether old ones still are.

The canary asks for the items that were put in last by the queries that led to them, one after the other until one finds the item: queries
of very different people have a place between them. Displacement is measured on held-out queries, each asked right after the probe asked it
of the bundle alone, so that nothing but the live catalogue is between the two answers. Both take turns with the probe's own queries, at the
same rate in all. Knows queries and item rows. Does not know where an item was placed.

Legend: M results.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.checks.golden import encode_queries
from espalier.errors import InvalidQuery
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import SearchParams, SearchResult

from ..live.live_version import LiveVersion

M = 50
"""Results among which a new item should be, and m of the recall that is compared; less where the bundle allows less."""
CANARY_ANSWERS = 64
"""Items that the canary counts, those asked for last."""
MAX_TRIES = 5
"""Queries of an item that are asked at most."""
MIN_CANARY_ANSWERS = 8
"""Items before the canary's recall is reported: one that is not found is no reason for an alert."""
MIN_GAINS = 32
"""Held-out queries that were compared before displacement is reported, or all if there are fewer."""


class Question(NamedTuple):
    """A query and what it should find.

    wanted    item rows
    frozen_M  what the bundle alone answered; None for the canary
    """

    queries: QueryBatch
    params: SearchParams
    wanted: NDArray[np.int64]
    frozen_M: NDArray[np.int64] | None


class LiveReplay:
    """The questions to one version that serves, and the findings from the last answers.

    heldout  most held-out queries that are compared
    """

    def __init__(self, bundle: Bundle, live: LiveVersion, heldout: int) -> None:
        search = bundle.manifest.search
        self._bundle, self._live = bundle, live
        self._m = min(M, search.max_m)
        self._canary_params = SearchParams.uniform(1, search.beam_size, self._m)
        self._due: deque[Question] = deque()
        self._asked: Question | None = None
        self._tries: deque[Question] = deque()  # for an item, by those of its queries that were not asked yet
        self._found: deque[bool] = deque(maxlen=CANARY_ANSWERS)
        self._gains: deque[float] = deque(maxlen=max(heldout, 1))
        self._least = min(MIN_GAINS, max(heldout, 1))

    def after(self, queries: QueryBatch, params: SearchParams, relevant: NDArray[np.int64], answer: SearchResult) -> None:
        """The bundle alone has answered a held-out query: the same is due with live items, and the canary's turn comes."""
        self._due.clear()
        if self._live.is_empty:
            for kept in (self._found, self._gains, self._tries):
                kept.clear()
            return
        wanted = relevant[self._live.eligible(relevant)]
        if len(wanted):
            self._due.append(Question(queries, replace(params, mask_B=None), wanted, answer.item_rows_BM[0, : self._m]))
        canary = self._canary()
        if canary is not None:
            self._due.append(canary)

    def next(self) -> tuple[QueryBatch, SearchParams] | None:
        """The question that is due, None where none is."""
        self._asked = self._due.popleft() if self._due else None
        return None if self._asked is None else (self._asked.queries, self._asked.params)

    def take(self, result: SearchResult) -> None:
        asked = self._asked
        if asked is None:
            return
        rows_M = result.item_rows_BM[0, : self._m]
        if asked.frozen_M is None:
            found = bool(np.isin(asked.wanted, rows_M).all())
            if found or not self._tries:
                self._found.append(found)
                self._tries.clear()
        else:
            self._gains.append(_recall(asked.wanted, rows_M) - _recall(asked.wanted, asked.frozen_M))

    @property
    def canary_recall(self) -> float | None:
        """Share of new items that one of their queries found; None before MIN_CANARY_ANSWERS of them, NaN where there is none."""
        if self._live.is_empty or not len(self._live.recent):
            return float("nan")
        return float(np.mean(self._found)) if len(self._found) >= MIN_CANARY_ANSWERS else None

    @property
    def displacement(self) -> float | None:
        """Mean recall with live items less that without, over the last round; None before enough answers, 0 where nothing is live."""
        if self._live.is_empty:
            return 0.0
        return float(np.mean(self._gains)) if len(self._gains) >= self._least else None

    def _canary(self) -> Question | None:
        if not self._tries:
            recent = self._live.recent.next()
            if recent is None:
                return None
            item_id, queries = recent
            row = self._live.items.rows_of([item_id])
            if row[0] >= 0:
                questions = [self._by(query, row) for query in queries[:MAX_TRIES]]
                self._tries.extend(question for question in questions if question is not None)
        if self._tries and not self._live.eligible(self._tries[0].wanted)[0]:  # deleted, expired, or on the list of removed items
            self._tries.clear()
        return self._tries.popleft() if self._tries else None

    def _by(self, query: object, row: NDArray[np.int64]) -> Question | None:
        """The question for an item by one of its queries; None where that asks for nothing."""
        try:
            queries = encode_queries(self._bundle, self._live.items, [query])
        except InvalidQuery:  # put in under another version, whose queries were other ones
            return None
        if isinstance(queries.kind, HistoryKind) and not (queries.array >= 0).any():
            return None
        return Question(queries, self._canary_params, row, None)


def _recall(wanted: NDArray[np.int64], rows_M: NDArray[np.int64]) -> float:
    return float(np.isin(wanted, rows_M).mean())
