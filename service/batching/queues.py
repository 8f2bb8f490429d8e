"""What waits for an engine: parts of requests, patient requests for which there is no room yet, and jobs between the engine's calls.

Knows their order and what they are expected to take. Does not know threads; the batcher's lock guards parts and jobs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeVar

from espalier.search import Engine

from ..batching.admission import Limits
from ..batching.parts import Part, are_apart
from ..batching.priority import TOO_LATE
from ..errors import DeadlinePassed

T = TypeVar("T")

SPARE = 64
"""Parts that do not wait any more may stay in the queue, this many and as many as wait."""
JOB_PAUSE = 3.0
"""After a job, queries have the engine for so many times as long as it took."""


class Room:
    """Patient requests that wait for room in a queue, in the order of arrival. Used by the event loop alone."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Event] = deque()

    async def enter(self, admit: Callable[[], bool], seconds: float) -> None:
        """Return once `admit()` was true for this request, and for all before it.

        Raises DeadlinePassed after `seconds`, and what `admit` raises.
        """
        if not self._waiting and admit():
            return
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(None if seconds == float("inf") else max(seconds, 0)):
                while self._waiting[0] is not turn or not admit():
                    turn.clear()
                    await turn.wait()
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        finally:
            self._waiting.remove(turn)
            self.open()  # for the next one, if there is more

    def open(self) -> None:
        """There may be room: let the first request try."""
        if self._waiting:
            self._waiting[0].set()


class PartQueue:
    """Parts in a fair order: those of one API key in the order of arrival, the keys in turn, so that each gets as much of the engine's time
    while others wait (start-time fair queuing, Goyal, Vin and Cheng 1997). With one key that is the order of arrival.

    queries  of all of them
    seconds  what they are expected to take, one after the other
    """

    def __init__(self) -> None:
        self._parts: list[tuple[float, int, Part]] = []  # a heap by start and number; also parts that do not wait any more
        self._numbers = count()
        self._now = 0.0  # the start of the part that was taken last, in seconds of each key's own engine time
        self._ends: dict[str, float] = {}  # by key where its last part ends
        self._waiting = 0
        self.queries, self.seconds = 0, 0.0

    @property
    def part_s(self) -> float:
        """What a part is expected to take on average; 0 where none waits."""
        return self.seconds / max(self._waiting, 1)

    def add(self, parts: Sequence[Part]) -> None:
        """Put the parts of a request behind those of its key."""
        for part in parts:
            part.waits = True
            self.queries += len(part.queries)
            self.seconds += part.cost_s
            self._waiting += 1
            start = max(self._now, self._ends.get(part.key, 0.0))
            self._ends[part.key] = start + part.cost_s
            heappush(self._parts, (start, next(self._numbers), part))

    def remove(self, part: Part) -> None:
        """Take out a part whose request has ended; nothing where it does not wait any more."""
        if part.waits:
            self._left(part)
            if len(self._parts) > 2 * self._waiting + SPARE:
                self._parts = [one for one in self._parts if one[2].waits]
                heapify(self._parts)

    def take(self, limits: Limits, now: float) -> list[Part]:
        """The parts of the next call, in their order; a traced part is alone. Parts that came too late are dropped."""
        taken: list[Part] = []
        size, seconds = 0, 0.0
        while self._parts:
            start, _, part = self._parts[0]
            if not part.waits:
                heappop(self._parts)
                continue
            if part.answer.done() or now >= part.deadline:  # the event loop answers it
                self._left(part)
                continue
            size += len(part.queries)
            seconds += part.cost_s
            if taken and (size > limits.max_batch or seconds > limits.call_s or are_apart(taken[0], part)):
                break
            self._now = start
            self._left(part)
            taken.append(part)
        return taken

    def before(self, key: str, cost_s: float) -> str | None:
        """The key that has more waiting than another one would have with a part of such a cost, and the most; None where none has.

        What is patient is not counted: it is not refused.
        """
        own_s, seconds = cost_s, defaultdict[str, float](float)
        for _, _, part in self._parts:
            if part.waits and part.key == key:
                own_s += part.cost_s
            elif part.waits and not part.patient:
                seconds[part.key] += part.cost_s
        longest = max(seconds, key=lambda one: seconds[one], default=None)
        return longest if longest is not None and seconds[longest] > own_s else None

    @property
    def is_shared(self) -> bool:
        """Whether requests of several keys have come since nothing waited."""
        return len(self._ends) > 1

    def last_of(self, key: str) -> Part:
        """The part of a key that would be taken last, of those that may be refused."""
        own = [one for one in self._parts if one[2].waits and one[2].key == key and not one[2].patient]
        return max(own, key=lambda one: one[:2])[2]

    def _left(self, part: Part) -> None:
        part.waits = False
        self.queries -= len(part.queries)
        self._waiting -= 1
        self.seconds -= part.cost_s
        if not self._waiting:  # numbers begin anew, so that none grows without a bound
            self._parts.clear()
            self._ends.clear()
            self.seconds = self._now = 0.0


class Jobs:
    """What the engine's thread does between calls, in turn: at any time where no query waits, else with pauses for the queries.

    clock    seconds
    waiting  those whose turn has not come
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waiting: deque[Callable[[Engine], None]] = deque()
        self._paused_until = 0.0

    def add(self, job: Callable[[Engine], T]) -> Future[T]:
        """Put a job at the end."""
        done: Future[T] = Future()

        def work(engine: Engine) -> None:
            began = self._clock()
            try:
                done.set_result(job(engine))
            except Exception as error:
                done.set_exception(error)
            ended = self._clock()
            self._paused_until = ended + JOB_PAUSE * (ended - began)

        self.waiting.append(work)
        return done

    def next(self, queries_wait: bool) -> Callable[[Engine], None] | None:
        """The job whose turn it is, of those that are waiting."""
        return None if queries_wait and self._clock() < self._paused_until else self.waiting.popleft()
