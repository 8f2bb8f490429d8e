"""The last 24 hours of one model: a row of numbers a minute, and events. Its size is bounded.

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

from espalier.arrays import Float64, Int64

from ..watch.totals import NAMES, Totals

STEP_S = 60
HISTORY_S = 24 * 3600
MAX_ROWS = HISTORY_S // STEP_S
MAX_EVENTS = 200
RATE_S = 30
"""Shortest time of a rate. A reader's last row may be only seconds younger than the one before, and a rate over seconds would swing."""
LATENCY_S = 300
"""Quantiles of latency are of the requests of this time, as in the recorded series of Prometheus."""
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}
COLUMNS = (*NAMES, *QUANTILES)


@dataclass
class History:
    """The history of one model.

    at      times of the rows in seconds since 1970, ascending
    rows    numbers in the order of COLUMNS
    events  (time, text), oldest first
    recent  the totals of the last LATENCY_S, for quantiles and to detect events
    """

    at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    rows: deque[list[float]] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    recent: deque[Totals] = field(default_factory=lambda: deque(maxlen=LATENCY_S // STEP_S + 1))

    def add(self, totals: Totals) -> None:
        """Add a row. Ignore totals that are not newer than the last row: the clock may have been set back."""
        if self.at and totals.at <= self.at[-1]:
            return
        self.events += [(totals.at, event) for event in _events(self.recent, totals)]
        while self.recent and totals.at - self.recent[0].at > LATENCY_S:
            self.recent.popleft()
        before = self.recent[0].buckets if self.recent else {}
        buckets = {bound: max(count - before.get(bound, 0.0), 0.0) for bound, count in totals.buckets.items()}
        self.recent.append(totals)
        quantiles = [quantile(buckets, share) for share in QUANTILES.values()]
        self.at.append(totals.at)
        self.rows.append([totals.values.get(name, nan) for name in NAMES] + quantiles)
        while self.at[0] <= totals.at - HISTORY_S:
            self.at.popleft()
            self.rows.popleft()
        while self.events and self.events[0][0] <= totals.at - HISTORY_S:
            self.events.popleft()

    def copy(self) -> History:
        """A copy to which rows may be added."""
        return History(self.at.copy(), self.rows.copy(), self.events.copy(), self.recent.copy())

    def columns(self) -> Columns:
        rows = np.array(self.rows, np.float64).reshape(len(self.at), len(COLUMNS))
        return Columns(np.array(self.at, np.float64), dict(zip(COLUMNS, rows.T, strict=True)))

    def to_json(self) -> bytes:
        """The history for another process."""
        recent = [
            [totals.at, totals.values, [*totals.buckets.items()], totals.ready] for totals in self.recent
        ]  # an infinite bound is null
        return orjson.dumps({"at": [*self.at], "rows": [*self.rows], "events": [*self.events], "recent": recent})

    @classmethod
    def from_json(cls, content: bytes) -> History:
        """The history that another process of the same service has written."""
        document: Mapping[str, Any] = orjson.loads(content)
        history = cls()
        history.at.extend(document["at"])
        history.rows.extend([[nan if value is None else value for value in row] for row in document["rows"]])
        history.events.extend([(at, event) for at, event in document["events"]])
        for at, values, buckets, ready in document["recent"]:
            numbers = {name: nan if value is None else value for name, value in values.items()}
            history.recent.append(Totals(at, numbers, {inf if le is None else le: count for le, count in buckets}, tuple(ready)))
        return history


@dataclass(frozen=True)
class Columns:
    """The rows of a history as arrays. at_T: seconds since 1970; by_name: float64[T] each, NaN for unknown values."""

    at_T: Float64
    by_name: Mapping[str, Float64]

    def __getitem__(self, name: str) -> Float64:
        return self.by_name[name]

    def increase(self, name: str, seconds: float) -> Float64:
        """float64[T]: how much a count grew in the `seconds` before each row, or since the first row. A count that falls was reset."""
        growth_T = np.diff(np.nan_to_num(self.by_name[name]), prepend=0.0).clip(0)
        sum_T = np.cumsum(growth_T)
        return np.asarray(sum_T - sum_T[self._since(seconds)])

    def rate(self, name: str, seconds: float = RATE_S) -> Float64:
        """float64[T]: growth per second since the last row that is at least `seconds` older; NaN for the first row."""
        elapsed_T = self.at_T - self.at_T[self._since(seconds)]
        rate_T = np.full(len(elapsed_T), nan)
        np.divide(self.increase(name, seconds), elapsed_T, out=rate_T, where=elapsed_T > 0)
        return rate_T

    def _since(self, seconds: float) -> Int64:
        """int64[T]: for each row, the last row that is at least `seconds` older, to the second, or else the first row."""
        return np.maximum(np.searchsorted(self.at_T, self.at_T - seconds + 1, side="right") - 1, 0)


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """A quantile of a histogram, estimated as by Prometheus: linear within the bucket. NaN if the histogram is empty.

    buckets  upper bound, ascending, the last infinite → cumulative count
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


def _events(recent: Sequence[Totals], now: Totals) -> Sequence[str]:
    """The events since the last totals, or before the first. If several workers load a version, that is one event."""
    before = recent[-1] if recent else None
    old_ready = () if before is None else before.ready
    events = [f"Version {version} serves." for version in now.ready if version not in old_ready]
    events += [f"Version {version} serves no longer." for version in old_ready if version not in now.ready]
    defaults = (totals.values.get("default_version", nan) for totals in reversed(recent))
    old = next((default for default in defaults if not isnan(default)), 0.0)  # a model is there before its first version is loaded
    new = now.values.get("default_version", nan)
    if new != old and not isnan(new):
        events.append(f"Version {int(new)} is the default now." if new else "No version is ready.")
    if before is None:
        return events
    for name, singular, plural in _COUNTED_EVENTS:
        growth = now.values.get(name, nan) - before.values.get(name, nan)
        if growth > 0:
            events.append(singular if growth == 1 else plural.format(int(growth)))
    if now.values.get("desired_state_wrong", 0) > before.values.get("desired_state_wrong", 0):
        events.append("The files of desired state cannot be read.")
    return events


_COUNTED_EVENTS = (
    ("reload_failures", "A version failed to load, or a change was rolled back.", "{} loads failed or changes were rolled back."),
    ("worker_restarts", "A worker ended and was replaced.", "{} workers ended and were replaced."),
)
