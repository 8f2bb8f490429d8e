"""When a shard is asked a second time before its first replica has answered: after the shard's 95th percentile, for at most 5 % of queries.

One slow replica then delays no answer for longer than that (Dean and Barroso, "The Tail at Scale", 2013). Knows seconds alone.
"""

from __future__ import annotations

from collections import deque

SHARE = 0.05
"""Second tries, as a share of first tries."""
SAVED = 10.0
"""Second tries that may be made in a row, after a time without any."""
KEPT = 256
"""Answers of a shard that its percentile is of."""
LEAST = 20
"""Answers after which a percentile is known."""
RECOUNTED = 16
"""Answers after which it is found anew."""


class Budget:
    def __init__(self, share: float = SHARE) -> None:
        self._share, self._left = share, SAVED if share else 0.0

    def first_try(self) -> None:
        self._left = min(self._left + self._share, SAVED)

    def take(self) -> bool:
        """Whether a second try may be made; it is counted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Latencies:
    """The running 95th percentile of how long a shard takes.

    unknown_s  what is assumed before LEAST answers
    """

    def __init__(self, unknown_s: float) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self._unknown_s, self._count = unknown_s, 0
        self.p95_s = unknown_s

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._count += 1
        if self._count == LEAST or (self._count > LEAST and self._count % RECOUNTED == 0):
            ordered = sorted(self._seconds)
            self.p95_s = ordered[int(0.95 * len(ordered))]
