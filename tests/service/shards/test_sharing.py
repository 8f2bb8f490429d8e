"""Searches of several routers in one engine call: states, frontiers and memories stay with their queries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

from espalier.memory_lists import MemoryLists
from espalier.queries import QueryBatch
from espalier.search import Frontier, SearchParams, SearchResult
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from service.shards.given import GivenMemory
from tests.service.fake_engine import FakeEngine
from tests.service.test_batching import accepted, held, queries


class Beams(FakeEngine):
    """Its frontier of a query is as many nodes as the beam says, from the query's newest item on."""

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        result = super().search(queries, params)
        if not params.frontier:
            return result
        nodes_BK = np.full((len(queries), int(params.beam_size_B.max())), -1, np.int64)
        for b, size in enumerate(params.beam_size_B.tolist()):
            nodes_BK[b, :size] = int(queries.array[b, -1]) + np.arange(size)
        ranks_BK = np.where(nodes_BK < 0, -np.inf, nodes_BK).astype(np.float32)
        return replace(result, frontiers=(Frontier(nodes_BK, ranks_BK),))


def asked(engine: FakeEngine, *searches: tuple[QueryBatch, SearchParams]) -> list[SearchResult]:
    """The results of searches that come while the engine is busy."""

    async def scenario() -> list[SearchResult]:
        batcher = Batcher(engine, Limits(), "test")
        async with held(engine, batcher):
            tasks = await accepted(*(batcher.search(*one) for one in searches))
        answers = await asyncio.gather(*tasks)
        await batcher.drain(10)
        return [answer.result for answer in answers]

    return asyncio.run(scenario())


def params(batch: int, beam_size: int = 5, **more: Any) -> SearchParams:
    return replace(SearchParams.uniform(batch, beam_size, 5), **more)


def test_the_states_of_a_call_are_those_of_its_queries_in_order() -> None:
    engine = FakeEngine(40)
    states = [np.full((batch, 2, 3), number, np.float32) for number, batch in enumerate((1, 3, 2))]
    asked(engine, *((queries(*range(len(own))), params(len(own), states_BLS=own)) for own in states))
    called = engine.calls[1][1].states_BLS
    assert called is not None
    assert_array_equal(called, np.concatenate(states))


def test_a_frontier_goes_to_those_who_asked_for_one_and_is_as_wide_as_they_need() -> None:
    engine = Beams(40)
    wide, without, narrow = asked(
        engine, (queries(7), params(1, 6, frontier=True)), (queries(3), params(1, 6)), (queries(20, 9), params(2, 2, frontier=True))
    )
    assert len(engine.calls) == 2
    assert wide.frontiers[0].nodes_BK.tolist() == [[7, 8, 9, 10, 11, 12]]
    assert without.frontiers == ()
    assert narrow.frontiers[0].nodes_BK.tolist() == [[20, 21], [9, 10]]
    assert narrow.frontiers[0].ranks_BK.tolist() == [[20, 21], [9, 10]]


def test_searches_with_memories_of_their_own_are_calls_of_their_own() -> None:
    engine = FakeEngine(40)
    lists = MemoryLists(np.zeros(2, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    one, other = GivenMemory(lists), GivenMemory(lists)
    asked(engine, *((queries(number), params(1, memory=memory)) for number, memory in enumerate((None, None, one, other, None))))
    assert [(len(batch), called.memory) for batch, called in engine.calls[1:]] == [(2, None), (1, one), (1, other), (1, None)]
