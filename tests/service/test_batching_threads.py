"""The engine's threads: jobs between calls, several calls at once, and how they share the interpreter."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from espalier.queries import QueryBatch
from espalier.search import Engine, Frontier, SearchParams, SearchResult
from service.batching.admission import OVERLOAD_S
from service.batching.batcher import JOB_QUERIES, OVERLOAD_SWITCH_S, QUIET_JOB_QUERIES, QUIET_S, SWITCH_S
from service.errors import EngineFailed, NotReady, QueueFull
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import OwnTime, pass_time
from tests.service.test_batching import ITEMS, NewBatcher, accepted, ask, calls, held, new_batcher, queries

__all__ = ["new_batcher"]


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """The interpreter's switch interval is as before afterwards."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
async def test_threads_take_turns_faster_as_long_as_there_is_overload(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=1)
    async with held(engine, batcher) as busy:
        (waiting,) = await accepted(ask(batcher, 1))
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        with pytest.raises(QueueFull):
            batcher.check_room(1)
        assert sys.getswitchinterval() == pytest.approx(OVERLOAD_SWITCH_S)
    await asyncio.gather(busy, waiting)
    await pass_time(2 * OVERLOAD_S)
    batcher.check_room(1)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


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


async def test_a_search_as_jobs_is_short_calls_and_one_result(new_batcher: NewBatcher) -> None:
    class Frontiers(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            nodes_BK = np.full((len(queries), len(queries)), -1, np.int64)
            nodes_BK[:, 0] = queries.array[:, -1]
            ranks_BK = np.where(nodes_BK >= 0, np.float32(0), np.float32(-np.inf))
            own = Frontier(nodes_BK, ranks_BK, queries.array[:, -1:].astype(np.float32))
            return replace(super().search(queries, params), frontiers=(own,))

    engine = Frontiers(ITEMS)
    batcher = new_batcher(engine)
    await ask(batcher, 1)
    asked = queries(*range(JOB_QUERIES + 2))
    found = await asyncio.to_thread(batcher.search_now, asked, SearchParams.uniform(len(asked), 5, 5))
    assert [len(call) for call in calls(engine)] == [1, JOB_QUERIES, 2]
    assert found.item_rows_BM.shape == (JOB_QUERIES + 2, 5)
    (frontier,) = found.frontiers
    assert frontier.nodes_BK[:, 0].tolist() == [*range(JOB_QUERIES + 2)]
    assert frontier.nodes_BK.shape == (JOB_QUERIES + 2, JOB_QUERIES)
    assert frontier.states_BS is not None
    assert frontier.states_BS[:, 0].tolist() == [*range(JOB_QUERIES + 2)]


async def test_jobs_are_larger_while_nobody_asks(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher()
    await ask(batcher, 1)
    asked = queries(*range(QUIET_JOB_QUERIES + 2))
    for waited_s in (QUIET_S, QUIET_S / 2):  # after the second the limit has passed
        await pass_time(waited_s)
        await asyncio.to_thread(batcher.search_now, asked, SearchParams.uniform(len(asked), 5, 5))
    small, large = [JOB_QUERIES] * 4 + [2], [QUIET_JOB_QUERIES, 2]
    assert [len(call) for call in calls(engine)] == [1, *small, *large]


async def test_while_queries_wait_jobs_pause_between_each_other(new_batcher: NewBatcher) -> None:
    loop, order = asyncio.get_running_loop(), list[str]()
    assert isinstance(loop, OwnTime)

    def took_a_second(what: str) -> None:
        order.append(what)
        loop.passed_s += 1

    class Timed(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            took_a_second("call")
            return super().search(queries, params)

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

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        self.barrier.wait()
        return super().search(queries, params)


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
    assert [params.deadline for _, params in engine.calls[:2]] == [None, None]
    assert {params.deadline for _, params in engine.calls[2:]} <= {50, 51}
    assert engine.calls[2][1].deadline == 50
