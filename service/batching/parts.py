"""Requests cut into parts that fit an engine call, parts merged into a call, and the call's result cut back.

Knows query batches and results. Does not know queues or threads.

Legend: B queries, E excluded items, M results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from espalier import frontier
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, Coverage, Frontier, SearchParams, SearchResult


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
    """At most `max_batch` queries of one request. `waiting` is guarded by the batcher's lock."""

    queries: QueryBatch
    params: SearchParams
    answer: asyncio.Future[Answer]
    deadline: float
    beam_size: int
    cost_s: float
    background: bool = False
    waiting: bool = True
    degraded: bool = False


def split(queries: QueryBatch, params: SearchParams, size: int) -> list[tuple[QueryBatch, SearchParams]]:
    """A request in pieces of at most `size` queries."""
    cut = [np.arange(b, min(b + size, len(queries))) for b in range(0, len(queries), size)]
    return [(queries.take(rows), params.take(rows)) for rows in cut]


def merge(parts: Sequence[Part]) -> tuple[QueryBatch, SearchParams]:
    """All queries of a call; exclusions are padded to the longest. All parts bring states or none; all have one memory."""
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
    frozen_B = None
    if any(part.params.frozen_B is not None for part in parts):
        frozen = [np.zeros(len(part.queries), np.bool_) if part.params.frozen_B is None else part.params.frozen_B for part in parts]
        frozen_B = np.concatenate(frozen)
    states = [part.params.states_BLS for part in parts if part.params.states_BLS is not None]
    params = SearchParams(
        beam_size_B,
        m_B,
        exclude_BE,
        mask_B=mask_B,
        frozen_B=frozen_B,
        frontier=any(part.params.frontier for part in parts),
        states_BLS=np.concatenate(states) if states else None,
        memory=parts[0].params.memory,
        deadline=min((part.params.deadline for part in parts if part.params.deadline is not None), default=None),
        origin=parts[0].params.origin,
    )
    return queries, params


def cut(result: SearchResult, parts: Sequence[Part]) -> list[SearchResult]:
    """Each part's rows of a call's result, as wide as its own largest m."""
    results, b = [], 0
    for part in parts:
        end, m = b + len(part.queries), int(part.params.m_B.max())
        results.append(
            SearchResult(
                result.item_rows_BM[b:end, :m],
                result.scores_BM[b:end, :m],
                result.ranks_BM[b:end, :m],
                result.keys_BM[b:end, :m],
                result.count_B[b:end],
                result.complete_B[b:end],
                finite_B=None if result.finite_B is None else result.finite_B[b:end],
                frontiers=tuple(frontier.between(one, b, end) for one in result.frontiers) if part.params.frontier else (),
                coverage=result.coverage and replace(result.coverage, answered_BS=result.coverage.answered_BS[b:end]),
            )
        )
        b = end
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


def joined(results: Sequence[SearchResult]) -> SearchResult:
    """The results of the parts of one request, without traces."""
    if len(results) == 1:
        return results[0]
    finite = [result.finite_B for result in results if result.finite_B is not None]
    return SearchResult(
        np.concatenate([result.item_rows_BM for result in results]),
        np.concatenate([result.scores_BM for result in results]),
        np.concatenate([result.ranks_BM for result in results]),
        np.concatenate([result.keys_BM for result in results]),
        np.concatenate([result.count_B for result in results]),
        np.concatenate([result.complete_B for result in results]),
        finite_B=np.concatenate(finite) if finite else None,
        frontiers=_joined_frontiers(results),
        coverage=Coverage.joined([result.coverage for result in results]),
    )


def _joined_frontiers(results: Sequence[SearchResult]) -> tuple[Frontier, ...]:
    ends = np.cumsum([len(result.count_B) for result in results])
    members = [np.arange(end - len(result.count_B), end) for end, result in zip(ends, results, strict=True)]
    trees = zip(*(result.frontiers for result in results), strict=True)
    return tuple(frontier.joined(list(zip(members, own, strict=True)), int(ends[-1])) for own in trees)
