"""The assumed popularity of a live item, from the number of its events and of those of trained items.

    share(n) = (n + α) / (1 + β) / n̄        the posterior mean of a Poisson rate whose prior, a Gamma, has the mean n̄ and the variance of
                                            trained counts, less n̄; over the mean item
    n of an item that is put with e events and no count: (e + the mean count of trained items that have e or more) / 2

A caller may send all events of an item, or a few of many, and does not say which. A request with MOST_EVENTS, its limit, is assumed to
stand for more. An item without events counts as a mean item. No item counts as more popular than the most popular trained item: n̄ and the
variance are moments, which one large number would distort for all items.

Legend: I trained items.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.label_counts import LabelCounts

MOST_EVENTS = 64
"""Most events of a request."""


class Popularity:
    """The popularity of a bundle's items. In a bundle without counts all items are alike.

    counts_I  int64[I]: events of trained items; None: not known
    """

    def __init__(self, counts: LabelCounts | None) -> None:
        self.counts_I = counts.counts_I if counts is not None and counts.counts_I.any() else None
        self._ascending_I = np.ones(1) if self.counts_I is None else np.sort(self.counts_I).astype(np.float64)
        self._mean, self._most = float(self._ascending_I.mean()), np.inf if self.counts_I is None else float(self._ascending_I[-1])
        self._sum_from_I = np.append(np.cumsum(self._ascending_I[::-1])[::-1], 0.0)
        spread = float(self._ascending_I.var()) - self._mean
        self._alpha, self._beta = (self._mean**2 / spread, self._mean / spread) if spread > 0 else (0.0, np.inf)

    def counts_of(self, rows: Int64) -> Float64:
        """The event counts of some item rows, at least 1; the mean for items that were not trained."""
        counts = np.full(len(rows), self._mean)
        if self.counts_I is not None:
            is_trained = rows < len(self.counts_I)
            counts[is_trained] = self.counts_I[rows[is_trained]]
        at_least_1: Float64 = np.maximum(counts, 1)
        return at_least_1

    def count(self, events: int, stated: int | None) -> float:
        """The assumed number of events of an item. events: those at hand; stated: the caller's count, or None."""
        if stated is not None:
            return float(max(events, min(stated, self._most)))
        first = int(np.searchsorted(self._ascending_I, events))
        others = len(self._ascending_I) - first
        mean = float(self._sum_from_I[first]) / others if others else float(events)
        return mean if events == 0 or events >= MOST_EVENTS else (events + mean) / 2

    def share(self, count: float) -> float:
        """How often an item with this number of events is relevant, in multiples of a mean item."""
        return 1.0 if np.isinf(self._beta) else (count + self._alpha) / (1 + self._beta) / self._mean
