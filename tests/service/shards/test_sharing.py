"""Searches of several routers in one engine call: states, frontiers and memories stay with their queries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal

from espalier.engines.stages import GivenQueries
from espalier.memory_lists import MemoryLists
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Frontier, SearchContext, SearchParams, SearchResult
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from tests.service.fake_engine import FakeEngine
from tests.service.test_batching import accepted, held, queries


class Beams(FakeEngine):
    """Its frontier of a query is as many nodes as the beam says, from the query's newest item on."""

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        result = super().search(queries, params)
        if not isinstance(queries, GivenQueries) or not queries.frontier:
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


def given(*newest: int, **more: Any) -> GivenQueries:
    """Queries of somebody else, with what he made of them."""
    own = queries(*newest)
    return GivenQueries(own.kind, own.rows, **more)


def params(batch: int, beam_size: int = 5) -> SearchParams:
    return SearchParams.uniform(batch, beam_size, 5)


def test_the_states_and_the_memory_of_a_call_are_those_of_its_queries_in_order() -> None:
    engine, batches = FakeEngine(40), (1, 3, 2)
    states = [np.full((batch, 2, 3), number, np.float32) for number, batch in enumerate(batches)]
    memory = [lists(*([number, number + batch] for number in range(batch))) for batch in batches]
    asked(
        engine,
        *(
            (given(*range(len(own)), states_BLS=own, memory=remembered), params(len(own)))
            for own, remembered in zip(states, memory, strict=True)
        ),
    )
    called = engine.calls[1][0]
    assert isinstance(called, GivenQueries)
    assert called.states_BLS is not None
    assert called.memory is not None
    assert_array_equal(called.states_BLS, np.concatenate(states))
    assert called.memory.offset_B.tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert called.memory.nodes.tolist() == [0, 1, 0, 3, 1, 4, 2, 5, 0, 2, 1, 3]
    assert called.memory.values.tolist() == called.memory.nodes.tolist()


def test_a_frontier_goes_to_those_who_asked_for_one_and_is_as_wide_as_they_need() -> None:
    engine = Beams(40)
    wide, without, narrow = asked(
        engine, (given(7, frontier=True), params(1, 6)), (given(3), params(1, 6)), (given(20, 9, frontier=True), params(2, 2))
    )
    assert len(engine.calls) == 2
    assert wide.frontiers[0].nodes_BK.tolist() == [[7, 8, 9, 10, 11, 12]]
    assert narrow.frontiers[0].nodes_BK.tolist() == [[20, 21], [9, 10]]
    assert narrow.frontiers[0].ranks_BK.tolist() == [[20, 21], [9, 10]]
    assert without.item_rows_BM.shape == (1, 5)
    (alone,) = asked(engine, (given(3), params(1)))
    assert alone.frontiers == ()


def test_queries_with_a_memory_and_without_one_are_in_calls_of_their_own_and_so_are_those_that_nobody_encoded() -> None:
    engine, one = FakeEngine(40), lists([4])
    asked(
        engine,
        *(
            (batch, params(1))
            for batch in (given(0), given(1), given(2, memory=one), given(3, memory=one), given(4), queries(5), queries(6))
        ),
    )
    called = [batch for batch, _ in engine.calls[1:]]
    assert [len(batch) for batch in called] == [2, 2, 1, 2]
    assert [isinstance(batch, GivenQueries) for batch in called] == [True, True, True, False]
    assert [batch.memory is not None for batch in called if isinstance(batch, GivenQueries)] == [False, True, False]


def lists(*nodes_B: list[int]) -> MemoryLists:
    """Lists of some nodes of each query, whose mem is their number."""
    nodes = np.concatenate([np.array(nodes, np.int64) for nodes in nodes_B])
    return MemoryLists(np.append(0, np.cumsum([len(nodes) for nodes in nodes_B])), nodes, nodes.astype(np.float32))
