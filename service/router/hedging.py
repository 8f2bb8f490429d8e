"""When to send a request to a second replica before the first answers: after the shard's 95th percentile, for at most 5 % of requests.

One slow replica then delays no answer for longer than that (Dean and Barroso, "The Tail at Scale", 2013). Knows only seconds.
"""

from __future__ import annotations

from collections import deque

SHARE = 0.05
"""Second tries, as a share of first tries."""
MAX_BURST = 10.0
"""Most second tries in a row, after a time without any."""
WINDOW = 256
"""The percentile is of so many last answers of a shard."""
MIN_ANSWERS = 20
"""Answers before the percentile is measured."""
UPDATE_EVERY = 16
"""Answers from one measurement of the percentile to the next."""
UNKNOWN_S = 0.05
"""The percentile before it is measured."""


class Budget:
    """A token bucket: each first try adds `share` of a second try."""

    def __init__(self, share: float = SHARE) -> None:
        self._share, self._tokens = share, MAX_BURST if share else 0.0

    def first_try(self) -> None:
        self._tokens = min(self._tokens + self._share, MAX_BURST)

    def take(self) -> bool:
        """Whether a second try may be made. If so, it is paid for."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Latencies:
    """The running 95th percentile of a shard's seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._count = 0
        self.p95_s = UNKNOWN_S

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._count += 1
        if self._count == MIN_ANSWERS or (self._count > MIN_ANSWERS and self._count % UPDATE_EVERY == 0):
            ordered = sorted(self._seconds)
            self.p95_s = ordered[int(0.95 * len(ordered))]
