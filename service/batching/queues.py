"""What waits for an engine: parts of requests, patient requests for which there is no room yet, and jobs between the engine's calls.

Knows their order and what they are expected to take. Does not know threads; the batcher's lock guards parts and jobs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from espalier.search import Engine

from ..batching.admission import Limits
from ..batching.parts import Part, are_apart
from ..batching.priority import TOO_LATE
from ..errors import DeadlinePassed

T = TypeVar("T")

JOB_PAUSE = 3.0
"""After a job, queries have the engine for so many times as long as it took."""


class Room:
    """Patient requests that wait for room in a queue, those of each key in the order of arrival. Used by the event loop alone."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    async def enter(self, key: str, admit: Callable[[], bool], seconds: float) -> None:
        """Return once `admit()` was true for this request, and for all of its key before it.

        Raises DeadlinePassed after `seconds`, and what `admit` raises.
        """
        before = self._waiting.setdefault(key, deque())
        if not before and admit():
            self._forget(key)
            return
        turn = asyncio.Event()
        before.append(turn)
        try:
            async with asyncio.timeout(None if seconds == float("inf") else max(seconds, 0)):
                while before[0] is not turn or not admit():
                    turn.clear()
                    await turn.wait()
        except TimeoutError:
            raise DeadlinePassed(TOO_LATE) from None
        finally:
            before.remove(turn)
            self._forget(key)
            self.open()  # for the next one, if there is more

    def open(self) -> None:
        """There may be room: let the first request of each key try."""
        for waiting in self._waiting.values():
            if waiting:
                waiting[0].set()

    def _forget(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]


@dataclass(eq=False)
class _Flow:
    """What waits of one key.

    reached  engine seconds of its own that it has had, as far as it takes turns with others: who is behind the others is next
    queries  of its parts
    seconds  what these are expected to take of the engine
    """

    reached: float = 0.0
    parts: deque[Part] = field(default_factory=deque)
    queries: int = 0
    seconds: float = 0.0


class PartQueue:
    """Parts in a fair order: those of one API key in the order of arrival, the keys in turn, so that each gets as much of the engine's time
    while others wait (start-time fair queuing, Goyal, Vin and Cheng 1997). With one key that is the order of arrival.

    queries  of all of them
    seconds  what they are expected to take, one after the other
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}  # of the keys that have come since nothing waited
        self._now = 0.0  # how far the key had got whose part was taken last
        self._count = 0
        self.queries, self.seconds = 0, 0.0

    @property
    def part_s(self) -> float:
        """What a part is expected to take on average; 0 where none waits."""
        return self.seconds / max(self._count, 1)

    @property
    def is_shared(self) -> bool:
        """Whether requests of several keys have come since nothing waited. The probe has none."""
        return sum(map(bool, self._flows)) > 1

    def has(self, key: str) -> bool:
        return key in self._flows and bool(self._flows[key].parts)

    def ahead(self, key: str) -> tuple[int, float]:
        """The queries that the engine takes before another one of a key, and their seconds one after the other.

        All of the key's own, and of each other key those that it takes until it has had as much of the engine.
        """
        own = self._flows.get(key, _Flow())
        until = max(own.reached, self._now if not own.parts else 0.0) + own.seconds
        queries, seconds = float(own.queries), own.seconds
        for other, flow in self._flows.items():
            if other != key and flow.seconds > 0:
                share = min(max(until - flow.reached, 0.0) / flow.seconds, 1.0)
                queries, seconds = queries + share * flow.queries, seconds + share * flow.seconds
            elif other != key:
                queries += flow.queries
        return round(queries), seconds

    def add(self, parts: Sequence[Part]) -> None:
        """Put the parts of a request behind those of its key."""
        for part in parts:
            part.waits = True
            self.queries += len(part.queries)
            self.seconds += part.cost_s
            self._count += 1
            flow = self._flows.setdefault(part.key, _Flow())
            if not flow.parts:  # who was away gets no more for it
                flow.reached = max(flow.reached, self._now)
            flow.parts.append(part)
            flow.queries += len(part.queries)
            flow.seconds += part.share_s

    def remove(self, part: Part) -> None:
        """Take out a part whose request has ended; nothing where it does not wait any more."""
        if part.waits:
            self._flows[part.key].parts.remove(part)
            self._left(part)

    def take(self, limits: Limits, now: float) -> list[Part]:
        """The parts of the next call, in their order; a traced part is alone. Parts that came too late are dropped."""
        taken: list[Part] = []
        size, seconds = 0, 0.0
        while self._count:
            flow = min((flow for flow in self._flows.values() if flow.parts), key=lambda flow: flow.reached)
            part = flow.parts[0]
            if part.answer.done() or now >= part.deadline:  # the event loop answers it
                self._left(flow.parts.popleft())
                continue
            size += len(part.queries)
            seconds += part.cost_s
            if taken and (size > limits.max_batch or seconds > limits.call_s or are_apart(taken[0], part)):
                break
            self._now = flow.reached
            flow.reached += part.share_s
            self._left(flow.parts.popleft())
            taken.append(part)
        return taken

    def _left(self, part: Part) -> None:
        part.waits = False
        flow = self._flows[part.key]
        self.queries -= len(part.queries)
        self._count -= 1
        self.seconds = self.seconds - part.cost_s if self._count else 0.0
        flow.queries -= len(part.queries)
        flow.seconds = flow.seconds - part.share_s if flow.parts else 0.0
        if not self._count:  # numbers begin anew, so that none grows without a bound
            self._flows, self._now = {}, 0.0


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
