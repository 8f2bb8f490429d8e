"""Queries of concurrent requests in one engine call.

While the engine is busy, requests gather; when it is free, it takes what is there, up to `max_batch` queries. One thread per model
runs the engine, so that the event loop never waits for it. Knows query batches and results, not HTTP and not models.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, Engine, SearchParams, SearchResult
from service.errors import EngineFailed, NotReady

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What one request gets.

    result    its queries' rows only; M is the largest m of the request
    engine_s  wall time of the engine calls that its queries were in
    batch     queries in those calls, the other requests' included
    """

    result: SearchResult
    engine_s: float
    batch: int


@dataclass(frozen=True, eq=False)
class _Part:
    """At most `max_batch` queries of one request."""

    queries: QueryBatch
    params: SearchParams
    answer: asyncio.Future[Answer]


class Batcher:
    """Feeds one engine from many requests.

    name       of the thread
    max_batch  most queries in one engine call; a request with more takes several calls
    on_call    told the number of queries of every engine call
    """

    def __init__(self, engine: Engine, max_batch: int, name: str, on_call: Callable[[int], None] = lambda batch: None) -> None:
        self.max_batch = max_batch
        self.on_call = on_call
        self._engine = engine
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._accepted = 0  # queries; written by the event loop only
        self._taken = 0  # queries; written by the engine's thread only
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Queries that wait for the engine."""
        return self._accepted - self._taken

    async def search(self, queries: QueryBatch, params: SearchParams) -> Answer:
        """The answer to a request's queries. Cancelling it takes them out of the queue.

        Raises NotReady after `drain`, EngineFailed when an engine call that held one of the queries raised.
        """
        if self._closed:
            raise NotReady("The service is shutting down.")
        loop = asyncio.get_running_loop()
        parts = [_Part(*part, loop.create_future()) for part in _split(queries, params, self.max_batch)]
        for part in parts:
            self._accepted += len(part.queries)
            self._parts.put(part)
        if len(parts) == 1:
            return await parts[0].answer
        return _join(await asyncio.gather(*(part.answer for part in parts)))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and finish what was accepted. False when that took longer than `timeout_s`."""
        if not self._closed:
            self._closed = True
            self._parts.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        held: _Part | None = None  # taken from the queue, but too large for the call before
        while (first := held or self._parts.get()) is not None:
            call, size, held, last = [first], len(first.queries), None, False
            while size < self.max_batch:
                try:
                    part = self._parts.get_nowait()
                except Empty:
                    break
                if part is None:
                    last = True
                    break
                if size + len(part.queries) > self.max_batch:
                    held = part
                    break
                call.append(part)
                size += len(part.queries)
            self._taken += size
            self._call([part for part in call if not part.answer.cancelled()])
            if last:
                return

    def _call(self, parts: list[_Part]) -> None:
        if not parts:
            return
        loop = parts[0].answer.get_loop()
        answers: Sequence[Answer | EngineFailed]
        try:
            queries, params = _merge(parts)
            began = time.perf_counter()
            result = self._engine.search(queries, params)
            engine_s = time.perf_counter() - began
            self.on_call(len(queries))
            answers = [Answer(rows, engine_s, len(queries)) for rows in _cut(result, parts)]
        except Exception as error:
            log.exception("an engine call of %d requests failed", len(parts))
            answers = [EngineFailed(repr(error)) for _ in parts]
        try:
            loop.call_soon_threadsafe(_deliver, parts, answers)
        except RuntimeError:
            log.debug("the event loop has closed; nobody waits for %d answers", len(parts))


def _deliver(parts: Sequence[_Part], answers: Sequence[Answer | EngineFailed]) -> None:
    for part, answer in zip(parts, answers, strict=True):
        if part.answer.done():
            continue
        if isinstance(answer, EngineFailed):
            part.answer.set_exception(answer)
        else:
            part.answer.set_result(answer)


def _split(queries: QueryBatch, params: SearchParams, size: int) -> list[tuple[QueryBatch, SearchParams]]:
    if len(queries) <= size:
        return [(queries, params)]
    return [(_rows(queries, b, b + size), _param_rows(params, b, b + size)) for b in range(0, len(queries), size)]


def _rows(queries: QueryBatch, begin: int, end: int) -> QueryBatch:
    return QueryBatch(queries.kind, queries.array[begin:end])


def _param_rows(params: SearchParams, begin: int, end: int) -> SearchParams:
    exclude = None if params.exclude_BE is None else params.exclude_BE[begin:end]
    return SearchParams(params.beam_size_B[begin:end], params.m_B[begin:end], exclude)


def _merge(parts: Sequence[_Part]) -> tuple[QueryBatch, SearchParams]:
    """All queries of a call; exclusions are padded to the longest."""
    if len(parts) == 1:
        return parts[0].queries, parts[0].params
    queries = QueryBatch(parts[0].queries.kind, np.concatenate([part.queries.array for part in parts]))
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
    return queries, SearchParams(beam_size_B, m_B, exclude_BE)


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
            )
        )
        b = end
    return cut


def _join(answers: Sequence[Answer]) -> Answer:
    """The parts of one request, which has one m, in order."""
    results = [answer.result for answer in answers]
    joined = SearchResult(
        np.concatenate([result.item_rows_BM for result in results]),
        np.concatenate([result.scores_BM for result in results]),
        np.concatenate([result.ranks_BM for result in results]),
        np.concatenate([result.count_B for result in results]),
        np.concatenate([result.complete_B for result in results]),
    )
    return Answer(joined, sum(answer.engine_s for answer in answers), sum(answer.batch for answer in answers))
