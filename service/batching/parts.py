"""Requests cut into parts that fit an engine call, parts merged into a call, and the call's result cut back.

Knows query batches and results. Does not know queues or threads.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.engines.results import between, joined
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchContext, SearchParams, SearchResult

DEADLINES_S = 0.1
"""Requests whose deadlines are further apart get calls of their own, where calls end at deadlines."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request, or to a part of one.

    result     its queries' rows only; M is the largest m of the request
    engine_s   wall time of the engine calls that its queries were in
    batch      queries in those calls, other requests' included
    beam_size  the smallest beam that was searched with; smaller than requested where `degraded`
    """

    result: SearchResult
    engine_s: float
    batch: int
    beam_size: int
    degraded: bool = False


@dataclass(eq=False, slots=True)
class Part:
    """At most `max_batch` queries of one request.

    cost_s   seconds of an engine call of it alone
    share_s  what it takes of the engine, where it shares calls with others
    whole    its beams do not shrink
    key      the name of its API key
    waits    in a queue, guarded by the batcher's lock
    """

    queries: QueryBatch
    params: SearchParams
    answer: asyncio.Future[Answer]
    deadline: float
    beam_size: int
    cost_s: float
    share_s: float
    context: SearchContext
    whole: bool = False
    key: str = ""
    waits: bool = False
    degraded: bool = False


def are_apart(one: Part, other: Part) -> bool:
    """Whether two parts cannot share an engine call. Those of two deadlines cannot: a call waits for the earlier one alone."""
    deadlines = one.context.deadline or 0, other.context.deadline or 0
    traced = one.params.trace or other.params.trace
    return traced or not one.queries.fits(other.queries) or abs(deadlines[0] - deadlines[1]) > DEADLINES_S


def split(queries: QueryBatch, params: SearchParams, size: int) -> list[tuple[QueryBatch, SearchParams]]:
    """A request in pieces of at most `size` queries."""
    if len(queries) <= size:
        return [(queries, params)]
    cut = [np.arange(b, min(b + size, len(queries))) for b in range(0, len(queries), size)]
    return [(queries.take(rows), params.take(rows)) for rows in cut]


def merge(parts: Sequence[Part]) -> tuple[QueryBatch, SearchParams, SearchContext]:
    """All queries of a call; exclusions are padded to the longest. Its deadline is the earliest, its origin the first request's."""
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
    deadlines = [part.context.deadline for part in parts if part.context.deadline is not None]
    context = SearchContext(min(deadlines, default=None), parts[0].context.origin)
    return queries, SearchParams(beam_size_B, m_B, exclude_BE, mask_B=mask_B), context


def cut(result: SearchResult, parts: Sequence[Part]) -> list[SearchResult]:
    """Each part's rows of a call's result, as wide as its own largest m."""
    results, begin = [], 0
    for part in parts:
        results.append(between(result, begin, begin + len(part.queries), int(part.params.m_B.max())))
        begin += len(part.queries)
    return results


def join(answers: Sequence[Answer]) -> Answer:
    """The answers to the parts of one request, which has one m, in order."""
    return Answer(
        joined([answer.result for answer in answers]),
        engine_s=sum(answer.engine_s for answer in answers),
        batch=sum(answer.batch for answer in answers),
        beam_size=min(answer.beam_size for answer in answers),
        degraded=any(answer.degraded for answer in answers),
    )
