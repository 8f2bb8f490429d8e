"""Split requests into parts that fit an engine call, merge parts into one call, and cut its result into the answer to each part.

Knows query batches and results. Does not know queues or threads.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from espalier.engines.stages import NO_ROW, between, joined, stacked
from espalier.queries import QueryBatch
from espalier.search import SearchContext, SearchParams, SearchResult

MAX_DEADLINE_GAP_S = 0.1
"""Where calls end at deadlines, requests share a call only if their deadlines differ by at most this."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request, or to a part of one.

    result     the rows of its own queries; M is the largest m of the request
    engine_s   wall time of the engine calls that held its queries
    batch      queries in those calls, including those of other requests
    beam_size  the smallest beam of the search; smaller than requested if `degraded`
    """

    result: SearchResult
    engine_s: float
    batch: int
    beam_size: int
    degraded: bool = False


@dataclass(eq=False, slots=True)
class RequestPart:
    """At most `max_batch` queries of one request.

    cost_s      expected seconds of an engine call that holds only this part
    share_s     expected engine seconds if the part shares calls with others
    fixed_beam  never shrink its beams
    key         the name of its API key
    is_queued   whether it is in a queue; guarded by the batcher's lock
    """

    queries: QueryBatch
    params: SearchParams
    answer: asyncio.Future[Answer]
    deadline: float
    beam_size: int
    cost_s: float
    share_s: float
    context: SearchContext
    fixed_beam: bool = False
    key: str = ""
    is_queued: bool = False
    degraded: bool = False


def cannot_share_call(first: RequestPart, second: RequestPart) -> bool:
    """Whether two parts need separate engine calls. Parts with distant deadlines do: a call ends at the earliest deadline of its parts."""
    deadline_gap_s = abs((first.context.deadline or 0) - (second.context.deadline or 0))
    traced = first.params.trace or second.params.trace
    return traced or not first.queries.fits(second.queries) or deadline_gap_s > MAX_DEADLINE_GAP_S


def split_request(queries: QueryBatch, params: SearchParams, size: int) -> list[tuple[QueryBatch, SearchParams]]:
    """The queries and parameters of a request in groups of at most `size` queries."""
    if len(queries) <= size:
        return [(queries, params)]
    query_groups = [np.arange(b, min(b + size, len(queries))) for b in range(0, len(queries), size)]
    return [(queries.take(rows), params.take(rows)) for rows in query_groups]


def merge_parts(call_parts: Sequence[RequestPart]) -> tuple[QueryBatch, SearchParams, SearchContext]:
    """All queries of a call. Exclusions are padded to the longest; the deadline is the earliest, the origin that of the first request."""
    queries = QueryBatch.joined([part.queries for part in call_parts])
    beam_size_B = np.concatenate([part.params.beam_size_B for part in call_parts])
    m_B = np.concatenate([part.params.m_B for part in call_parts])
    exclusions = [np.empty((len(part.queries), 0)) if part.params.exclude_BE is None else part.params.exclude_BE for part in call_parts]
    exclude_BE = stacked(exclusions, NO_ROW) if any(map(np.size, exclusions)) else None
    mask_B = None
    if any(part.params.mask_B is not None for part in call_parts):
        mask_B = tuple(mask for part in call_parts for mask in part.params.mask_B or [None] * len(part.queries))
    deadlines = [part.context.deadline for part in call_parts if part.context.deadline is not None]
    context = SearchContext(min(deadlines, default=None), call_parts[0].context.origin)
    return queries, SearchParams(beam_size_B, m_B, exclude_BE, mask_B=mask_B), context


def cut_result(result: SearchResult, call_parts: Sequence[RequestPart]) -> list[SearchResult]:
    """The rows of each part in a call's result, as wide as the largest m of the part."""
    results, begin = [], 0
    for part in call_parts:
        results.append(between(result, begin, begin + len(part.queries), int(part.params.m_B.max())))
        begin += len(part.queries)
    return results


def join_answers(answers: Sequence[Answer]) -> Answer:
    """One answer from the answers to the parts of a request, in order. All parts have the same m."""
    return Answer(
        joined([answer.result for answer in answers]),
        engine_s=sum(answer.engine_s for answer in answers),
        batch=sum(answer.batch for answer in answers),
        beam_size=min(answer.beam_size for answer in answers),
        degraded=any(answer.degraded for answer in answers),
    )
