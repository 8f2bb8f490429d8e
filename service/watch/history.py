"""The last 24 hours of one model, a row of numbers a minute, and what happened: bounded, whatever comes.

Knows totals (totals.py) and times. Does not know where the totals come from or who reads the history.

Legend: T rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ..watch.totals import COUNTS, STATES, Totals

STEP_S = 60
KEPT_S = 24 * 3600
MAX_ROWS = KEPT_S // STEP_S
MAX_EVENTS = 200
RATE_S = 30
"""A row that was added for now may be much less than a minute younger than the last; a rate over so short a time would swing."""
LATENCY_S = 300
"""Quantiles of latency are those of the requests of this time, as in the recorded series of Prometheus."""
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}
COLUMNS = (*COUNTS, *STATES, *QUANTILES)


@dataclass
class History:
    """One model's.

    at      times of the rows in seconds since 1970, ascending
    rows    numbers by the order of COLUMNS
    events  (time, what happened), oldest first
    recent  the totals of the last LATENCY_S, for quantiles, and to see what has changed
    """

    at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    rows: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    recent: deque[Totals] = field(default_factory=lambda: deque(maxlen=LATENCY_S // STEP_S + 1))

    def add(self, totals: Totals) -> None:
        """A row of the numbers of now. Times that do not rise are left out: a clock may be set back."""
        if self.at and totals.at <= self.at[-1]:
            return
        self.events += [(totals.at, what) for what in _changes(self.recent[-1] if self.recent else None, totals)]
        while self.recent and totals.at - self.recent[0].at > LATENCY_S:
            self.recent.popleft()
        before = self.recent[0].buckets if self.recent else {}
        took = {bound: max(count - before.get(bound, 0.0), 0.0) for bound, count in totals.buckets.items()}
        self.recent.append(totals)
        quantiles = [quantile(took, share) for share in QUANTILES.values()]
        self.at.append(totals.at)
        self.rows.append([totals.values.get(name, nan) for name in (*COUNTS, *STATES)] + quantiles)
        while self.at[0] <= totals.at - KEPT_S:
            self.at.popleft()
            self.rows.popleft()
        while self.events and self.events[0][0] <= totals.at - KEPT_S:
            self.events.popleft()

    def copy(self) -> History:
        """Another one, to which rows may be added."""
        return History(self.at.copy(), self.rows.copy(), self.events.copy(), self.recent.copy())

    def columns(self) -> Columns:
        rows = np.array(self.rows, np.float64).reshape(len(self.at), len(COLUMNS))
        return Columns(np.array(self.at, np.float64), dict(zip(COLUMNS, rows.T, strict=True)))

    def to_json(self) -> bytes:
        """All of it, for another process."""
        recent = [[one.at, one.values, [*one.buckets.items()], one.ready] for one in self.recent]  # the bound of the last bucket is null
        return orjson.dumps({"at": [*self.at], "rows": [*self.rows], "events": [*self.events], "recent": recent})

    @classmethod
    def from_json(cls, content: bytes) -> History:
        """What another process of the same service has written."""
        document: Mapping[str, Any] = orjson.loads(content)
        history = cls()
        history.at.extend(document["at"])
        history.rows.extend([[nan if value is None else value for value in row] for row in document["rows"]])
        history.events.extend([(at, what) for at, what in document["events"]])
        for at, values, buckets, ready in document["recent"]:
            numbers = {name: nan if value is None else value for name, value in values.items()}
            history.recent.append(Totals(at, numbers, {inf if le is None else le: count for le, count in buckets}, tuple(ready)))
        return history


@dataclass(frozen=True)
class Columns:
    """The rows of a history as arrays. at_T: seconds since 1970; by_name: float64[T] each, NaN where a number is unknown."""

    at_T: NDArray[np.float64]
    by_name: Mapping[str, NDArray[np.float64]]

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        return self.by_name[name]

    def increase(self, name: str, seconds: float) -> NDArray[np.float64]:
        """float64[T]: how much a count grew in the `seconds` before each row, or since the first row. What falls was begun anew."""
        grown_T = np.diff(np.nan_to_num(self.by_name[name]), prepend=0.0).clip(0)
        sum_T = np.cumsum(grown_T)
        return np.asarray(sum_T - sum_T[self._since(seconds)])

    def rate(self, name: str, seconds: float = RATE_S) -> NDArray[np.float64]:
        """float64[T]: growth per second since the row before, or one at least `seconds` older; NaN for the first row."""
        between_T = self.at_T - self.at_T[self._since(seconds)]
        rate_T = np.full(len(between_T), nan)
        np.divide(self.increase(name, seconds), between_T, out=rate_T, where=between_T > 0)
        return rate_T

    def _since(self, seconds: float) -> NDArray[np.int64]:
        """int64[T]: the last row that is so much older, to the second, or the first."""
        return np.maximum(np.searchsorted(self.at_T, self.at_T - seconds + 1, side="right") - 1, 0)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """A quantile of a histogram, as Prometheus estimates it: linear within the bucket. NaN where there is nothing.

    buckets  upper bound, ascending, the last one infinite → count of all that is not above it
    """
    bounds, counts = [*buckets], [*buckets.values()]
    if not counts or counts[-1] <= 0:
        return nan
    rank = share * counts[-1]
    i = next(i for i, count in enumerate(counts) if count >= rank)
    if bounds[i] == inf:
        return bounds[i - 1] if i else nan
    below, low = (counts[i - 1], bounds[i - 1]) if i else (0.0, 0.0)
    return low + (bounds[i] - low) * ((rank - below) / (counts[i] - below) if counts[i] > below else 1.0)


def _changes(before: Totals | None, now: Totals) -> Sequence[str]:
    """What happened between two totals, or until the first ones. Workers that load the same version are one event."""
    old_ready = () if before is None else before.ready
    found = [f"Version {version} serves." for version in now.ready if version not in old_ready]
    found += [f"Version {version} serves no longer." for version in old_ready if version not in now.ready]
    new = now.values.get("default_version", nan)
    old = 0.0 if before is None else before.values.get("default_version", nan)
    if new != old and not isnan(new) and not isnan(old):
        found.append(f"Version {int(new)} is the default now." if new else "No version is ready.")
    if before is None:
        return found
    for name, one, several in _COUNTED_EVENTS:
        grown = now.values.get(name, nan) - before.values.get(name, nan)
        if grown > 0:
            found.append(one if grown == 1 else several.format(int(grown)))
    if now.values.get("desired_state_wrong", 0) > before.values.get("desired_state_wrong", 0):
        found.append("The files of desired state cannot be read.")
    return found


_COUNTED_EVENTS = (
    ("reload_failures", "A version failed to load, or a change was rolled back.", "{} loads failed or changes were rolled back."),
    ("worker_restarts", "A worker ended and was replaced.", "{} workers ended and were replaced."),
)
