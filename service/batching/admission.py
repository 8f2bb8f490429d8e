"""Admission control: the expected cost of a search, and whether a queue is too long to join.

Knows seconds and queries. Does not know requests, engines or threads. No library applies CoDel to the expected wait at arrival. Rate-limit
packages count requests, whose costs here differ by three orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RISE, FALL = 0.1, 0.5
"""Weight of the newest call in the running mean of a query's cost: RISE if it cost more than expected, FALL if less. FALL is larger so that
a few normal calls outweigh one slow one (the first of all, say) before a request is refused because of it."""
STANDING_S = 0.05
"""A queue that is longer than the overload limit for this time is a standing queue, not a burst."""
OVERLOAD_S = 1.0
"""Least duration of overload, and the interval at which its end is checked. Retry-After is the same."""
FIRST_COUNT_S = 0.25
"""Time over which the load is counted first after overload begins."""
END_LOAD = 0.9
"""Overload ends when the load, as a share of the capacity, is below this."""
QUEUE_CALLS, MORE_CALLS = 2.0, 4.0
"""Longest queue in overload, in engine calls: QUEUE_CALLS + MORE_CALLS ÷ load. With a shorter queue the engine is idle at times between
random arrivals, most of all at a load near 1: a queue of 6 calls keeps it busy for 93 % of the time, one of 1.5 calls for 73 %. At a load
of 10, 2.4 calls suffice."""
STREAM_CALLS = 1.5
"""Longest queue that a stream may join, at any time. A stream always has more queries, so the engine stays busy and others have room."""
SHORT_S = 0.003
"""No request is refused for a wait as short as this."""
SERIAL_CALL_S = 1e-3
"""On a CPU a call takes the sum of its queries' times, and all answers come at its end. So batching only saves hand-overs between threads
(tens of microseconds each), and a call is filled up to this time."""


@dataclass(frozen=True)
class Limits:
    """The limits of one Batcher.

    max_batch           most queries in one engine call; a request with more takes several calls
    serial              whether a call costs the sum of its queries (CPU), see Cost
    max_queue           most queries that wait
    burst_s             longest expected wait of an accepted request
    max_wait_s          how long an idle engine waits for more queries after the first
    smallest_beam_size  smallest beam after shrinking for a deadline; None: beams do not shrink
    calls               simultaneous engine calls
    remote              whether the engine waits for other machines: it is told deadlines, and the origins of requests
    inline_s            if the engine is free, the event loop itself searches for a single query that is expected to take at most this long,
                        because the hand-over to a thread and back takes as long. 0: never
    """

    max_batch: int = 16
    serial: bool = True
    max_queue: int = 1024
    burst_s: float = 0.1
    max_wait_s: float = 0.0
    smallest_beam_size: int | None = None
    calls: int = 1
    remote: bool = False
    inline_s: float = 0.0

    @property
    def call_s(self) -> float:
        """Longest expected duration of a call of several parts."""
        return SERIAL_CALL_S if self.serial else math.inf

    @property
    def background_batch(self) -> int:
        """Most queries of a background request in one call. Other requests may have to wait for this call."""
        return 1 if self.serial else self.max_batch


class Cost:
    """Engine seconds of a query by beam size, learned from the calls.

    Beam sizes share one estimate per power of two. A power without calls is estimated from the nearest one, in proportion to the beam. Any
    thread may read while one thread learns.

    serial  a call costs the sum of its queries (CPU); otherwise it costs as much as its most expensive query (GPU)
    """

    def __init__(self, serial: bool) -> None:
        self.serial = serial
        self._seconds: dict[int, float] = {}

    def of(self, beam_size: int) -> float:
        """Expected seconds of one query; 0 before the first call."""
        bucket, seconds = beam_size.bit_length(), self._seconds
        bucket_s = seconds.get(bucket)
        if bucket_s is not None or not seconds:
            return bucket_s or 0.0
        nearest = min(seconds, key=lambda other: (abs(other - bucket), other))
        return seconds[nearest] * 2.0 ** (bucket - nearest)

    def is_short(self, beam_size: int, seconds: float) -> bool:
        """Whether queries of this beam size have been measured, and take at most `seconds`."""
        return 0 < self._seconds.get(beam_size.bit_length(), 0.0) <= seconds

    def of_call(self, queries: Sequence[tuple[int, int]]) -> float:
        """Expected seconds of one call. queries: (beam size, number of queries) pairs."""
        if self.serial:
            return sum([self.of(beam_size) * count for beam_size, count in queries])
        return max([self.of(beam_size) for beam_size, _ in queries], default=0.0)

    def learn(self, queries: Sequence[tuple[int, int]], engine_s: float) -> None:
        expected = self.of_call(queries)
        if expected <= 0:
            count = sum(count for _, count in queries) if self.serial else 1
            self._seconds = self._seconds | {beam_size.bit_length(): engine_s / count for beam_size, _ in queries}
            return
        factor = 1 + (RISE if engine_s > expected else FALL) * (engine_s / expected - 1)
        self._seconds = self._seconds | {beam_size.bit_length(): factor * self.of(beam_size) for beam_size, _ in queries}

    def wait_s(self, queries: int, seconds: float, running_s: Sequence[float], max_batch: int) -> float:
        """Expected seconds until the engine is free for one more query.

        queries, seconds  number of waiting queries, and their seconds one after the other
        running_s         expected seconds of each simultaneous call; 0: it does not run
        """
        ahead_s = seconds + sum(running_s) if self.serial else max(running_s) * (queries / max_batch)
        return ahead_s / len(running_s)

    def affordable(self, beam_size: int, smallest: int, seconds: float, queries: int = 1, others_s: float = 0.0) -> int:
        """The largest beam with which `queries` queries fit into `seconds`.

        The requested beam is halved until they fit, down to `smallest`. others_s: expected seconds of the other queries of the call.
        """
        if self.serial:
            seconds = (seconds - others_s) / queries
        while beam_size > smallest and self.of(beam_size) > seconds:
            beam_size = max(beam_size // 2, smallest)
        return beam_size


class Admission:
    """Whether one more request may wait.

    A burst may fill the queue up to `burst_s`. Overload begins when the queue overflows, or is longer than `most_calls` engine calls for
    STANDING_S: then work arrives faster than it is done, and a long queue would only delay every request (CoDel, RFC 8289, applied to the
    expected wait at arrival). In overload the queue is limited to `most_calls` engine calls (or SHORT_S, if that is longer).

    Overload ends once the load was below END_LOAD for OVERLOAD_S. The load is the number of queries that arrived while the engine was
    busy, divided by the number of accepted queries: random arrivals see the average state, and only accepted queries keep the engine busy.
    (The number of refusals does not measure the load: such a short queue sometimes overflows even at two thirds of the capacity. After one
    stall of the machine, refusals would then go on for as long as that load does.)

    max_queue    most queries that wait, whatever they cost
    burst_s      longest expected wait
    overloaded   as of the last arrival
    on_overload  called with True when overload begins, with False when it ends
    most_calls   longest queue in overload, in engine calls, by the load of the last OVERLOAD_S
    """

    def __init__(self, max_queue: int, burst_s: float, on_overload: Callable[[bool], None] = lambda overloaded: None) -> None:
        self.max_queue, self.burst_s, self._on_overload = max_queue, burst_s, on_overload
        self.overloaded, self.most_calls = False, QUEUE_CALLS + MORE_CALLS
        self._standing_since: float | None = None
        self._count_began, self._count_s = 0.0, OVERLOAD_S  # when counting the load began, and for how long
        self._accepted_queries = self._busy_queries = 0  # since then: accepted ones; all that arrived while the engine was busy

    def refuses(self, now: float, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether to refuse a request of `queries` queries behind `waiting` queries.

        now     seconds of one clock, any
        wait_s  expected wait of the request · call_s  expected seconds of an engine call
        """
        is_short = not self.is_full(waiting, queries, wait_s, call_s)
        if is_short:
            self._standing_since = None
        elif self._standing_since is None:
            self._standing_since = now
        if not self._update_overload(now):
            standing = self._standing_since is not None and now - self._standing_since >= STANDING_S
            if not standing and not self._exceeds(waiting, queries, wait_s, self.burst_s):
                return False
            self._set_overloaded(True)
            self._count_from(now, FIRST_COUNT_S)
        return not is_short

    def refused(self, queries: int) -> None:
        """Count refused queries."""
        self._busy_queries += queries

    def accepted(self, queries: int, busy: bool) -> None:
        """Count queries that joined the queue without waiting for room. busy: whether the engine already had work."""
        self._accepted_queries += queries
        self._busy_queries += queries if busy else 0

    def end(self) -> None:
        """End overload: no more requests will arrive."""
        self._set_overloaded(False)

    def is_full(self, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether `queries` more would exceed the queue's limit in overload. Arguments as in `refuses`."""
        return self._exceeds(waiting, queries, wait_s, self._limit_s(call_s, self.most_calls))

    def has_room(self, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether a stream may add `queries` queries to the queue."""
        return not self._exceeds(waiting, queries, wait_s, self._limit_s(call_s, STREAM_CALLS))

    def _update_overload(self, now: float) -> bool:
        if self.overloaded and now - self._count_began >= self._count_s:
            paused = now - self._count_began >= 2 * OVERLOAD_S  # nothing arrived for a while
            load = self._busy_queries / max(self._accepted_queries, 1)
            self._set_overloaded(not paused and (load >= END_LOAD or self._count_s < OVERLOAD_S))
            self.most_calls = QUEUE_CALLS + MORE_CALLS / (max(load, 1.0) if self.overloaded else 1.0)
            self._count_from(now, OVERLOAD_S)
        return self.overloaded

    def _set_overloaded(self, overloaded: bool) -> None:
        if overloaded != self.overloaded:
            self.overloaded = overloaded
            self._on_overload(overloaded)

    def _count_from(self, now: float, seconds: float) -> None:
        self._count_began, self._count_s, self._accepted_queries, self._busy_queries = now, seconds, 0, 0

    def _limit_s(self, call_s: float, calls: float) -> float:
        return min(max(calls * call_s, SHORT_S), self.burst_s)

    def _exceeds(self, waiting: int, queries: int, wait_s: float, longest_s: float) -> bool:
        return waiting > 0 and (waiting + queries > self.max_queue or wait_s > longest_s)
