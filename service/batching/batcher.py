"""Queries of concurrent requests in one engine call.

While the engine is busy, requests wait in a queue. When it is free, it takes up to `max_batch` queries of them. One thread per loaded
version runs the engine, or several where it takes several calls at once, so that the event loop never waits for it. Expired requests, and
those whose clients hung up, never reach the engine. Background requests have a queue of their own, from which the engine takes only while
no other query waits. Knows query batches and results, not HTTP and not models.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar, TypeVarTuple

import numpy as np

from espalier.engines.results import joined_parents
from espalier.engines.stages import ParentsFound, StagedEngine
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchContext, SearchParams
from service.batching.admission import Admission, Cost, Limits, retry_after_s
from service.batching.parts import Answer, Part, context_of, cut, join, merge, split
from service.errors import DeadlinePassed, EngineFailed, NotReady, QueueFull

log = logging.getLogger(__name__)

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SERIAL_CALL_S = 1e-3
"""On a CPU a call costs the sum of its queries, and all answers come at its end, so batching only saves hand-overs between threads (tens of
microseconds each). A call is filled up to this time."""
DEADLINES_S = 0.1
"""Requests whose deadlines are further apart get calls of their own, where calls end at deadlines."""
JOB_PAUSE = 3.0
"""After a job, queries have the engine for so many times as long as it took."""
JOB_QUERIES = 4
"""Queries of one job on a CPU, where they cost one after the other."""
QUIET_S = 0.5
QUIET_JOB_QUERIES = 16
"""The same where no request has asked for so many seconds: fewer calls and hand-overs. One that comes just then waits for them, some
milliseconds."""
SWITCH_S, OVERLOAD_SWITCH_S = sys.getswitchinterval(), 5e-4
"""How long one thread may keep the interpreter from another, usually and in overload. With Python's own 5 ms the engine's thread would wait
for longer than a search takes while the event loop is busy with refusals. At other times switching costs more than it gains."""


def _parents(queries: QueryBatch, params: SearchParams, engine: Engine) -> ParentsFound:
    if not isinstance(engine, StagedEngine):
        raise EngineFailed(f"{engine.name} finds no parents")
    return engine.parents(queries, params)


class Batcher:
    """Feeds one engine from many requests.

    name     of the threads
    on_call  called after every engine call with its number of queries and its seconds
    clock    seconds; deadlines are points of it
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        name: str,
        on_call: Callable[[int, float], None] = lambda batch, seconds: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits, self.on_call = limits, on_call
        self._engine, self._clock = engine, clock
        self._cost = Cost(limits.serial)
        self._admission = Admission(limits.max_queue, limits.burst_s)
        self._lock = threading.Lock()  # guards what follows
        self._parts: deque[Part] = deque()
        self._behind: deque[Part] = deque()  # those of background requests
        self._waiting = 0  # queries
        self._waiting_s = 0.0  # what they are expected to take, one after the other
        self._call_s = [0.0] * limits.calls  # the same of the calls that run, by thread
        self._closed = False
        self._asleep = 0  # threads that wait for work
        self._jobs: deque[Callable[[Engine], None]] = deque()
        self._job_at = 0.0  # before this time a job waits for the queries
        self._called_at = -QUIET_S  # when queries were answered last
        self._room_wanted = False  # a patient request found no room since the engine last took queries
        self._wake = threading.Semaphore(0)
        self._room: deque[asyncio.Event] = deque()  # patient requests that wait for room, in turn; touched by the event loop alone
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"engine-{name}", daemon=True) for number in range(limits.calls)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Queries that wait for the engine, without those of background requests."""
        return self._waiting

    async def search(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float = float("inf"),
        patient: bool = False,
        background: bool = False,
        origin: tuple[tuple[str, str], ...] = (),
    ) -> Answer:
        """The answer to a request's queries. Cancelling it takes them out of the queue.

        deadline    queries that the engine has not begun by then never reach it
        patient     wait for room instead of being refused
        background  wait until the engine has nothing else to do. It then takes a millisecond's worth of the queries, or one, so that others
                    hardly wait for them. They count as no load. The caller limits how many there are
        origin      of `SearchContext`
        Raises NotReady after `drain`, QueueFull, DeadlinePassed, EngineFailed when an engine call that held one of the queries raised.
        """
        loop = asyncio.get_running_loop()
        context = SearchContext(deadline if self.limits.calls > 1 and deadline < float("inf") else None, origin)
        if background:
            parts = self._accept_behind(queries, params, deadline, context, loop)
        else:
            parts = [] if patient and self._room else self._accept(queries, params, deadline, context, patient, loop)
        if not parts:
            parts = await self._accept_in_turn(queries, params, deadline, context, loop)
        expiry = None if deadline == float("inf") else loop.call_later(max(deadline - self._clock(), 0), self._expire, parts)
        try:
            if len(parts) == 1:
                return await parts[0].answer
            return join(await asyncio.gather(*(part.answer for part in parts)))
        finally:
            if expiry is not None:
                expiry.cancel()
            self._forget(parts)
            if self._room:
                self._make_room()
            del parts  # an exception in them holds this frame, and with it its callers

    @property
    def overloaded(self) -> bool:
        """Whether requests arrive faster than they are answered, as of the last request."""
        return self._admission.overloaded

    def run(self, job: Callable[[Engine], T]) -> Future[T]:
        """Let the engine's thread do something between its calls, beside the queries. From any thread.

        Jobs are done in turn, when no query waits; if queries always wait, they get 1 / (1 + JOB_PAUSE) of a thread's time.
        Raises NotReady after `drain`.
        """
        done: Future[T] = Future()

        def work(engine: Engine) -> None:
            try:
                done.set_result(job(engine))
            except Exception as error:
                done.set_exception(error)

        with self._lock:
            self._check_open()
            self._jobs.append(work)
            self._wake_threads(1)
        return done

    def parents_now(self, queries: QueryBatch, params: SearchParams) -> ParentsFound:
        """Where queries lead to (`Pipeline.parents`), as jobs, each short.

        From any thread but the event loop's. Raises NotReady, and what the engine raises.
        """
        jobs = []
        at_once = QUIET_JOB_QUERIES if self._clock() - self._called_at > QUIET_S else JOB_QUERIES
        for rows, own in split(queries, params, min(at_once, self.limits.max_batch) if self.limits.serial else self.limits.max_batch):
            jobs.append(self.run(partial(_parents, rows, own)))
        return joined_parents([job.result() for job in jobs])

    def check_room(self, queries: int) -> None:
        """Raise QueueFull where `search` would, before anything has been spent on the request."""
        with self._lock:
            self._check_room(self._clock(), queries)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and finish what was accepted. False when that took longer than `timeout_s`."""
        with self._lock:
            self._closed = True
            if self._admission.overloaded:
                sys.setswitchinterval(SWITCH_S)
        self._wake.release(len(self._threads))
        self._make_room()
        ends = self._clock() + timeout_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(ends - self._clock(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the event loop's side ------------------------------------------------------------------------------------------

    def _accept(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float,
        context: SearchContext,
        patient: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> list[Part]:
        """Put a request in the queue. Empty when there is no room and the request is patient."""
        now = self._clock()
        pieces = self._pieces(queries, params, deadline, self.limits.max_batch)
        with self._lock:
            self._check_open()
            if patient and not self._admission.has_room(self._waiting, len(queries), self._wait_s(), max(self._call_s)):
                self._room_wanted = True
                return []
            if not patient:
                self._check_room(now, len(queries))
                self._admission.accepted(len(queries), busy=self._waiting > 0 or min(self._call_s) > 0)
            parts = [self._part(*piece, deadline, context, loop) for piece in pieces]
            for part in parts:
                self._waiting += len(part.queries)
                self._waiting_s += part.cost_s
            self._parts.extend(parts)
            self._wake_threads(len(parts))
        return parts

    def _accept_behind(
        self, queries: QueryBatch, params: SearchParams, deadline: float, context: SearchContext, loop: asyncio.AbstractEventLoop
    ) -> list[Part]:
        """Put a background request behind all others."""
        pieces = self._pieces(queries, params, deadline, 1 if self.limits.serial else self.limits.max_batch)
        with self._lock:
            self._check_open()
            parts = [self._part(*piece, deadline, context, loop, background=True) for piece in pieces]
            self._behind.extend(parts)
            self._wake_threads(len(parts))
        return parts

    def _wake_threads(self, most: int) -> None:
        """Wake as many threads as there is new work for, of those that sleep. Holds the lock."""
        count = min(most, self._asleep)
        if count:
            self._asleep -= count
            self._wake.release(count)

    def _pieces(self, queries: QueryBatch, params: SearchParams, deadline: float, size: int) -> list[tuple[QueryBatch, SearchParams]]:
        """A request in pieces of at most `size` queries; a traced one stays whole. Raises DeadlinePassed."""
        if self._clock() >= deadline:
            raise DeadlinePassed("The deadline passed before the search began.")
        return [(queries, params)] if params.trace or len(queries) <= size else split(queries, params, size)

    def _part(
        self,
        queries: QueryBatch,
        params: SearchParams,
        deadline: float,
        context: SearchContext,
        loop: asyncio.AbstractEventLoop,
        background: bool = False,
    ) -> Part:
        """Holds the lock."""
        beam_size = int(params.beam_size_B.max(initial=1))
        cost_s = self._cost.of_call([(beam_size, len(queries))])
        return Part(queries, params, loop.create_future(), deadline, beam_size, cost_s, context, background)

    def _check_open(self) -> None:
        """Raise NotReady after `drain`. Holds the lock."""
        if self._closed:
            raise NotReady("The service is shutting down.")

    def _check_room(self, now: float, queries: int) -> None:
        """Holds the lock."""
        wait_s, overloaded = self._wait_s(), self._admission.overloaded
        refused = self._admission.refuses(now, self._waiting, queries, wait_s, max(self._call_s))
        if self._admission.overloaded != overloaded:
            sys.setswitchinterval(SWITCH_S if overloaded else OVERLOAD_SWITCH_S)
        if refused:
            raise QueueFull(f"{self._waiting} queries wait already.", retry_after_s(wait_s))

    def _wait_s(self) -> float:
        """Seconds that a new request is expected to wait. Holds the lock."""
        if self.limits.serial:
            return (self._waiting_s + sum(self._call_s)) / self.limits.calls
        return max(self._call_s) * (self._waiting / self.limits.max_batch) / self.limits.calls

    async def _accept_in_turn(
        self, queries: QueryBatch, params: SearchParams, deadline: float, context: SearchContext, loop: asyncio.AbstractEventLoop
    ) -> list[Part]:
        """Put a patient request in the queue once there is room, and all that waited before it have found theirs."""
        room = asyncio.Event()
        self._room.append(room)
        try:
            async with asyncio.timeout(None if deadline == float("inf") else max(deadline - self._clock(), 0)):
                while self._room[0] is not room or not (parts := self._accept(queries, params, deadline, context, True, loop)):
                    room.clear()
                    await room.wait()
                return parts
        except TimeoutError:
            raise DeadlinePassed("The deadline passed before the search began.") from None
        finally:
            self._room.remove(room)
            self._make_room()  # for the next one, if there is more

    def _expire(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if not part.answer.done():
                part.answer.set_exception(DeadlinePassed("The deadline passed before the answer was there."))

    def _forget(self, parts: Sequence[Part]) -> None:
        """Take parts out of the queue whose request has ended."""
        for part in parts:
            if part.waiting:
                with self._lock:
                    if part.waiting:  # still, now that the engine's thread is kept out
                        self._leave(part)
                        (self._behind if part.background else self._parts).remove(part)
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
        if self._room:
            self._make_room()

    def _make_room(self) -> None:
        """Wake the first request that waits for room."""
        if self._room:
            self._room[0].set()

    # -- the engine's thread --------------------------------------------------------------------------------------------

    def _run(self, number: int) -> None:
        while self._serve_one(number):
            pass

    def _serve_one(self, number: int) -> bool:
        """One engine call of a thread, by its number. False after the last.

        (A function of its own, so that nothing of a call is held while it waits for the next.)
        """
        job = self._next_job()
        if job is not None:
            began = self._clock()
            job(self._engine)
            ended = self._clock()
            self._job_at = ended + JOB_PAUSE * (ended - began)
            return True
        parts = self._next_call(number)
        if parts:
            self._call(parts, number)
        return parts is not None

    def _next_job(self) -> Callable[[Engine], None] | None:
        """A job whose turn it is."""
        with self._lock:
            if not self._jobs or (self._parts and self._clock() < self._job_at):
                return None
            return self._jobs.popleft()

    def _next_call(self, number: int) -> list[Part] | None:
        """The parts of the next call, None after the last. Blocks while there are none."""
        with self._lock:
            parts = self._take(number)
            room_wanted = bool(parts) and self._room_wanted
            if parts:
                self._room_wanted = False
            elif self._jobs:
                return parts
            else:
                if self._closed:
                    return None
                self._asleep += 1
        if room_wanted:
            self._call_back(parts, self._make_room)
        if not parts:
            self._wake.acquire()
            if self.limits.max_wait_s > 0 and not self._closed and self._waiting < self.limits.max_batch:
                time.sleep(self.limits.max_wait_s)
        return parts

    def _take(self, number: int) -> list[Part]:
        """Move the parts of a call out of a queue; from that of background requests where no other query waits. Holds the lock."""
        taken = self._take_from(self._parts) or self._take_from(self._behind)
        self._call_s[number] = self._cost.of_call([(part.beam_size, len(part.queries)) for part in taken])
        return taken

    def _take_from(self, waiting: deque[Part]) -> list[Part]:
        """The parts of a call, in the order of arrival; a traced part is alone. Holds the lock."""
        taken: list[Part] = []
        size, seconds = 0, 0.0
        now = self._clock()
        while waiting:
            part = waiting[0]
            if not part.waiting or part.answer.done() or now >= part.deadline:  # the event loop answers it
                self._leave(waiting.popleft())
                continue
            count = len(part.queries)
            full = size + count > self.limits.max_batch or (self.limits.serial and seconds + part.cost_s > SERIAL_CALL_S)
            if taken and (full or _apart(taken[0], part)):
                break
            self._leave(waiting.popleft())
            taken.append(part)
            size += count
            seconds += part.cost_s
        return taken

    def _leave(self, part: Part) -> None:
        """Count a part out of the queue. Holds the lock."""
        if part.waiting and not part.background:
            self._waiting -= len(part.queries)
            self._waiting_s = self._waiting_s - part.cost_s if self._waiting else 0.0
        part.waiting = False

    def _call(self, parts: list[Part], number: int) -> None:
        answers: Sequence[Answer | Exception]
        try:
            if self.limits.smallest_beam_size is not None:
                self._degrade(parts, self.limits.smallest_beam_size, self._call_s[number])
            queries, params = (parts[0].queries, parts[0].params) if len(parts) == 1 else merge(parts)
            began = self._clock()
            result = self._engine.search(queries, params, context_of(parts))
            self._called_at = self._clock()
            engine_s = self._called_at - began
            self.on_call(len(queries), engine_s)
            results = [result] if len(parts) == 1 else cut(result, parts)
            answers = [
                Answer(found, engine_s, len(queries), part.beam_size, part.degraded) for found, part in zip(results, parts, strict=True)
            ]
            if not params.trace:
                with self._lock:
                    self._cost.learn([(part.beam_size, len(part.queries)) for part in parts], engine_s)
        except Exception as error:
            log.exception("an engine call of %d requests failed", len(parts))
            answers = [EngineFailed(repr(error)) for _ in parts]
        self._call_back(parts, self._deliver, parts, answers)

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
            if call_s <= left_s or part.beam_size <= smallest or part.params.trace:
                continue
            others_s = call_s - part.cost_s if self.limits.serial else 0.0
            count = len(part.queries) if self.limits.serial else 1
            beam_size = self._cost.affordable(part.beam_size, smallest, (left_s - others_s) / count)
            if beam_size < part.beam_size:
                part.degraded, part.beam_size = True, beam_size
                part.params = replace(part.params, beam_size_B=np.minimum(part.params.beam_size_B, beam_size))


def _apart(one: Part, other: Part) -> bool:
    """Whether two parts cannot share an engine call. Those of two deadlines cannot: a call waits for the earlier one alone."""
    deadlines = one.context.deadline or 0, other.context.deadline or 0
    traced = one.params.trace or other.params.trace
    return traced or not one.queries.fits(other.queries) or abs(deadlines[0] - deadlines[1]) > DEADLINES_S
