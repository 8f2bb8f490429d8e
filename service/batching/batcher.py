"""Queries of concurrent requests in one engine call.

While the engine is busy, requests wait in a queue. When it is free, it takes up to `max_batch` of their queries. Each loaded version has
one thread that runs the engine, or several if the engine takes several calls at once, so the event loop never waits for it. One exception:
if the engine is free, the event loop itself searches for a single query that is known to be short. Expired requests, and those whose
clients hung up, never reach the engine. `Priority` says how a request waits. Knows query batches and results, not HTTP and not models.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar, TypeVarTuple

import numpy as np

from espalier.engines.stages import joined
from espalier.placement.parents import Search
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Engine, SearchContext, SearchParams, SearchResult
from espalier.text.sparse_rows import SparseRows

from ..batching.admission import Admission, Cost, Limits
from ..batching.priority import ANSWER_TOO_LATE, SEARCH_TOO_LATE, Priority
from ..batching.queues import Jobs, RequestQueue, Room
from ..batching.request_parts import Answer, RequestPart, cut_result, join_answers, merge_parts, split_request
from ..errors import DeadlinePassed, EngineFailed, NotReady, QueueFull, ServiceError

log = logging.getLogger(__name__)

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

JOB_QUERIES = 4
"""Queries of one job on a CPU, where a call costs the sum of its queries."""
QUIET_S = 0.5
QUIET_JOB_QUERIES = 16
"""If no queries were searched for QUIET_S seconds, a job has QUIET_JOB_QUERIES: fewer calls and hand-overs between threads. A request that
arrives meanwhile waits a few milliseconds for the job."""

INLINE_VALUES = 1024
"""Largest sum of a query's numbers, excluded items and results for which its beam size predicts its search time."""


def _query_values(queries: QueryBatch, params: SearchParams) -> int:
    numbers = queries.rows.values if isinstance(queries.rows, SparseRows) else queries.rows
    return int(numbers.size + params.m_B.sum() + (0 if params.exclude_BE is None else params.exclude_BE.size))


class Batcher:
    """Feeds one engine from many requests.

    name         part of the threads' names
    on_call      called after every engine call with its number of queries and its seconds
    on_overload  called with True when overload begins, with False when it ends
    clock        seconds; deadlines are times of this clock
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        name: str,
        on_overload: Callable[[bool], None] = lambda overloaded: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits, self._engine, self._clock = limits, engine, clock
        self.on_call: Callable[[int, float], None] = lambda batch, seconds: None
        self._cost = Cost(limits.serial)
        self._room = Room()
        self._lock = threading.Lock()  # guards the attributes below
        self._admission = Admission(limits.max_queue, limits.burst_s, on_overload)
        self._queue, self._background, self._jobs = RequestQueue(), RequestQueue(), Jobs(clock)
        self._call_s = [0.0] * limits.calls  # expected seconds of each thread's running call; 0: none runs
        self._closed = False
        self._wake_locks: list[threading.Lock] = []  # of the threads that wait for work; releasing one wakes its thread
        self._last_call_at = -QUIET_S  # when the last engine call ended
        self._arrivals: list[QueryBatch] = []  # short queries that arrived in this turn of the event loop
        self._room_wanted = False  # a patient request found no room since the engine last took queries
        self._engine_locks = [threading.Lock() for _ in range(limits.calls)]  # held during a thread's engine calls and jobs
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"engine-{name}", daemon=True) for number in range(limits.calls)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Number of queries that wait for the engine, not counting background requests."""
        return self._queue.queries

    def expected_s(self, queries: int, beam_size: int) -> float:
        """Expected engine seconds of this many queries; 0 before the first call."""
        return self._cost.of_call([(beam_size, queries)])

    async def search(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float = float("inf"),
        priority: Priority = Priority.NORMAL,
        origin: tuple[tuple[str, str], ...] = (),
        fixed_beam: bool = False,
        key: str = "",
    ) -> Answer:
        """The answer to a request's queries. Cancelling the call removes them from the queue.

        deadline    queries that are still in the queue at this time never reach the engine
        fixed_beam  never shrink the beams, even close to the deadline
        origin      of `SearchContext`
        key         the name of the request's API key: waiting keys get equal engine time
        Raises NotReady after `drain`, QueueFull, DeadlinePassed; if an engine call with one of the queries raised, its ServiceError or
        EngineFailed.
        """
        if self._clock() >= deadline:
            raise DeadlinePassed(SEARCH_TOO_LATE)
        loop = asyncio.get_running_loop()
        if priority is Priority.NORMAL and (answer := await self._search_inline(queries, params, deadline, loop, fixed_beam)):
            return answer
        context = SearchContext(deadline if self.limits.remote and deadline < float("inf") else None, origin)
        queue, size = self._queue, self.limits.max_batch
        if priority is Priority.BACKGROUND:
            queue, size = self._background, self.limits.background_batch
        pieces = [(queries, params)] if params.trace else split_request(queries, params, size)
        request_parts = [self._part(*piece, deadline, context, loop, fixed_beam, key) for piece in pieces]
        if priority is Priority.PATIENT:
            await self._room.enter(key, partial(self._admit, request_parts, queue, priority), deadline - self._clock())
        else:
            self._admit(request_parts, queue, priority)
        expiry = None if deadline == float("inf") else loop.call_later(max(deadline - self._clock(), 0), _expire, request_parts)
        try:
            if len(request_parts) == 1:
                return await request_parts[0].answer
            return join_answers(await asyncio.gather(*(part.answer for part in request_parts)))
        finally:
            if expiry is not None:
                expiry.cancel()
            self._forget(request_parts, queue)
            self._room.open()
            del request_parts  # an exception in them holds this frame, and with it its callers

    def check_overload(self, queries: int, key: str = "") -> None:
        """Raise QueueFull in overload, if `search` would. Cheap: call it before any work is done for the request."""
        if self._admission.overloaded:
            with self._lock:
                self._check_room(queries, key)

    def run(self, job: Callable[[Engine], T]) -> Future[T]:
        """Run a job on the engine's thread between its calls. May be called from any thread.

        Jobs run in order, when no query waits. If queries always wait, jobs get 1 / (1 + JOB_PAUSE) of a thread's time.
        Raises NotReady after `drain`.
        """
        with self._lock:
            self._check_open()
            done = self._jobs.add(job)
            self._wake(1)
        return done

    def parents_now(self, search: Search, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """The parents that queries lead to, a few queries at a time: on this thread if the engine is idle, else as jobs.

        search  `Pipeline.parents` of the engine
        May be called from any thread but the event loop's. Raises NotReady, and the errors of the engine.
        """
        job_queries = QUIET_JOB_QUERIES if self._clock() - self._last_call_at > QUIET_S else JOB_QUERIES
        job_queries = min(job_queries, self.limits.max_batch) if self.limits.serial else self.limits.max_batch
        results = [self._parents_of(search, *group) for group in split_request(queries, params, job_queries)]
        try:
            return joined([result.result() if isinstance(result, Future) else result for result in results])
        finally:
            for result in results:  # after an error nobody waits for the rest
                if isinstance(result, Future):
                    result.cancel()

    def _parents_of(self, search: Search, queries: QueryBatch, params: SearchParams) -> SearchResult | Future[SearchResult]:
        with self._lock:
            self._check_open()
            is_idle = self.limits.serial and bool(self._wake_locks)  # a serial engine has one thread; while it sleeps, no job waits
            has_engine = is_idle and self._engine_locks[0].acquire(blocking=False)
        if not has_engine:
            return self.run(lambda _: search(queries, params))
        try:
            return search(queries, params)
        finally:
            self._engine_locks[0].release()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and finish the accepted work. Returns False if that took longer than `timeout_s`."""
        with self._lock:
            self._closed = True
            self._admission.end()
            self._wake(len(self._threads))
        self._room.open()
        ends_at = self._clock() + timeout_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(ends_at - self._clock(), 0))
        if any(thread.is_alive() for thread in self._threads):
            return False
        for engine_lock in self._engine_locks:  # another event loop may be searching
            if not await asyncio.to_thread(engine_lock.acquire, True, max(ends_at - self._clock(), 0)):
                return False
            engine_lock.release()
        return True

    # -- the event loop's side ------------------------------------------------------------------------------------------

    def _part(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float,
        context: SearchContext,
        loop: asyncio.AbstractEventLoop,
        fixed_beam: bool = False,
        key: str = "",
    ) -> RequestPart:
        beam_size = params.largest_beam
        cost_s = share_s = self._cost.of_call([(beam_size, len(queries))])
        if not self.limits.serial:  # other parts use the rest of its calls
            share_s *= len(queries) / self.limits.max_batch
        return RequestPart(queries, params, loop.create_future(), deadline, beam_size, cost_s, share_s, context, fixed_beam, key)

    async def _search_inline(
        self, queries: QueryBatch, params: SearchParams, deadline: float, loop: asyncio.AbstractEventLoop, fixed_beam: bool
    ) -> Answer | None:
        """The answer if the event loop itself may search for it, else None. Raises EngineFailed and what the engine raises on purpose."""
        if len(queries) != 1 or not self._cost.is_short(params.largest_beam, self.limits.inline_s):
            return None
        if params.trace or _query_values(queries, params) > INLINE_VALUES:
            return None
        arrivals = self._arrivals
        arrivals.append(queries)
        try:
            await asyncio.sleep(0)  # other requests of this turn arrive, and then share one call
        finally:
            self._arrivals = []
        with self._lock:
            is_idle = self._wake_locks and not self._admission.overloaded  # in overload, every query must be counted
            if not is_idle or len(arrivals) > 1 or not self._engine_locks[0].acquire(blocking=False):
                return None
        try:
            part = self._part(queries, params, deadline, NO_CONTEXT, loop, fixed_beam)
            (answer,) = self._search_call([part], part.cost_s)
        finally:
            self._engine_locks[0].release()
        if isinstance(answer, Exception):
            try:
                raise answer
            finally:
                del answer  # it holds this frame
        return answer

    def _admit(self, request_parts: Sequence[RequestPart], queue: RequestQueue, priority: Priority) -> bool:
        """Put a request in its queue. Returns False if a patient request finds no room. Raises NotReady, QueueFull."""
        count = sum([len(part.queries) for part in request_parts])
        with self._lock:
            self._check_open()
            if priority is Priority.PATIENT and not self._has_room(count, request_parts[0].key):
                self._room_wanted = True
                return False
            if priority is Priority.NORMAL:
                self._check_room(count, request_parts[0].key)
                self._admission.accepted(count, busy=self._queue.queries > 0 or min(self._call_s) > 0)
            queue.add(request_parts)
            self._wake(len(request_parts))
        return True

    def _wake(self, count: int) -> None:
        """Wake up to `count` sleeping threads. The caller holds the lock."""
        for _ in range(min(count, len(self._wake_locks))):
            self._wake_locks.pop().release()

    def _check_open(self) -> None:
        """Raise NotReady after `drain`. The caller holds the lock."""
        if self._closed:
            raise NotReady("The service is shutting down.")

    def _check_room(self, queries: int, key: str) -> None:
        """Raise QueueFull if there is no room. The caller holds the lock.

        If several keys have requests, the wait of this request decides, not the length of the queue: other keys may have longer waits.
        """
        if not self._admission.refuses(self._clock(), self._queue.queries, queries, self._wait_s(), self._one_call_s()):
            return
        queries_ahead, shared = self._queue.queries, self._queue.is_shared
        if shared or not self._queue.has_queued(key):
            queries_ahead, seconds = self._queue.work_ahead(key)
            if not self._admission.is_full(queries_ahead, queries, self._wait_s(queries_ahead, seconds), self._one_call_s()):
                return
        self._admission.refused(queries)
        raise QueueFull(f"{queries_ahead} queries wait already.", self._wait_s(), crowds=shared and self._queue.has_queued(key))

    def _one_call_s(self) -> float:
        """Expected seconds of a call, at least of a mean part: one large waiting request is no overload. The caller holds the lock."""
        return max(*self._call_s, self._queue.mean_part_s)

    def _has_room(self, queries: int, key: str) -> bool:
        """Whether patient queries of a key may join the queue. The caller holds the lock."""
        queries_ahead, seconds = self._queue.work_ahead(key) if self._queue.is_shared else (self._queue.queries, self._queue.seconds)
        return self._admission.has_room(queries_ahead, queries, self._wait_s(queries_ahead, seconds), max(self._call_s))

    def _wait_s(self, queries: int | None = None, seconds: float | None = None) -> float:
        """Expected wait of a request behind `queries` queries of `seconds`; None: behind all waiting ones. The caller holds the lock."""
        queries = self._queue.queries if queries is None else queries
        seconds = self._queue.seconds if seconds is None else seconds
        return self._cost.wait_s(queries, seconds, self._call_s, self.limits.max_batch)

    def _forget(self, request_parts: Sequence[RequestPart], queue: RequestQueue) -> None:
        """Remove the parts of a request that has ended from their queue."""
        for part in request_parts:
            if part.is_queued:
                with self._lock:
                    queue.remove(part)
            if not part.answer.done():
                part.answer.cancel()

    def _deliver(self, call_parts: Sequence[RequestPart], answers: Sequence[Answer | Exception]) -> None:
        for part, answer in zip(call_parts, answers, strict=True):
            if part.answer.done():
                continue
            if isinstance(answer, Exception):
                part.answer.set_exception(answer)
            else:
                part.answer.set_result(answer)
        self._room.open()

    # -- the engine's threads -------------------------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        wake = threading.Lock()
        wake.acquire()
        while self._serve_one(number, wake):
            pass

    def _serve_one(self, number: int, wake: threading.Lock) -> bool:
        """Run one engine call or job on thread `number`, or wait until there may be one. Returns False when no more will come.

        (A function of its own, so that the thread releases the arrays of a call before it waits for the next.)
        """
        with self._lock:
            job = self._jobs.next(queries_wait=self._queue.queries > 0) if self._jobs.waiting else None
            call_parts = [] if job is not None else self._take(number)
            room_wanted = bool(call_parts) and self._room_wanted
            self._room_wanted = self._room_wanted and not call_parts
            if job is None and not call_parts:
                if self._jobs.waiting:  # the job waited for queries that had all expired
                    return True
                if self._closed:
                    return False
                self._wake_locks.append(wake)
        if room_wanted:
            self._call_back(call_parts, self._room.open)
        if job is None and not call_parts:
            wake.acquire()
            if self.limits.max_wait_s > 0 and not self._closed and self.depth < self.limits.max_batch:
                time.sleep(self.limits.max_wait_s)
            return True
        with self._engine_locks[number]:  # the event loop may be searching
            if job is not None:
                job(self._engine)
                return True
            answers = self._search_call(call_parts, self._call_s[number])
        self._call_back(call_parts, self._deliver, call_parts, answers)
        return True

    def _take(self, number: int) -> list[RequestPart]:
        """The parts of the next call; background requests only if no other query waits. The caller holds the lock."""
        now = self._clock()
        call_parts = self._queue.take(self.limits, now) or self._background.take(self.limits, now)
        self._call_s[number] = self._cost.of_call([(part.beam_size, len(part.queries)) for part in call_parts])
        return call_parts

    def _search_call(self, call_parts: list[RequestPart], call_s: float) -> Sequence[Answer | Exception]:
        """The answers to the parts of a call, or the error of its search. call_s: the expected seconds of the call."""
        try:
            if self.limits.smallest_beam_size is not None:
                self._degrade(call_parts, self.limits.smallest_beam_size, call_s)
            first = call_parts[0]
            queries, params, context = (first.queries, first.params, first.context) if len(call_parts) == 1 else merge_parts(call_parts)
            began = self._clock()
            result = self._engine.search(queries, params, context)
            self._last_call_at = self._clock()
            engine_s = self._last_call_at - began
            self.on_call(len(queries), engine_s)
            if not params.trace:
                with self._lock:
                    self._cost.learn([(part.beam_size, len(part.queries)) for part in call_parts], engine_s)
            results = zip([result] if len(call_parts) == 1 else cut_result(result, call_parts), call_parts, strict=True)
            return [Answer(rows, engine_s, len(queries), part.beam_size, part.degraded) for rows, part in results]
        except ServiceError as error:  # as of a router whose shards do not answer
            return [error.with_traceback(None)] * len(call_parts)
        except Exception as error:
            log.exception("an engine call of %d requests failed", len(call_parts))
            return [EngineFailed(repr(error)) for _ in call_parts]

    def _call_back(self, call_parts: Sequence[RequestPart], callback: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Call `callback` in the event loop of the parts."""
        try:
            call_parts[0].answer.get_loop().call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop has closed; %d answers are dropped", len(call_parts))

    def _degrade(self, call_parts: list[RequestPart], smallest: int, call_s: float) -> None:
        """Shrink the beams of parts that would miss their deadline in a call of `call_s`, but not below `smallest`."""
        now = self._clock()
        for part in call_parts:
            remaining_s = part.deadline - now
            if call_s <= remaining_s or part.beam_size <= smallest or part.params.trace or part.fixed_beam:
                continue
            beam_size = self._cost.affordable(part.beam_size, smallest, remaining_s, len(part.queries), call_s - part.cost_s)
            if beam_size < part.beam_size:
                part.degraded, part.beam_size = True, beam_size
                part.params = replace(part.params, beam_size_B=np.minimum(part.params.beam_size_B, beam_size))


def _expire(request_parts: Sequence[RequestPart]) -> None:
    for part in request_parts:
        if not part.answer.done():
            part.answer.set_exception(DeadlinePassed(ANSWER_TOO_LATE))
