"""What a search is expected to take, and whether a queue is too long to join.

Knows seconds and queries. Does not know requests, engines or threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RISE, FALL = 0.1, 0.5
"""Weight of the newest call in the running mean of what a query costs, where it cost more than expected and where less: one slow call (the
first of all, say) is forgotten after a few others, before it has turned anybody away."""
OVERLOAD_S = 1.0
"""How long overload lasts at least, and how often it is looked whether it is over; clients are told to stay away as long."""
BUSY = 0.95
"""The share of the time that the work offered takes, from which on it is too much."""
SHORT_CALLS = 1.5
"""Engine calls that a newcomer waits for at most in overload: the one that runs, and not quite another."""
SHORT_S = 0.003
"""Waiting that is too short to be refused for."""


class Cost:
    """Seconds of engine time by beam size, learned from the calls.

    Kept per power of two of the beam size; a power that was not seen yet is taken to cost in proportion to its beam.

    serial  the queries of a call cost one after the other (a CPU); otherwise a call costs what its most expensive query does (a GPU)
    """

    def __init__(self, serial: bool) -> None:
        self.serial = serial
        self._seconds: dict[int, float] = {}

    def of(self, beam_size: int) -> float:
        """Seconds of one query, 0 as long as nothing is known."""
        bucket = beam_size.bit_length()
        known = self._seconds.get(bucket)
        if known is not None or not self._seconds:
            return known or 0.0
        nearest = min(self._seconds, key=lambda other: (abs(other - bucket), other))
        return self._seconds[nearest] * 2.0 ** (bucket - nearest)

    def of_call(self, queries: Sequence[tuple[int, int]]) -> float:
        """Seconds of one call of (beam size, number of queries) groups."""
        if self.serial:
            return sum(self.of(beam_size) * count for beam_size, count in queries)
        return max((self.of(beam_size) for beam_size, _ in queries), default=0.0)

    def learn(self, queries: Sequence[tuple[int, int]], engine_s: float) -> None:
        """Take in a call that took `engine_s`."""
        expected = self.of_call(queries)
        if expected <= 0:
            count = sum(count for _, count in queries) if self.serial else 1
            self._seconds |= {beam_size.bit_length(): engine_s / count for beam_size, _ in queries}
            return
        factor = 1 + (RISE if engine_s > expected else FALL) * (engine_s / expected - 1)
        self._seconds |= {beam_size.bit_length(): factor * self.of(beam_size) for beam_size, _ in queries}

    def affordable(self, beam_size: int, smallest: int, seconds: float) -> int:
        """The largest beam that fits into `seconds`: the one that was asked for, else a halving of it, at least `smallest`."""
        while beam_size > smallest and self.of(beam_size) > seconds:
            beam_size = max(beam_size // 2, smallest)
        return beam_size


class Admission:
    """Whether one more request may wait.

    A burst may fill the queue up to `burst_s`. Once that has overflowed there is overload, not a burst, and a full queue would only make
    everybody wait: the queue is kept as short as SHORT_CALLS engine calls (or SHORT_S, if that is longer), so that who is accepted is
    answered about as fast as ever and the engine still has always something to do. It is over once less work came in OVERLOAD_S than could
    be done, refused work included. (Refusals do not tell: so short a queue overflows now and then at two thirds of the capacity, too, and
    one stall of the machine would be followed by refusals for as long as that load goes on.)

    max_queue  most queries that wait, whatever they cost
    burst_s    longest expected wait
    """

    def __init__(self, max_queue: int, burst_s: float) -> None:
        self.max_queue, self.burst_s = max_queue, burst_s
        self._overload = False
        self._since, self._offered_s = 0.0, 0.0  # of the time that is looked at

    def refuses(self, now: float, waiting: int, queries: int, wait_s: float, call_s: float, query_s: float = 0.0) -> bool:
        """Whether a request of `queries` queries must be turned away, when `waiting` queries are before it.

        now     seconds of any one clock
        wait_s  what the queue before it is expected to take · call_s  what an engine call is · query_s  what a query is
        """
        refused = self.is_long(waiting, queries, wait_s, call_s, overload=self._in_overload(now))
        if refused:
            if not self._overload:
                self._overload, self._since, self._offered_s = True, now, 0.0
            self._offered_s += queries * query_s
        return refused

    def accepted(self, queries: int, query_s: float) -> None:
        """So many queries have joined the queue that would not have waited for room."""
        self._offered_s += queries * query_s

    def _in_overload(self, now: float) -> bool:
        if self._overload and now - self._since >= OVERLOAD_S:
            self._overload = self._offered_s >= BUSY * (now - self._since)
            self._since, self._offered_s = now, 0.0
        return self._overload

    def is_long(self, waiting: int, queries: int, wait_s: float, call_s: float, overload: bool) -> bool:
        """Whether the queue is longer than it may be, in overload or in a burst.

        Streams, which wait for room, never fill more than overload's short queue: a burst of single requests still finds its own.
        """
        longest_s = min(max(SHORT_CALLS * call_s, SHORT_S), self.burst_s) if overload else self.burst_s
        return waiting > 0 and (waiting + queries > self.max_queue or wait_s > longest_s)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for Retry-After."""
    return max(1, math.ceil(wait_s))
