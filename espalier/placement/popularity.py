"""How popular a live item is taken to be, by how many events it has had and by how many each trained item has.

    share(n) = (n + α) / (1 + β) / n̄        the posterior mean of a Poisson rate whose prior, a Gamma, has the mean n̄ and the variance of
                                            trained counts, less n̄; over the mean item
    n of an item that is put with e events and no count: (e + the mean count of trained items that have e or more) / 2

A caller may send all events of an item, or a few of many: nobody says which. From MOST_EVENTS on, the most that a request may hold, there
are more. An item without events is taken for a mean one. None is taken to be more popular than the most popular trained item: n̄ and the
variance are moments, which one number would ruin for all.

Legend: I trained items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.label_counts import LabelCounts

MOST_EVENTS = 64
"""An item with so many events may have had more than a request holds."""


class Popularity:
    """Of a bundle's items; of a bundle that does not know how popular they are, where all are alike.

    counts_I  int64[I]: events of trained items; None: not known
    """

    def __init__(self, counts: LabelCounts | None) -> None:
        self.counts_I = counts.counts_I if counts is not None and counts.counts_I.any() else None
        self._ascending_I = np.ones(1) if self.counts_I is None else np.sort(self.counts_I).astype(np.float64)
        self._mean, self._most = float(self._ascending_I.mean()), np.inf if self.counts_I is None else float(self._ascending_I[-1])
        self._sum_from_I = np.append(np.cumsum(self._ascending_I[::-1])[::-1], 0.0)
        spread = float(self._ascending_I.var()) - self._mean
        self._alpha, self._beta = (self._mean**2 / spread, self._mean / spread) if spread > 0 else (0.0, np.inf)

    def counts_of(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The events of some items (rows), at least 1; of those that are not trained, of a mean one."""
        found = np.full(len(rows), self._mean)
        if self.counts_I is not None:
            trained = rows < len(self.counts_I)
            found[trained] = self.counts_I[rows[trained]]
        at_least: NDArray[np.float64] = np.maximum(found, 1)
        return at_least

    def count(self, events: int, given: int | None) -> float:
        """How many events an item has had, of which some are at hand."""
        if given is not None:
            return float(max(events, min(given, self._most)))
        first = int(np.searchsorted(self._ascending_I, events))
        others = len(self._ascending_I) - first
        mean = float(self._sum_from_I[first]) / others if others else float(events)
        return mean if events == 0 or events >= MOST_EVENTS else (events + mean) / 2

    def share(self, count: float) -> float:
        """How often an item of so many events is wanted, in multiples of a mean one."""
        return 1.0 if np.isinf(self._beta) else (count + self._alpha) / (1 + self._beta) / self._mean
