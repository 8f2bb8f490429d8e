"""Queries of concurrent requests in one engine call.

While the engine is busy, requests wait in a queue. When it is free, it takes up to `max_batch` queries of them. One thread per loaded
version runs the engine, or several where it takes several calls at once, so that the event loop never waits for it; but a query that comes
alone and is known to be short is searched by the event loop itself where the engine is free. Expired requests, and those whose clients
hung up, never reach the engine. `Priority` says how a request waits. Knows query batches and results, not HTTP and not models.
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

from espalier.engines.results import joined_parents
from espalier.engines.stages import ParentsFound
from espalier.placement.parents import Search
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Engine, SearchContext, SearchParams
from espalier.text.sparse_rows import SparseRows

from ..batching.admission import Admission, Cost, Limits
from ..batching.parts import Answer, Part, cut, join, merge, split
from ..batching.priority import TOO_LATE, Priority
from ..batching.queues import Jobs, PartQueue, Room
from ..errors import DeadlinePassed, EngineFailed, NotReady, QueueFull

log = logging.getLogger(__name__)

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

JOB_QUERIES = 4
"""Queries of one job on a CPU, where they cost one after the other."""
QUIET_S = 0.5
QUIET_JOB_QUERIES = 16
"""The same where no request has asked for so many seconds: fewer calls and hand-overs. One that comes just then waits for them, some
milliseconds."""

INLINE_VALUES = 1024
"""Numbers of a query, excluded items and results together up to which a query may take as long as others of its beam size do."""


def _values(queries: QueryBatch, params: SearchParams) -> int:
    numbers = queries.rows.values if isinstance(queries.rows, SparseRows) else queries.rows
    return int(numbers.size + params.m_B.sum() + (0 if params.exclude_BE is None else params.exclude_BE.size))


class Batcher:
    """Feeds one engine from many requests.

    name         of the threads
    on_call      called after every engine call with its number of queries and its seconds
    on_overload  called when more requests begin to arrive than are answered, and when they end to
    clock        seconds; deadlines are points of it
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        name: str,
        on_call: Callable[[int, float], None] = lambda batch, seconds: None,
        on_overload: Callable[[bool], None] = lambda overloaded: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits, self.on_call = limits, on_call
        self._engine, self._clock = engine, clock
        self._cost = Cost(limits.serial)
        self._room = Room()
        self._lock = threading.Lock()  # guards what follows
        self._admission = Admission(limits.max_queue, limits.burst_s, on_overload)
        self._queue, self._background, self._jobs = PartQueue(), PartQueue(), Jobs(clock)
        self._call_s = [0.0] * limits.calls  # what the calls that run are expected to take, by thread
        self._closed = False
        self._asleep: list[threading.Lock] = []  # of threads that wait for work, what wakes them
        self._called_at = -QUIET_S  # when queries were answered last
        self._together: list[QueryBatch] = []  # that came in one turn of the event loop, which may search for one itself
        self._room_wanted = False  # a patient request found no room since the engine last took queries
        self._calling = [threading.Lock() for _ in range(limits.calls)]  # held during a thread's engine calls and jobs
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"engine-{name}", daemon=True) for number in range(limits.calls)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Queries that wait for the engine, without those of background requests."""
        return self._queue.queries

    def expected_s(self, queries: int, beam_size: int) -> float:
        """Engine seconds that so many queries are expected to take; 0 before the first call."""
        return self._cost.of_call([(beam_size, queries)])

    async def search(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float = float("inf"),
        priority: Priority = Priority.NORMAL,
        origin: tuple[tuple[str, str], ...] = (),
        whole: bool = False,
        key: str = "",
    ) -> Answer:
        """The answer to a request's queries. Cancelling it takes them out of the queue.

        deadline  queries that the engine has not begun by then never reach it
        whole     their beams do not shrink, however near it is
        origin    of `SearchContext`
        key       whose request it is: while others wait, each gets as much of the engine's time
        Raises NotReady after `drain`, QueueFull, DeadlinePassed, EngineFailed when an engine call that held one of the queries raised.
        """
        if self._clock() >= deadline:
            raise DeadlinePassed(TOO_LATE)
        loop = asyncio.get_running_loop()
        if priority is Priority.NORMAL and await self._begin_inline(queries, params):
            return self._search_inline(self._part(queries, params, deadline, NO_CONTEXT, loop))
        context = SearchContext(deadline if self.limits.calls > 1 and deadline < float("inf") else None, origin)
        queue, size = self._queue, self.limits.max_batch
        if priority is Priority.BACKGROUND:
            queue, size = self._background, self.limits.background_batch
        pieces = [(queries, params)] if params.trace else split(queries, params, size)
        parts = [self._part(*piece, deadline, context, loop, whole, key) for piece in pieces]
        if priority is Priority.PATIENT:
            await self._room.enter(key, partial(self._admit, parts, queue, priority), deadline - self._clock())
        else:
            self._admit(parts, queue, priority)
        expiry = None if deadline == float("inf") else loop.call_later(max(deadline - self._clock(), 0), _expire, parts)
        try:
            if len(parts) == 1:
                return await parts[0].answer
            return join(await asyncio.gather(*(part.answer for part in parts)))
        finally:
            if expiry is not None:
                expiry.cancel()
            self._forget(parts, queue)
            self._room.open()
            del parts  # an exception in them holds this frame, and with it its callers

    def check_overload(self, queries: int, key: str = "") -> None:
        """Raise QueueFull where there is overload and `search` would, before anything has been spent on the request."""
        if self._admission.overloaded:
            with self._lock:
                self._check_room(queries, key)

    def run(self, job: Callable[[Engine], T]) -> Future[T]:
        """Let the engine's thread do something between its calls, beside the queries. From any thread.

        Jobs are done in turn, when no query waits; if queries always wait, they get 1 / (1 + JOB_PAUSE) of a thread's time.
        Raises NotReady after `drain`.
        """
        with self._lock:
            self._check_open()
            done = self._jobs.add(job)
            self._wake(1)
        return done

    def parents_now(self, search: Search, queries: QueryBatch, params: SearchParams) -> ParentsFound:
        """Where queries lead to, in short parts: on this thread where the engine's has nothing to do, else as jobs.

        search  `Pipeline.parents` of the engine
        From any thread but the event loop's. Raises NotReady, and what the engine raises.
        """
        at_once = QUIET_JOB_QUERIES if self._clock() - self._called_at > QUIET_S else JOB_QUERIES
        at_once = min(at_once, self.limits.max_batch) if self.limits.serial else self.limits.max_batch
        found = [self._parents_of(search, *part) for part in split(queries, params, at_once)]
        return joined_parents([part.result() if isinstance(part, Future) else part for part in found])

    def _parents_of(self, search: Search, queries: QueryBatch, params: SearchParams) -> ParentsFound | Future[ParentsFound]:
        with self._lock:
            self._check_open()
            is_idle = self.limits.serial and bool(self._asleep)  # with one thread: while it sleeps, no job waits
            is_mine = is_idle and self._calling[0].acquire(blocking=False)
        if not is_mine:
            return self.run(lambda _: search(queries, params))
        try:
            return search(queries, params)
        finally:
            self._calling[0].release()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and finish what was accepted. False when that took longer than `timeout_s`."""
        with self._lock:
            self._closed = True
            self._admission.end()
            self._wake(len(self._threads))
        self._room.open()
        ends = self._clock() + timeout_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(ends - self._clock(), 0))
        if any(thread.is_alive() for thread in self._threads):
            return False
        for calling in self._calling:  # another event loop may be searching
            if not await asyncio.to_thread(calling.acquire, True, max(ends - self._clock(), 0)):
                return False
            calling.release()
        return True

    # -- the event loop's side ------------------------------------------------------------------------------------------

    def _part(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float,
        context: SearchContext,
        loop: asyncio.AbstractEventLoop,
        whole: bool = False,
        key: str = "",
    ) -> Part:
        beam_size = int(params.beam_size_B.max(initial=1))
        cost_s = share_s = self._cost.of_call([(beam_size, len(queries))])
        if not self.limits.serial:  # a call that it fills to a part is left to others for the rest
            share_s *= len(queries) / self.limits.max_batch
        return Part(queries, params, loop.create_future(), deadline, beam_size, cost_s, share_s, context, whole, key)

    async def _begin_inline(self, queries: QueryBatch, params: SearchParams) -> bool:
        """Whether the event loop searches for a request itself. Then the engine is its own until `_search_inline` ends."""
        if len(queries) != 1 or not self._cost.is_short(int(params.beam_size_B[0]), self.limits.inline_s):
            return False
        if params.trace or _values(queries, params) > INLINE_VALUES:
            return False
        together = self._together
        together.append(queries)
        try:
            await asyncio.sleep(0)  # requests that came together all get here, and go into one call
        finally:
            self._together = []
        with self._lock:
            is_idle = self._asleep and not self._admission.overloaded  # overload ends by what is counted of the queue
            return bool(is_idle and len(together) == 1) and self._calling[0].acquire(blocking=False)

    def _search_inline(self, part: Part) -> Answer:
        try:
            (answer,) = self._answers([part], part.cost_s)
        finally:
            self._calling[0].release()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _admit(self, parts: Sequence[Part], queue: PartQueue, priority: Priority) -> bool:
        """Put a request in its queue. False where a patient one has no room. Raises NotReady, QueueFull."""
        count = sum([len(part.queries) for part in parts])
        with self._lock:
            self._check_open()
            if priority is Priority.PATIENT and not self._has_room(count, parts[0].key):
                self._room_wanted = True
                return False
            if priority is Priority.NORMAL:
                self._check_room(count, parts[0].key)
                self._admission.accepted(count, busy=self._queue.queries > 0 or min(self._call_s) > 0)
            queue.add(parts)
            self._wake(len(parts))
        return True

    def _wake(self, most: int) -> None:
        """Wake as many threads as there is new work for, of those that sleep. Holds the lock."""
        for _ in range(min(most, len(self._asleep))):
            self._asleep.pop().release()

    def _check_open(self) -> None:
        """Raise NotReady after `drain`. Holds the lock."""
        if self._closed:
            raise NotReady("The service is shutting down.")

    def _check_room(self, queries: int, key: str) -> None:
        """Raise QueueFull where there is none. Holds the lock.

        While several keys want the engine, what counts is how long the request itself would wait: others may have more waiting.
        """
        if not self._admission.refuses(self._clock(), self._queue.queries, queries, self._wait_s(), self._one_call_s()):
            return
        ahead, shared = self._queue.queries, self._queue.is_shared
        if shared or not self._queue.has(key):
            ahead, seconds = self._queue.ahead(key)
            if not self._admission.is_full(ahead, queries, self._wait_s(ahead, seconds), self._one_call_s()):
                return
        self._admission.refused(queries)
        raise QueueFull(f"{ahead} queries wait already.", self._wait_s(), crowds=shared and self._queue.has(key))

    def _one_call_s(self) -> float:
        """Seconds of an engine call. One large request that waits behind a small one is no queue. Holds the lock."""
        return max(*self._call_s, self._queue.part_s)

    def _has_room(self, queries: int, key: str) -> bool:
        """Whether patient queries of a key may join the queue. Holds the lock."""
        ahead, seconds = self._queue.ahead(key) if self._queue.is_shared else (self._queue.queries, self._queue.seconds)
        return self._admission.has_room(ahead, queries, self._wait_s(ahead, seconds), max(self._call_s))

    def _wait_s(self, queries: int | None = None, seconds: float | None = None) -> float:
        """Seconds that a request is expected to wait behind so many queries that take so long; None: all that wait. Holds the lock."""
        queries = self._queue.queries if queries is None else queries
        seconds = self._queue.seconds if seconds is None else seconds
        return self._cost.wait_s(queries, seconds, self._call_s, self.limits.max_batch)

    def _forget(self, parts: Sequence[Part], queue: PartQueue) -> None:
        """Take parts out of their queue whose request has ended."""
        for part in parts:
            if part.waits:
                with self._lock:
                    queue.remove(part)
            if not part.answer.done():
                part.answer.cancel()

    def _deliver(self, parts: Sequence[Part], answers: Sequence[Answer | Exception]) -> None:
        for part, answer in zip(parts, answers, strict=True):
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
        """One engine call or job of a thread, by its number. Blocks while there is none; false after the last.

        (A function of its own, so that nothing of a call is held while it waits for the next.)
        """
        with self._lock:
            job = self._jobs.next(queries_wait=self._queue.queries > 0) if self._jobs.waiting else None
            parts = [] if job is not None else self._take(number)
            room_wanted = bool(parts) and self._room_wanted
            self._room_wanted = self._room_wanted and not parts
            if job is None and not parts:
                if self._jobs.waiting:  # all queries that made it wait had expired
                    return True
                if self._closed:
                    return False
                self._asleep.append(wake)
        if room_wanted:
            self._call_back(parts, self._room.open)
        if job is None and not parts:
            wake.acquire()
            if self.limits.max_wait_s > 0 and not self._closed and self.depth < self.limits.max_batch:
                time.sleep(self.limits.max_wait_s)
            return True
        with self._calling[number]:  # the event loop may be searching
            if job is not None:
                job(self._engine)
                return True
            answers = self._answers(parts, self._call_s[number])
        self._call_back(parts, self._deliver, parts, answers)
        return True

    def _take(self, number: int) -> list[Part]:
        """The parts of a call; those of background requests where no other query waits. Holds the lock."""
        now = self._clock()
        taken = self._queue.take(self.limits, now) or self._background.take(self.limits, now)
        self._call_s[number] = self._cost.of_call([(part.beam_size, len(part.queries)) for part in taken])
        return taken

    def _answers(self, parts: list[Part], call_s: float) -> Sequence[Answer | Exception]:
        """Search for the parts of a call that is expected to take `call_s`."""
        try:
            if self.limits.smallest_beam_size is not None:
                self._degrade(parts, self.limits.smallest_beam_size, call_s)
            alone = parts[0]
            queries, params, context = (alone.queries, alone.params, alone.context) if len(parts) == 1 else merge(parts)
            began = self._clock()
            result = self._engine.search(queries, params, context)
            self._called_at = self._clock()
            engine_s = self._called_at - began
            self.on_call(len(queries), engine_s)
            if not params.trace:
                with self._lock:
                    self._cost.learn([(part.beam_size, len(part.queries)) for part in parts], engine_s)
            results = zip([result] if len(parts) == 1 else cut(result, parts), parts, strict=True)
            return [Answer(found, engine_s, len(queries), part.beam_size, part.degraded) for found, part in results]
        except Exception as error:
            log.exception("an engine call of %d requests failed", len(parts))
            return [EngineFailed(repr(error)) for _ in parts]

    def _call_back(self, parts: Sequence[Part], callback: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Call `callback` in the event loop of `parts`."""
        try:
            parts[0].answer.get_loop().call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop has closed; nobody waits for %d answers", len(parts))

    def _degrade(self, parts: list[Part], smallest: int, call_s: float) -> None:
        """Shrink the beams of parts of a call of `call_s` that would otherwise miss their deadline, down to `smallest` at most."""
        now = self._clock()
        for part in parts:
            left_s = part.deadline - now
            if call_s <= left_s or part.beam_size <= smallest or part.params.trace or part.whole:
                continue
            beam_size = self._cost.affordable(part.beam_size, smallest, left_s, len(part.queries), call_s - part.cost_s)
            if beam_size < part.beam_size:
                part.degraded, part.beam_size = True, beam_size
                part.params = replace(part.params, beam_size_B=np.minimum(part.params.beam_size_B, beam_size))


def _expire(parts: Sequence[Part]) -> None:
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(DeadlinePassed("The deadline passed before the answer was there."))
