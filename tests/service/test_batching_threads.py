"""The engine's threads: jobs between calls, several calls at once, and what is said of overload."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from espalier.engines.stages import Frontier, ParentsFound
from espalier.live.overlay import Overlay
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Engine, SearchContext, SearchParams, SearchResult
from service.batching.admission import OVERLOAD_S, Limits
from service.batching.batcher import JOB_QUERIES, QUIET_JOB_QUERIES, QUIET_S, Batcher
from service.errors import EngineFailed, NotReady, QueueFull
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import OwnTime, pass_time
from tests.service.test_batching import ITEMS, NewBatcher, accepted, ask, calls, held, new_batcher, queries

__all__ = ["new_batcher"]


async def test_it_says_when_overload_begins_and_when_it_ends(engine: FakeEngine) -> None:
    said = list[bool]()
    batcher = Batcher(engine, Limits(max_batch=1, max_queue=1), "test", on_overload=said.append, clock=asyncio.get_running_loop().time)
    for last in (False, True):
        async with held(engine, batcher) as busy:
            (waiting,) = await accepted(ask(batcher, 1))
            batcher.check_overload(1)
            with pytest.raises(QueueFull):
                await ask(batcher, 2)
            assert said == [True, False, True][: 1 + 2 * last]
            with pytest.raises(QueueFull):
                batcher.check_overload(1)
        await asyncio.gather(busy, waiting)
        if not last:
            await pass_time(2 * OVERLOAD_S)
            batcher.check_overload(1)
            assert said == [True, False]
    assert await batcher.drain(10)
    assert said == [True, False, True, False]


# -- jobs -----------------------------------------------------------------------------------------------------------------


async def test_a_job_runs_on_the_engines_thread_and_gives_its_result_or_its_error(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher()

    def job(given: Engine) -> str:
        assert given is engine
        return threading.current_thread().name

    def failing(given: Engine) -> None:
        raise ValueError("so")

    assert await asyncio.wrap_future(batcher.run(job)) == "engine-test"
    with pytest.raises(ValueError, match="so"):
        await asyncio.wrap_future(batcher.run(failing))
    await ask(batcher, 1)
    await batcher.drain(5)
    with pytest.raises(NotReady):
        batcher.run(job)


class Leading(FakeEngine):
    """A query leads to the node of its newest item's number, and that is its state; the beams are as wide as the call."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        raise AssertionError("nothing is live")

    def candidates(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        return self.search(queries, params, context)

    def parents(self, queries: QueryBatch, params: SearchParams) -> ParentsFound:
        nodes_BK = np.full((len(queries), len(queries)), -1, np.int64)
        nodes_BK[:, 0] = queries.array[:, -1]
        ranks_BK = np.where(nodes_BK >= 0, np.float32(0), np.float32(-np.inf))
        return ParentsFound(self.search(queries, params), (Frontier(nodes_BK, ranks_BK),), queries.array[:, -1:].astype(np.float32))


async def test_where_queries_lead_is_found_in_short_jobs_and_is_one_result(new_batcher: NewBatcher) -> None:
    engine = Leading(ITEMS)
    batcher = new_batcher(engine)
    await ask(batcher, 1)
    asked = queries(*range(JOB_QUERIES + 2))
    found = await asyncio.to_thread(batcher.parents_now, asked, SearchParams.uniform(len(asked), 5, 5))
    assert [len(call) for call in calls(engine)] == [1, JOB_QUERIES, 2]
    assert found.result.item_rows_BM.shape == (JOB_QUERIES + 2, 5)
    (frontier,) = found.frontiers
    assert frontier.nodes_BK[:, 0].tolist() == [*range(JOB_QUERIES + 2)]
    assert frontier.nodes_BK.shape == (JOB_QUERIES + 2, JOB_QUERIES)
    assert found.leaf_states_BS is not None
    assert found.leaf_states_BS[:, 0].tolist() == [*range(JOB_QUERIES + 2)]


async def test_an_engine_of_one_stage_cannot_say_where_queries_lead(new_batcher: NewBatcher) -> None:
    batcher = new_batcher(FakeEngine(ITEMS))
    with pytest.raises(EngineFailed, match="fake finds no parents"):
        await asyncio.to_thread(batcher.parents_now, queries(1), SearchParams.uniform(1, 5, 5))


async def test_jobs_are_larger_while_nobody_asks(new_batcher: NewBatcher) -> None:
    engine = Leading(ITEMS)
    batcher = new_batcher(engine)
    await ask(batcher, 1)
    asked = queries(*range(QUIET_JOB_QUERIES + 2))
    for waited_s in (QUIET_S, QUIET_S / 2):  # after the second the limit has passed
        await pass_time(waited_s)
        await asyncio.to_thread(batcher.parents_now, asked, SearchParams.uniform(len(asked), 5, 5))
    small, large = [JOB_QUERIES] * 4 + [2], [QUIET_JOB_QUERIES, 2]
    assert [len(call) for call in calls(engine)] == [1, *small, *large]


async def test_while_queries_wait_jobs_pause_between_each_other(new_batcher: NewBatcher) -> None:
    loop, order = asyncio.get_running_loop(), list[str]()
    assert isinstance(loop, OwnTime)

    def took_a_second(what: str) -> None:
        order.append(what)
        loop.passed_s += 1

    class Timed(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
            took_a_second("call")
            return super().search(queries, params, context)

    timed = Timed(ITEMS)
    batcher = new_batcher(timed, max_batch=1, burst_s=1e9)
    async with held(timed, batcher):
        asked = await accepted(*(ask(batcher, 1) for _ in range(7)))
        jobs = [batcher.run(lambda _: took_a_second("job")) for _ in range(3)]
    await asyncio.gather(*asked, *map(asyncio.wrap_future, jobs))
    assert order == ["call", "job", "call", "call", "call", "job", "call", "call", "call", "job", "call"]


# -- several calls at once ------------------------------------------------------------------------------------------------


class Meeting(FakeEngine):
    """Its searches end once as many as `parties` are under way, or fail when that takes longer than `wait_s`."""

    def __init__(self, parties: int, wait_s: float = 10) -> None:
        super().__init__(ITEMS)
        self.barrier = threading.Barrier(parties, timeout=wait_s)

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        self.barrier.wait()
        return super().search(queries, params, context)


async def test_several_calls_run_at_once_where_the_engine_takes_them(new_batcher: NewBatcher) -> None:
    engine = Meeting(3)
    batcher = new_batcher(engine, max_batch=1, calls=3)
    answers = await asyncio.gather(*(ask(batcher, i) for i in range(6)))
    assert [answer.batch for answer in answers] == [1] * 6
    assert sorted(calls(engine)) == [[i] for i in range(6)]


async def test_one_call_runs_at_a_time_unless_the_limits_say_more(new_batcher: NewBatcher) -> None:
    batcher = new_batcher(Meeting(2, wait_s=0.1), max_batch=1)
    failed = await asyncio.gather(*(ask(batcher, i) for i in range(2)), return_exceptions=True)
    assert [type(error) for error in failed] == [EngineFailed] * 2


async def test_an_engine_of_several_calls_is_told_the_nearest_deadline_of_a_call(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16, calls=2)
    async with held(engine, batcher) as first, held(engine, batcher) as second:
        tasks = await accepted(*(ask(batcher, i, deadline=50 + i) for i in range(2)))
    await asyncio.gather(first, second, *tasks)
    assert [context.deadline for context in engine.contexts[:2]] == [None, None]
    assert {context.deadline for context in engine.contexts[2:]} <= {50, 51}
    assert engine.contexts[2].deadline == 50
