"""What a search is expected to take, and whether a queue is too long to join.

Knows seconds and queries. Does not know requests, engines or threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RISE, FALL = 0.1, 0.5
"""Weight of the newest call in the running mean of what a query costs, where it cost more than expected and where less: one slow call (the
first of all, say) is forgotten after a few others, before it has turned anybody away."""
STANDING_S = 0.05
"""How long the wait may be longer than it would be in overload, before it is a standing queue and no burst."""
OVERLOAD_S = 1.0
"""How long overload lasts at least, and how often it is asked whether it is over; clients are told to stay away as long."""
FIRST_S = 0.25
"""How long the load is counted for the first time, since that of a new overload is not known."""
OVER_LOAD = 0.9
"""The load, as a share of what can be done, below which overload is over."""
QUEUE_CALLS, MORE_CALLS = 2.0, 4.0
"""Engine calls that a newcomer waits for at most in overload: QUEUE_CALLS + MORE_CALLS ÷ load. With fewer the engine runs dry between
random arrivals, and the more often the nearer the load is to 1: there a queue of 6 calls keeps it busy for 93 % of the time and one of 1.5
calls for 73 %; at a load of 10, 2.4 calls do."""
STREAM_CALLS = 1.5
"""The same for streams at any time: they always have more to do, so that the engine never runs dry, and single requests keep their room."""
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

    A burst may fill the queue up to `burst_s`. A queue that overflows, or that never gets as short as `most_calls` engine calls within
    STANDING_S, is no burst: work comes faster than it can be done, and a long queue would only make everybody wait (CoDel, RFC 8289, on the
    expected wait at arrival). From then on the queue is kept as short as `most_calls` (or SHORT_S, if that is longer).

    Overload is over once the load was below OVER_LOAD for OVERLOAD_S. The load is how many arrivals found the engine busy, over how many
    were accepted: random arrivals see what is the case on average, and the engine was busy with the accepted alone.
    (Refusals do not tell: so short a queue overflows now and then at two thirds of the capacity, too, and one stall of the machine would be
    followed by refusals for as long as that load goes on.)

    max_queue   most queries that wait, whatever they cost
    burst_s     longest expected wait
    overloaded  as of the last arrival
    most_calls  engine calls that a newcomer waits for at most in overload, by the load of the last OVERLOAD_S
    """

    def __init__(self, max_queue: int, burst_s: float) -> None:
        self.max_queue, self.burst_s = max_queue, burst_s
        self.overloaded, self.most_calls = False, QUEUE_CALLS + MORE_CALLS
        self._standing_since: float | None = None
        self._since, self._count_s = 0.0, OVERLOAD_S  # the time whose load is counted
        self._accepted, self._busy = 0, 0  # queries in it that were accepted, and those that found the engine busy, refused or not

    def refuses(self, now: float, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether a request of `queries` queries must be turned away, when `waiting` queries are before it.

        now     seconds of any one clock
        wait_s  what the queue before it is expected to take · call_s  what an engine call is
        """
        short = not self._is_longer(waiting, queries, wait_s, self._short_s(call_s, self.most_calls))
        if short:
            self._standing_since = None
        elif self._standing_since is None:
            self._standing_since = now
        if not self._in_overload(now):
            standing = self._standing_since is not None and now - self._standing_since >= STANDING_S
            if not standing and not self._is_longer(waiting, queries, wait_s, self.burst_s):
                return False
            self.overloaded = True
            self._count_from(now, FIRST_S)
        if not short:
            self._busy += queries
        return not short

    def accepted(self, queries: int, busy: bool) -> None:
        """So many queries that would not have waited for room have joined the queue. busy: whether the engine had something to do."""
        self._accepted += queries
        self._busy += queries if busy else 0

    def has_room(self, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether a stream may put so many queries behind those that wait."""
        return not self._is_longer(waiting, queries, wait_s, self._short_s(call_s, STREAM_CALLS))

    def _in_overload(self, now: float) -> bool:
        if self.overloaded and now - self._since >= self._count_s:
            paused = now - self._since >= 2 * OVERLOAD_S  # nobody has come for a while
            load = self._busy / max(self._accepted, 1)
            self.overloaded = not paused and (load >= OVER_LOAD or self._count_s < OVERLOAD_S)
            self.most_calls = QUEUE_CALLS + MORE_CALLS / (max(load, 1.0) if self.overloaded else 1.0)
            self._count_from(now, OVERLOAD_S)
        return self.overloaded

    def _count_from(self, now: float, seconds: float) -> None:
        self._since, self._count_s, self._accepted, self._busy = now, seconds, 0, 0

    def _short_s(self, call_s: float, calls: float) -> float:
        return min(max(calls * call_s, SHORT_S), self.burst_s)

    def _is_longer(self, waiting: int, queries: int, wait_s: float, longest_s: float) -> bool:
        return waiting > 0 and (waiting + queries > self.max_queue or wait_s > longest_s)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds for Retry-After."""
    return max(1, math.ceil(wait_s))
