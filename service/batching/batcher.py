"""Queries of concurrent requests in one engine call.

While the engine is busy, requests gather; when it is free, it takes what is there, up to `max_batch` queries. One thread per loaded
version runs the engine, so that the event loop never waits for it. What expired, or lost its client, is dropped before it gets there.
Knows query batches and results, not HTTP and not models.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, Engine, SearchParams, SearchResult
from service.batching.admission import Admission, Cost, retry_after_s
from service.errors import DeadlinePassed, EngineFailed, NotReady, QueueFull

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")

SERIAL_CALL_S = 1e-3
"""On a CPU a call costs the sum of its queries and nobody gets an answer before its end, so that batching only saves hand-overs (tens of
microseconds each). A call is filled up to this long, and no longer."""


SWITCH_S, HURRIED_SWITCH_S = sys.getswitchinterval(), 5e-4
"""How long one thread may keep the interpreter from another that wants it, usually and in overload. With Python's own 5 ms the engine's
thread would wait for longer than a search takes while the event loop is busy with refusals; at other times handing over costs more than
it gains."""


@dataclass(frozen=True)
class Limits:
    """What one Batcher takes.

    max_batch           most queries in one engine call; a request with more takes several calls
    serial              whether queries of a call cost one after the other (CPU), see Cost
    max_queue           most queries that wait
    burst_s             longest expected wait of an accepted request
    max_wait_s          how long a free engine waits for more queries than it has
    smallest_beam_size  down to which a beam may shrink when the deadline is near; None: never
    """

    max_batch: int = 16
    serial: bool = True
    max_queue: int = 1024
    burst_s: float = 0.1
    max_wait_s: float = 0.0
    smallest_beam_size: int | None = None


@dataclass(frozen=True)
class Answer:
    """What one request gets.

    result     its queries' rows only; M is the largest m of the request
    engine_s   wall time of the engine calls that its queries were in
    batch      queries in those calls, the other requests' included
    beam_size  the smallest beam that was searched with; less than what was asked for where `degraded`
    """

    result: SearchResult
    engine_s: float
    batch: int
    beam_size: int
    degraded: bool = False


@dataclass(eq=False, slots=True)
class _Part:
    """At most `max_batch` queries of one request. `waiting` is guarded by the batcher's lock."""

    queries: QueryBatch
    params: SearchParams
    answer: asyncio.Future[Answer]
    deadline: float
    beam_size: int
    cost_s: float
    arrived: float
    waiting: bool = True
    degraded: bool = False


class Batcher:
    """Feeds one engine from many requests.

    name     of the thread
    on_call  told the number of queries of every engine call, and its seconds
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
        self._parts: deque[_Part] = deque()
        self._waiting = 0  # queries
        self._waiting_s = 0.0  # what they are expected to take, one after the other
        self._call_s = 0.0  # the same of the call that runs
        self._closed = False
        self._asleep = False
        self._room_wanted = False  # somebody found no room since the engine last took queries
        self._wake = threading.Semaphore(0)
        self._room: deque[asyncio.Event] = deque()  # patient requests that wait for room, in turn; touched by the event loop alone
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Queries that wait for the engine."""
        return self._waiting

    async def search(self, queries: QueryBatch, params: SearchParams, deadline: float = float("inf"), patient: bool = False) -> Answer:
        """The answer to a request's queries. Cancelling it takes them out of the queue.

        deadline  what the engine has not begun by then never reaches it
        patient   wait for room instead of being refused
        Raises NotReady after `drain`, QueueFull, DeadlinePassed, EngineFailed when an engine call that held one of the queries raised.
        """
        loop = asyncio.get_running_loop()
        parts = [] if patient and self._room else self._accept(queries, params, deadline, patient, loop)
        if not parts:
            parts = await self._accept_in_turn(queries, params, deadline, loop)
        expiry = None if deadline == float("inf") else loop.call_later(max(deadline - self._clock(), 0), self._expire, parts)
        try:
            if len(parts) == 1:
                return await parts[0].answer
            return _join(await asyncio.gather(*(part.answer for part in parts)))
        finally:
            if expiry is not None:
                expiry.cancel()
            self._forget(parts)
            self._make_room()
            del parts  # an exception in them holds this frame, and with it whoever called

    @property
    def overloaded(self) -> bool:
        """Whether more has been asked for than can be done, as of the last request."""
        return self._admission.overloaded

    def check_room(self, queries: int) -> None:
        """Raise QueueFull where `search` would, before anything has been spent on the request."""
        with self._lock:
            self._check_room(self._clock(), queries)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and finish what was accepted. False when that took longer than `timeout_s`."""
        with self._lock:
            self._closed = True
        self._wake.release()
        self._make_room()
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    # -- the event loop's side ------------------------------------------------------------------------------------------

    def _accept(
        self, queries: QueryBatch, params: SearchParams, deadline: float, patient: bool, loop: asyncio.AbstractEventLoop
    ) -> list[_Part]:
        """Put a request in the queue. Empty when there is no room and the request is patient."""
        now = self._clock()
        if now >= deadline:
            raise DeadlinePassed("The deadline passed before the search began.")
        cut = _split(queries, params, len(queries) if params.trace else self.limits.max_batch)
        with self._lock:
            if self._closed:
                raise NotReady("The service is shutting down.")
            if patient and not self._admission.has_room(self._waiting, len(queries), self._wait_s(), self._call_s):
                self._room_wanted = True
                return []
            if not patient:
                self._check_room(now, len(queries))
                self._admission.accepted(len(queries), busy=self._waiting > 0 or self._call_s > 0)
            parts = []
            for rows, row_params in cut:
                beam_size = int(row_params.beam_size_B.max(initial=1))
                cost_s = self._cost.of_call([(beam_size, len(rows))])
                parts.append(_Part(rows, row_params, loop.create_future(), deadline, beam_size, cost_s, now))
                self._waiting += len(rows)
                self._waiting_s += cost_s
            self._parts.extend(parts)
            wake, self._asleep = self._asleep, False
        if wake:
            self._wake.release()
        return parts

    def _check_room(self, now: float, queries: int) -> None:
        """Holds the lock."""
        wait_s, overloaded = self._wait_s(), self._admission.overloaded
        refused = self._admission.refuses(now, self._waiting, queries, wait_s, self._call_s)
        if self._admission.overloaded != overloaded:
            sys.setswitchinterval(SWITCH_S if overloaded else HURRIED_SWITCH_S)
        if refused:
            raise QueueFull(f"{self._waiting} queries wait already.", retry_after_s(wait_s))

    def _wait_s(self) -> float:
        """Seconds that a newcomer is expected to wait. Holds the lock."""
        return self._waiting_s + self._call_s if self.limits.serial else self._call_s * (self._waiting / self.limits.max_batch)

    async def _accept_in_turn(
        self, queries: QueryBatch, params: SearchParams, deadline: float, loop: asyncio.AbstractEventLoop
    ) -> list[_Part]:
        """Put a patient request in the queue once there is room and all that waited before it have found theirs."""
        room = asyncio.Event()
        self._room.append(room)
        try:
            async with asyncio.timeout(None if deadline == float("inf") else max(deadline - self._clock(), 0)):
                while self._room[0] is not room or not (parts := self._accept(queries, params, deadline, True, loop)):
                    room.clear()
                    await room.wait()
                return parts
        except TimeoutError:
            raise DeadlinePassed("The deadline passed before the search began.") from None
        finally:
            self._room.remove(room)
            self._make_room()  # the next one finds out whether there is more

    def _expire(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            if not part.answer.done():
                part.answer.set_exception(DeadlinePassed("The deadline passed before the answer was there."))

    def _forget(self, parts: Sequence[_Part]) -> None:
        """Take out of the queue what nobody waits for any more."""
        waiting = [part for part in parts if part.waiting]
        if waiting:
            with self._lock:
                for part in waiting:
                    if part.waiting:  # still, now that the engine's thread is kept out
                        self._leave(part)
                        self._parts.remove(part)
        for part in parts:
            if not part.answer.done():
                part.answer.cancel()

    def _deliver(self, parts: Sequence[_Part], answers: Sequence[Answer | Exception]) -> None:
        for part, answer in zip(parts, answers, strict=True):
            if part.answer.done():
                continue
            if isinstance(answer, Exception):
                part.answer.set_exception(answer)
            else:
                part.answer.set_result(answer)
        self._make_room()

    def _make_room(self) -> None:
        """Wake the first who waits for room, if somebody does."""
        if self._room:
            self._room[0].set()

    # -- the engine's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """One engine call. False when all is done. (A function of its own, so that nothing of a call is held while the next is awaited.)"""
        parts = self._next_call()
        if parts:
            self._call(parts)
        return parts is not None

    def _next_call(self) -> list[_Part] | None:
        """The queries of the next call, None when all is done. Blocks while there are none."""
        with self._lock:
            parts = self._take()
            room_wanted = bool(parts) and self._room_wanted
            if parts:
                self._room_wanted = False
            else:
                if self._closed:
                    return None
                self._asleep = True
        if room_wanted:
            self._tell(parts, self._make_room)
        if not parts:
            self._wake.acquire()
            if self.limits.max_wait_s > 0 and not self._closed and self._waiting < self.limits.max_batch:
                time.sleep(self.limits.max_wait_s)
        return parts

    def _take(self) -> list[_Part]:
        """Move parts from the queue into a call, in the order of their arrival; a traced part is alone in its call. Holds the lock."""
        taken: list[_Part] = []
        size, seconds = 0, 0.0
        now = self._clock()
        while self._parts:
            part = self._parts[0]
            if not part.waiting or part.answer.done():
                self._leave(self._parts.popleft())
                continue
            if now >= part.deadline:  # the event loop will say so
                self._leave(self._parts.popleft())
                continue
            count = len(part.queries)
            full = size + count > self.limits.max_batch or (self.limits.serial and seconds + part.cost_s > SERIAL_CALL_S)
            if taken and (full or part.params.trace or taken[0].params.trace):
                break
            self._leave(self._parts.popleft())
            taken.append(part)
            size += count
            seconds += part.cost_s
        self._call_s = self._cost.of_call([(part.beam_size, len(part.queries)) for part in taken])
        return taken

    def _leave(self, part: _Part) -> None:
        """Count a part out of the queue. Holds the lock."""
        if part.waiting:
            part.waiting = False
            self._waiting -= len(part.queries)
            self._waiting_s = self._waiting_s - part.cost_s if self._waiting else 0.0

    def _call(self, parts: list[_Part]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            self._degrade(parts)
            queries, params = _merge(parts)
            began = self._clock()
            result = self._engine.search(queries, params)
            engine_s = self._clock() - began
            self.on_call(len(queries), engine_s)
            rows = _cut(result, parts)
            answers = [
                Answer(found, engine_s, len(queries), part.beam_size, part.degraded) for found, part in zip(rows, parts, strict=True)
            ]
            if not params.trace:
                with self._lock:
                    self._cost.learn([(part.beam_size, len(part.queries)) for part in parts], engine_s)
        except Exception as error:
            log.exception("an engine call of %d requests failed", len(parts))
            answers = [EngineFailed(repr(error)) for _ in parts]
        self._tell(parts, self._deliver, parts, answers)

    def _tell(self, parts: Sequence[_Part], callback: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Have the event loop of `parts` call back."""
        try:
            parts[0].answer.get_loop().call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop has closed; nobody waits for %d answers", len(parts))

    def _degrade(self, parts: list[_Part]) -> None:
        """Shrink the beams of parts that would otherwise miss their deadline, where that is allowed."""
        smallest = self.limits.smallest_beam_size
        if smallest is None:
            return
        now = self._clock()
        for part in parts:
            left_s = part.deadline - now
            if self._call_s <= left_s or part.beam_size <= smallest or part.params.trace:
                continue
            others_s = self._call_s - part.cost_s if self.limits.serial else 0.0
            count = len(part.queries) if self.limits.serial else 1
            beam_size = self._cost.affordable(part.beam_size, smallest, (left_s - others_s) / count)
            if beam_size < part.beam_size:
                part.degraded, part.beam_size = True, beam_size
                part.params = replace(part.params, beam_size_B=np.minimum(part.params.beam_size_B, beam_size))


def _split(queries: QueryBatch, params: SearchParams, size: int) -> list[tuple[QueryBatch, SearchParams]]:
    if len(queries) <= size:
        return [(queries, params)]
    cut = [np.arange(b, min(b + size, len(queries))) for b in range(0, len(queries), size)]
    return [(queries.take(rows), params.take(rows)) for rows in cut]


def _merge(parts: Sequence[_Part]) -> tuple[QueryBatch, SearchParams]:
    """All queries of a call; exclusions are padded to the longest."""
    if len(parts) == 1:
        return parts[0].queries, parts[0].params
    queries = QueryBatch.joined([part.queries for part in parts])
    beam_size_B = np.concatenate([part.params.beam_size_B for part in parts])
    m_B = np.concatenate([part.params.m_B for part in parts])
    width = max(0 if part.params.exclude_BE is None else part.params.exclude_BE.shape[1] for part in parts)
    exclude_BE: NDArray[np.int64] | None = None
    if width:
        exclude_BE = np.full((len(queries), width), NO_ITEM, np.int64)
        b = 0
        for part in parts:
            if part.params.exclude_BE is not None:
                exclude_BE[b : b + len(part.queries), : part.params.exclude_BE.shape[1]] = part.params.exclude_BE
            b += len(part.queries)
    mask_B = None
    if any(part.params.mask_B is not None for part in parts):
        mask_B = tuple(mask for part in parts for mask in part.params.mask_B or [None] * len(part.queries))
    return queries, SearchParams(beam_size_B, m_B, exclude_BE, mask_B=mask_B)


def _cut(result: SearchResult, parts: Sequence[_Part]) -> list[SearchResult]:
    """Each part's rows of a call's result, as wide as its own largest m."""
    if len(parts) == 1:
        return [result]
    cut, b = [], 0
    for part in parts:
        end, m = b + len(part.queries), int(part.params.m_B.max())
        cut.append(
            SearchResult(
                result.item_rows_BM[b:end, :m],
                result.scores_BM[b:end, :m],
                result.ranks_BM[b:end, :m],
                result.count_B[b:end],
                result.complete_B[b:end],
                finite_B=None if result.finite_B is None else result.finite_B[b:end],
            )
        )
        b = end
    return cut


def _join(answers: Sequence[Answer]) -> Answer:
    """The parts of one request, which has one m, in order."""
    results = [answer.result for answer in answers]
    finite = [result.finite_B for result in results if result.finite_B is not None]
    joined = SearchResult(
        np.concatenate([result.item_rows_BM for result in results]),
        np.concatenate([result.scores_BM for result in results]),
        np.concatenate([result.ranks_BM for result in results]),
        np.concatenate([result.count_B for result in results]),
        np.concatenate([result.complete_B for result in results]),
        finite_B=np.concatenate(finite) if finite else None,
    )
    return Answer(
        joined,
        engine_s=sum(answer.engine_s for answer in answers),
        batch=sum(answer.batch for answer in answers),
        beam_size=min(answer.beam_size for answer in answers),
        degraded=any(answer.degraded for answer in answers),
    )
