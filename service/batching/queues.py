"""The queues of an engine: parts of requests, patient requests that wait for room, and jobs that run between engine calls.

Knows the order of the queues and their expected engine time. Does not know threads: the batcher's lock guards parts and jobs.
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
from ..batching.priority import SEARCH_TOO_LATE
from ..batching.request_parts import RequestPart, cannot_share_call
from ..errors import DeadlinePassed

T = TypeVar("T")

JOB_PAUSE = 3.0
"""After a job, waiting queries have the engine for this many times the duration of the job."""


class Room:
    """Patient requests that wait for room in a queue, in the order of arrival for each key. Only the event loop uses it."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    async def enter(self, key: str, admit: Callable[[], bool], seconds: float) -> None:
        """Return once `admit()` was true for this request and for all earlier requests of its key.

        Raises DeadlinePassed after `seconds`, and the errors of `admit`.
        """
        queue = self._waiting.setdefault(key, deque())
        if not queue and admit():
            self._forget(key)
            return
        turn = asyncio.Event()
        queue.append(turn)
        try:
            async with asyncio.timeout(None if seconds == float("inf") else max(seconds, 0)):
                while queue[0] is not turn or not admit():
                    turn.clear()
                    await turn.wait()
        except TimeoutError:
            raise DeadlinePassed(SEARCH_TOO_LATE) from None
        finally:
            queue.remove(turn)
            self._forget(key)
            self.open()  # there may be room for the next request, too

    def open(self) -> None:
        """Let the first request of each key try again, because there may be room."""
        for queue in self._waiting.values():
            if queue:
                queue[0].set()

    def _forget(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]


@dataclass(eq=False)
class _Flow:
    """The waiting parts of one API key.

    virtual_time  engine seconds that the key has had; after idle time, at least the queue's virtual time. The key with the least is next
    queries       number of queries in the waiting parts
    seconds       expected engine seconds of the waiting parts
    """

    virtual_time: float = 0.0
    waiting_parts: deque[RequestPart] = field(default_factory=deque)
    queries: int = 0
    seconds: float = 0.0


class RequestQueue:
    """Waiting parts in a fair order (start-time fair queuing, Goyal, Vin and Cheng 1997).

    Parts of one API key are taken in the order of arrival. Keys take turns, so that all waiting keys get equal engine time.

    queries  number of queries in all parts
    seconds  expected engine seconds of all parts, one after the other
    """

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}  # of the keys that had requests since the queue was last empty
        self._virtual_time = 0.0  # of the key whose part was taken last, before it was taken
        self._count = 0  # waiting parts
        self.queries, self.seconds = 0, 0.0

    @property
    def mean_part_s(self) -> float:
        """Mean expected engine seconds of a waiting part; 0 if none waits."""
        return self.seconds / max(self._count, 1)

    @property
    def is_shared(self) -> bool:
        """Whether several keys had requests since the queue was last empty. Requests without a key, like the probe's, do not count."""
        return sum(map(bool, self._flows)) > 1

    def has_queued(self, key: str) -> bool:
        return key in self._flows and bool(self._flows[key].waiting_parts)

    def work_ahead(self, key: str) -> tuple[int, float]:
        """The number of queries that the engine takes before the next one of a key, and their seconds one after the other.

        These are all waiting queries of the key, and those of every other key until that key has had as much engine time.
        """
        own_flow = self._flows.get(key, _Flow())
        until = max(own_flow.virtual_time, self._virtual_time if not own_flow.waiting_parts else 0.0) + own_flow.seconds
        queries, seconds = float(own_flow.queries), own_flow.seconds
        for other, flow in self._flows.items():
            if other != key and flow.seconds > 0:
                share = min(max(until - flow.virtual_time, 0.0) / flow.seconds, 1.0)
                queries, seconds = queries + share * flow.queries, seconds + share * flow.seconds
            elif other != key:
                queries += flow.queries
        return round(queries), seconds

    def add(self, request_parts: Sequence[RequestPart]) -> None:
        """Append the parts of a request to those of its key."""
        for part in request_parts:
            part.is_queued = True
            self.queries += len(part.queries)
            self.seconds += part.cost_s
            self._count += 1
            flow = self._flows.setdefault(part.key, _Flow())
            if not flow.waiting_parts:  # a key earns no engine time while it has no requests
                flow.virtual_time = max(flow.virtual_time, self._virtual_time)
            flow.waiting_parts.append(part)
            flow.queries += len(part.queries)
            flow.seconds += part.share_s

    def remove(self, part: RequestPart) -> None:
        """Remove a part whose request has ended, if it is still in the queue."""
        if part.is_queued:
            self._flows[part.key].waiting_parts.remove(part)
            self._count_out(part)

    def take(self, limits: Limits, now: float) -> list[RequestPart]:
        """Remove and return the parts of the next call, in order. A traced part gets a call of its own. Expired parts are dropped."""
        call_parts: list[RequestPart] = []
        size, seconds = 0, 0.0
        while self._count:
            flow = min((flow for flow in self._flows.values() if flow.waiting_parts), key=lambda flow: flow.virtual_time)
            part = flow.waiting_parts[0]
            if part.answer.done() or now >= part.deadline:  # the event loop answers it
                self._count_out(flow.waiting_parts.popleft())
                continue
            size += len(part.queries)
            seconds += part.cost_s
            if call_parts and (size > limits.max_batch or seconds > limits.call_s or cannot_share_call(call_parts[0], part)):
                break
            self._virtual_time = flow.virtual_time
            flow.virtual_time += part.share_s
            self._count_out(flow.waiting_parts.popleft())
            call_parts.append(part)
        return call_parts

    def _count_out(self, part: RequestPart) -> None:
        part.is_queued = False
        flow = self._flows[part.key]
        self.queries -= len(part.queries)
        self._count -= 1
        self.seconds = self.seconds - part.cost_s if self._count else 0.0
        flow.queries -= len(part.queries)
        flow.seconds = flow.seconds - part.share_s if flow.waiting_parts else 0.0
        if not self._count:  # start again at zero, so that no number grows without bound
            self._flows, self._virtual_time = {}, 0.0


class Jobs:
    """Jobs that the engine's thread runs between calls, in order. While queries wait, it pauses between jobs.

    clock    seconds
    waiting  jobs that have not begun
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waiting: deque[Callable[[Engine], None]] = deque()
        self._paused_until = 0.0

    def add(self, job: Callable[[Engine], T]) -> Future[T]:
        done: Future[T] = Future()

        def work(engine: Engine) -> None:
            if not done.set_running_or_notify_cancel():
                return
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
        """The first waiting job; None during a pause for waiting queries."""
        return None if queries_wait and self._clock() < self._paused_until else self.waiting.popleft()
