"""What a search is expected to take, and whether a queue is too long to join.

Knows seconds and queries. Does not know requests, engines or threads. Written here, because no library applies CoDel to an expected wait at
arrival; the packages for rate limits count requests, which differ in cost by three orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RISE, FALL = 0.1, 0.5
"""Weight of the newest call in the running mean of a query's cost, where it cost more than expected and where less. One slow call (the
first of all, say) is forgotten after a few others, before a request is refused for it."""
STANDING_S = 0.05
"""A wait that is longer than in overload for this time is a standing queue, not a burst."""
OVERLOAD_S = 1.0
"""Overload lasts at least this long. It is checked as often whether it is over; Retry-After is as long."""
FIRST_S = 0.25
"""The load of a new overload is first counted over this time."""
OVER_LOAD = 0.9
"""The load, as a share of the capacity, below which overload is over."""
QUEUE_CALLS, MORE_CALLS = 2.0, 4.0
"""Engine calls that a new request waits for at most in overload: QUEUE_CALLS + MORE_CALLS ÷ load. With fewer, the engine runs dry between
random arrivals, most often at a load near 1: there a queue of 6 calls keeps it busy for 93 % of the time and one of 1.5 calls for 73 %. At
a load of 10, 2.4 calls suffice."""
STREAM_CALLS = 1.5
"""The same for streams, at any time. They always have more queries, so the engine never runs dry, and single requests keep their room."""
SHORT_S = 0.003
"""No request is refused for a wait as short as this."""
SERIAL_CALL_S = 1e-3
"""On a CPU a call costs the sum of its queries, and all answers come at its end, so batching only saves hand-overs between threads (tens of
microseconds each). A call is filled up to this time."""


@dataclass(frozen=True)
class Limits:
    """What one Batcher takes.

    max_batch           most queries in one engine call; a request with more takes several calls
    serial              whether queries of a call cost one after the other (CPU), see Cost
    max_queue           most queries that wait
    burst_s             longest expected wait of an accepted request
    max_wait_s          how long a free engine waits for more queries than it has
    smallest_beam_size  down to which a beam may shrink when the deadline is near; None: never
    calls               engine calls at once: several where the engine waits for other machines
    inline_s            a single query that is expected to take no longer is searched by the event loop itself where the engine is free: the
                        hand-over to a thread and back takes as long. 0: never
    """

    max_batch: int = 16
    serial: bool = True
    max_queue: int = 1024
    burst_s: float = 0.1
    max_wait_s: float = 0.0
    smallest_beam_size: int | None = None
    calls: int = 1
    inline_s: float = 0.0

    @property
    def call_s(self) -> float:
        """Seconds up to which a call is filled."""
        return SERIAL_CALL_S if self.serial else math.inf

    @property
    def background_batch(self) -> int:
        """Most queries of a background request in one call, which others wait for."""
        return 1 if self.serial else self.max_batch


class Cost:
    """Seconds of engine time by beam size, learned from the calls.

    Kept per power of two of the beam size. A power without calls is assumed to cost in proportion to its beam. Any thread may read while
    one learns.

    serial  a call costs the sum of its queries (CPU); otherwise it costs as much as its most expensive query (GPU)
    """

    def __init__(self, serial: bool) -> None:
        self.serial = serial
        self._seconds: dict[int, float] = {}

    def of(self, beam_size: int) -> float:
        """Seconds of one query, 0 before the first call."""
        bucket, seconds = beam_size.bit_length(), self._seconds
        known = seconds.get(bucket)
        if known is not None or not seconds:
            return known or 0.0
        nearest = min(seconds, key=lambda other: (abs(other - bucket), other))
        return seconds[nearest] * 2.0 ** (bucket - nearest)

    def is_short(self, beam_size: int, seconds: float) -> bool:
        """Whether queries of such a beam were seen to take no longer."""
        return 0 < self._seconds.get(beam_size.bit_length(), 0.0) <= seconds

    def of_call(self, queries: Sequence[tuple[int, int]]) -> float:
        """Seconds of one call of (beam size, number of queries) groups."""
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
        """Seconds until the engine is free for one more query.

        queries, seconds  that wait, and what they take one after the other
        running_s         seconds of each call that may run at once; 0: it does not
        """
        ahead = seconds + sum(running_s) if self.serial else max(running_s) * (queries / max_batch)
        return ahead / len(running_s)

    def affordable(self, beam_size: int, smallest: int, seconds: float, queries: int = 1, others_s: float = 0.0) -> int:
        """The largest beam with which some queries fit into `seconds`: the requested one, or halved until they do, but at least `smallest`.

        others_s  what the other queries of the call take
        """
        if self.serial:
            seconds = (seconds - others_s) / queries
        while beam_size > smallest and self.of(beam_size) > seconds:
            beam_size = max(beam_size // 2, smallest)
        return beam_size


class Admission:
    """Whether one more request may wait.

    A burst may fill the queue up to `burst_s`. A queue that overflows, or that is never as short as `most_calls` engine calls within
    STANDING_S, is not a burst: work arrives faster than it is done, and a long queue would only make everybody wait (CoDel, RFC 8289,
    applied to the expected wait at arrival). From then on the queue is kept as short as `most_calls` (or SHORT_S, if that is longer).

    Overload is over once the load was below OVER_LOAD for OVERLOAD_S. The load is the number of arrivals that found the engine busy,
    divided by the number that were accepted: random arrivals see the average state, and only accepted queries keep the engine busy. (The
    number of refusals is no measure: so short a queue overflows now and then at two thirds of the capacity, too, and one stall of the
    machine would be followed by refusals for as long as that load goes on.)

    max_queue   most queries that wait, whatever they cost
    burst_s     longest expected wait
    overloaded   as of the last arrival
    on_overload  called when overload begins and when it ends
    most_calls   engine calls that a new request waits for at most in overload, by the load of the last OVERLOAD_S
    """

    def __init__(self, max_queue: int, burst_s: float, on_overload: Callable[[bool], None] = lambda overloaded: None) -> None:
        self.max_queue, self.burst_s, self._on_overload = max_queue, burst_s, on_overload
        self.overloaded, self.most_calls = False, QUEUE_CALLS + MORE_CALLS
        self._standing_since: float | None = None
        self._since, self._count_s = 0.0, OVERLOAD_S  # the time whose load is counted
        self._accepted, self._busy = 0, 0  # queries in it that were accepted, and those that found the engine busy, refused or not

    def refuses(self, now: float, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether to refuse a request of `queries` queries, when `waiting` queries are before it.

        now     seconds of any one clock
        wait_s  expected seconds of the queue before it · call_s  expected seconds of an engine call
        """
        short = not self.is_full(waiting, queries, wait_s, call_s)
        if short:
            self._standing_since = None
        elif self._standing_since is None:
            self._standing_since = now
        if not self._in_overload(now):
            standing = self._standing_since is not None and now - self._standing_since >= STANDING_S
            if not standing and not self._is_longer(waiting, queries, wait_s, self.burst_s):
                return False
            self._set_overloaded(True)
            self._count_from(now, FIRST_S)
        return not short

    def refused(self, queries: int) -> None:
        """Count queries that found no room."""
        self._busy += queries

    def accepted(self, queries: int, busy: bool) -> None:
        """Count queries that joined the queue without waiting for room. busy: whether the engine had work."""
        self._accepted += queries
        self._busy += queries if busy else 0

    def end(self) -> None:
        """Nothing will arrive any more."""
        self._set_overloaded(False)

    def is_full(self, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether the queue is longer than it may be in overload, with `queries` more; the rest as in `refuses`."""
        return self._is_longer(waiting, queries, wait_s, self._short_s(call_s, self.most_calls))

    def has_room(self, waiting: int, queries: int, wait_s: float, call_s: float) -> bool:
        """Whether a stream may add `queries` queries to the queue."""
        return not self._is_longer(waiting, queries, wait_s, self._short_s(call_s, STREAM_CALLS))

    def _in_overload(self, now: float) -> bool:
        if self.overloaded and now - self._since >= self._count_s:
            paused = now - self._since >= 2 * OVERLOAD_S  # nothing arrived for a while
            load = self._busy / max(self._accepted, 1)
            self._set_overloaded(not paused and (load >= OVER_LOAD or self._count_s < OVERLOAD_S))
            self.most_calls = QUEUE_CALLS + MORE_CALLS / (max(load, 1.0) if self.overloaded else 1.0)
            self._count_from(now, OVERLOAD_S)
        return self.overloaded

    def _set_overloaded(self, overloaded: bool) -> None:
        if overloaded != self.overloaded:
            self.overloaded = overloaded
            self._on_overload(overloaded)

    def _count_from(self, now: float, seconds: float) -> None:
        self._since, self._count_s, self._accepted, self._busy = now, seconds, 0, 0

    def _short_s(self, call_s: float, calls: float) -> float:
        return min(max(calls * call_s, SHORT_S), self.burst_s)

    def _is_longer(self, waiting: int, queries: int, wait_s: float, longest_s: float) -> bool:
        return waiting > 0 and (waiting + queries > self.max_queue or wait_s > longest_s)
