"""Concurrent requests share engine calls, and none spoils another's."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import Engine, Frontier, NodeMask, SearchParams, SearchResult
from service.batching.admission import OVERLOAD_S, Admission, Limits
from service.batching.batcher import JOB_QUERIES, OVERLOAD_SWITCH_S, QUIET_JOB_QUERIES, QUIET_S, SWITCH_S, Batcher
from service.batching.parts import Answer
from service.errors import DeadlinePassed, EngineFailed, NotReady, QueueFull
from tests.service.fake_engine import FakeEngine

ITEMS, KIND = 40, HistoryKind(length=3)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(ITEMS)
    yield fake
    fake.go.set()


def queries(*newest: int) -> QueryBatch:
    return pad_histories(KIND, [np.array([item]) for item in newest])


@asynccontextmanager
async def held(engine: FakeEngine, batcher: Batcher, beam_size: int = 5) -> AsyncIterator[asyncio.Task[Answer]]:
    """The engine is busy with a request of one query until the block ends."""
    engine.go.clear()
    engine.started.clear()
    busy = asyncio.create_task(batcher.search(queries(0), SearchParams.uniform(1, beam_size, 5)))
    assert await asyncio.to_thread(engine.started.wait, 10)
    try:
        yield busy
    finally:
        engine.go.set()


async def accepted(*searches: Coroutine[Any, Any, Answer]) -> list[asyncio.Task[Answer]]:
    """Tasks whose queries are in the queue."""
    tasks = [asyncio.create_task(search) for search in searches]
    await asyncio.sleep(0)  # one turn of the event loop: each task runs until it waits for the engine
    return tasks


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """The interpreter's switch interval is as before afterwards."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def newest(engine: FakeEngine, call: int) -> list[int]:
    return [int(item) for item in engine.calls[call][0].array[:, -1]]


def test_requests_that_come_while_the_engine_is_busy_share_the_next_call(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=16), "test")
        async with held(engine, batcher) as busy:
            tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 9, 9)) for i in range(1, 6)))
            assert batcher.depth == 5
        answers = await asyncio.gather(busy, *tasks)
        assert [len(call[0]) for call in engine.calls] == [1, 5]
        assert newest(engine, 1) == [1, 2, 3, 4, 5]
        assert [answer.batch for answer in answers] == [1, 5, 5, 5, 5, 5]
        assert batcher.depth == 0
        assert await batcher.drain(10)

    asyncio.run(scenario())


def test_where_calls_end_at_deadlines_a_short_one_cuts_no_other_request_short(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=16, calls=2), "test")
        async with held(engine, batcher) as first, held(engine, batcher) as second:
            ends = [time.perf_counter() + seconds for seconds in (30, 30.01, 2, 30)]
            tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 9, 9), end) for i, end in enumerate(ends)))
        await asyncio.gather(first, second, *tasks)
        shared = sorted(newest(engine, call) for call in range(2, len(engine.calls)))
        assert shared == [[0, 1], [2], [3]]
        assert await batcher.drain(10)

    asyncio.run(scenario())


def test_each_request_of_a_call_keeps_its_own_beam_m_and_exclusions(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=16), "test")
        exclude_BE = np.array([[0, 2, 4], [1, -1, -1]])
        async with held(engine, batcher):
            wide, narrow, excluding = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, beam_size=20, m=20)),
                batcher.search(queries(2), SearchParams.uniform(1, beam_size=3, m=7)),
                batcher.search(queries(3, 4), SearchParams.uniform(2, beam_size=8, m=2, exclude_BE=exclude_BE)),
            )
        results = [(await task).result for task in (wide, narrow, excluding)]
        assert [result.item_rows_BM.shape for result in results] == [(1, 20), (1, 7), (2, 2)]
        assert results[0].item_rows_BM[0].tolist() == list(range(20))
        assert results[1].item_rows_BM[0].tolist() == [0, 1, 2, -1, -1, -1, -1]
        assert (results[1].count_B.tolist(), results[1].complete_B.tolist()) == ([3], [False])
        assert results[2].item_rows_BM.tolist() == [[1, 3], [0, 2]]
        params = engine.calls[1][1]
        assert (params.beam_size_B.tolist(), params.m_B.tolist()) == ([20, 3, 8, 8], [20, 7, 2, 2])
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_request_larger_than_a_batch_takes_several_calls(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=4), "test")
        exclude_BE = np.arange(10).reshape(10, 1)
        answer = await batcher.search(queries(*range(10)), SearchParams.uniform(10, 40, 40, exclude_BE))
        assert [len(call[0]) for call in engine.calls] == [4, 4, 2]
        assert answer.batch == 10
        assert [set(range(ITEMS)) - set(rows.tolist()) for rows in answer.result.item_rows_BM] == [{i} for i in range(10)]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_call_never_exceeds_the_batch_and_keeps_the_order(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=4), "test")
        async with held(engine, batcher):
            parts = [queries(1, 2, 3), queries(4, 5), queries(6)]
            tasks = await accepted(*(batcher.search(part, SearchParams.uniform(len(part), 2, 2)) for part in parts))
        await asyncio.gather(*tasks)
        assert [newest(engine, call) for call in (1, 2)] == [[1, 2, 3], [4, 5, 6]]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_cancelled_request_never_reaches_the_engine(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=16), "test")
        async with held(engine, batcher):
            stays, goes = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 2, 2)) for i in (1, 2)))
            goes.cancel()
            await asyncio.wait([goes])
        await stays
        assert newest(engine, 1) == [1]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_an_engine_failure_fails_only_the_requests_of_its_call(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=16), "test")
        async with held(engine, batcher) as busy:
            engine.failure = ValueError("out of memory")
            behind = await accepted(batcher.search(queries(1), SearchParams.uniform(1, 2, 2)))
        with pytest.raises(EngineFailed, match="out of memory"):
            await busy
        assert (await behind[0]).result.count_B.tolist() == [2]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_draining_finishes_accepted_requests_and_refuses_new_ones(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=1), "test")
        async with held(engine, batcher) as busy:
            waiting = await accepted(batcher.search(queries(1), SearchParams.uniform(1, 2, 2)))
            drained = asyncio.create_task(batcher.drain(10))
            await asyncio.sleep(0)
            with pytest.raises(NotReady):
                await batcher.search(queries(2), SearchParams.uniform(1, 2, 2))
        assert await drained
        assert [(await task).result.count_B.tolist() for task in (busy, *waiting)] == [[5], [2]]

    asyncio.run(scenario())


def test_draining_gives_up_after_its_time(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=1), "test")
        async with held(engine, batcher) as busy:
            assert not await batcher.drain(0)
        await busy

    asyncio.run(scenario())


def test_queries_that_take_long_one_after_the_other_do_not_share_a_call(engine: FakeEngine) -> None:
    """On a CPU nobody gets an answer before the end of a call, so that a call is only filled up to a millisecond."""

    async def scenario() -> None:
        clock = [0.0]
        batcher = Batcher(engine, Limits(max_batch=16), "test", clock=lambda: clock[0])
        async with held(engine, batcher) as busy:
            clock[0] += 0.003  # so long a query takes, as far as the batcher can know
        await busy
        async with held(engine, batcher) as busy:
            tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in (1, 2, 3)))
        await asyncio.gather(busy, *tasks)
        assert [len(call[0]) for call in engine.calls] == [1, 1, 1, 1, 1]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_each_query_of_a_call_keeps_its_own_mask(engine: FakeEngine) -> None:
    mask = NodeMask(np.arange(ITEMS) % 2 == 1, ITEMS // 2)

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        async with held(engine, batcher):
            plain, masked = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 3, 3)),
                batcher.search(queries(2, 3), SearchParams.uniform(2, 3, 3, mask=mask)),
            )
        assert (await plain).result.item_rows_BM.tolist() == [[0, 1, 2]]
        assert (await masked).result.item_rows_BM.tolist() == [[1, 3, 5], [1, 3, 5]]
        assert engine.calls[1][1].mask_B == (None, mask, mask)
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_traced_request_is_alone_in_its_call_and_whole(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=4), "test")
        async with held(engine, batcher):
            tasks = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 3, 3)),
                batcher.search(queries(2), SearchParams.uniform(1, 3, 3, trace=True)),
                batcher.search(queries(3), SearchParams.uniform(1, 3, 3)),
                batcher.search(queries(4, 5, 6, 7, 8, 9), SearchParams.uniform(6, 3, 3, trace=True)),
            )
        await asyncio.gather(*tasks)
        assert [newest(engine, call) for call in range(1, 5)] == [[1], [2], [3], [4, 5, 6, 7, 8, 9]]
        assert [call[1].trace for call in engine.calls] == [False, False, True, False, True]
        await batcher.drain(10)

    asyncio.run(scenario())


# -- deadlines ------------------------------------------------------------------------------------------------------------


def test_what_expires_in_the_queue_is_answered_at_its_deadline_and_never_reaches_the_engine(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        async with held(engine, batcher):
            late, waits = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 5, 5), time.perf_counter() + 0.01),
                batcher.search(queries(2), SearchParams.uniform(1, 5, 5), time.perf_counter() + 60),
            )
            with pytest.raises(DeadlinePassed):
                await late  # the engine is still held
            assert batcher.depth == 1
        await waits
        assert newest(engine, 1) == [2]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_deadline_that_has_passed_already_is_refused(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        with pytest.raises(DeadlinePassed):
            await batcher.search(queries(1), SearchParams.uniform(1, 5, 5), time.perf_counter())
        assert engine.calls == []
        await batcher.drain(10)

    asyncio.run(scenario())


def test_one_expired_part_of_a_large_request_fails_it_and_frees_the_queue(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=2), "test")
        async with held(engine, batcher):
            (late,) = await accepted(batcher.search(queries(1, 2, 3, 4, 5), SearchParams.uniform(5, 5, 5), time.perf_counter() + 0.01))
            with pytest.raises(DeadlinePassed):
                await late
            assert batcher.depth == 0
        await batcher.drain(10)
        assert len(engine.calls) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("smallest", "searched"), [(None, 32), (20, 20), (4, 4)])
def test_near_the_deadline_the_beam_shrinks_as_far_as_allowed(engine: FakeEngine, smallest: int | None, searched: int) -> None:
    async def scenario() -> None:
        clock = [0.0]
        batcher = Batcher(engine, Limits(smallest_beam_size=smallest), "test", clock=lambda: clock[0])
        async with held(engine, batcher, beam_size=32) as busy:
            clock[0] += 0.002  # so long a query takes
        await busy
        async with held(engine, batcher, beam_size=1):
            hurried, relaxed = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 32, 5), deadline=100.0),
                batcher.search(queries(2), SearchParams.uniform(1, 32, 5), deadline=1e6),
            )
            clock[0] = 100.0 - 1e-9
        answer = await hurried
        assert (answer.beam_size, answer.degraded) == (searched, searched < 32)
        assert engine.calls[2][1].beam_size_B.tolist() == [searched]
        answer = await relaxed
        assert (answer.beam_size, answer.degraded) == (32, False)
        await batcher.drain(10)

    asyncio.run(scenario())


# -- a queue with an end --------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_when_to_try_again(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=3), "test")
        async with held(engine, batcher):
            tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in (1, 2, 3)))
            with pytest.raises(QueueFull, match="3 queries wait") as refused:
                await batcher.search(queries(4), SearchParams.uniform(1, 5, 5))
            assert refused.value.headers == (("Retry-After", "1"),)
        await asyncio.gather(*tasks)
        assert (await batcher.search(queries(5), SearchParams.uniform(1, 5, 5))).batch == 1
        await batcher.drain(10)

    asyncio.run(scenario())


def test_accepted_work_counts_as_offered_unless_it_would_have_waited(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overload lasts as long as more is offered than can be done; what waits for room offers no more than there is room for."""
    offered: list[tuple[int, bool]] = []
    monkeypatch.setattr(Admission, "accepted", lambda self, count, busy: offered.append((count, busy)))

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        await batcher.search(queries(1, 2), SearchParams.uniform(2, 5, 5))
        await batcher.search(queries(3), SearchParams.uniform(1, 5, 5), patient=True)
        async with held(engine, batcher) as first:
            (second,) = await accepted(batcher.search(queries(4), SearchParams.uniform(1, 5, 5)))
        await asyncio.gather(first, second)
        await batcher.drain(10)

    asyncio.run(scenario())
    assert offered == [(2, False), (1, False), (1, True)]


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=3), "test")
        answer = await batcher.search(queries(*range(9)), SearchParams.uniform(9, 5, 5))
        assert len(answer.result.count_B) == 9
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_patient_request_waits_for_room(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=1), "test")
        async with held(engine, batcher):
            first, second = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 5, 5)),
                batcher.search(queries(2), SearchParams.uniform(1, 5, 5), patient=True),
            )
            assert (batcher.depth, second.done()) == (1, False)
        await asyncio.gather(first, second)
        assert [newest(engine, call) for call in (1, 2)] == [[1], [2]]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_draining_wakes_those_who_wait_for_room(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=1), "test")
        async with held(engine, batcher):
            first, patient = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 5, 5)),
                batcher.search(queries(2), SearchParams.uniform(1, 5, 5), patient=True),
            )
            drained = asyncio.create_task(batcher.drain(10))
            with pytest.raises(NotReady):
                await patient
        await first
        assert await drained

    asyncio.run(scenario())


def test_a_patient_request_that_finds_no_room_by_its_deadline_has_expired(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=1), "test")
        async with held(engine, batcher):
            first, late = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 5, 5)),
                batcher.search(queries(2), SearchParams.uniform(1, 5, 5), time.perf_counter() + 0.01, patient=True),
            )
            with pytest.raises(DeadlinePassed):
                await late
        await first
        assert len(engine.calls) == 2
        await batcher.drain(10)

    asyncio.run(scenario())


def test_room_is_given_when_the_engine_takes_what_waits_not_when_it_has_answered(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=2, max_wait_s=0.1), "test")  # the engine takes nothing before all have come
        engine.go.clear()
        tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5), patient=True) for i in range(6)))
        assert batcher.depth == 2
        assert await asyncio.to_thread(engine.started.wait, 10)
        for _ in range(20):
            await asyncio.sleep(0)
        assert batcher.depth == 2  # two more have come in while the engine is at the first two
        engine.go.set()
        await asyncio.gather(*tasks)
        assert [item for call in range(len(engine.calls)) for item in newest(engine, call)] == list(range(6))
        await batcher.drain(10)

    asyncio.run(scenario())


def test_room_that_a_cancelled_request_leaves_is_given_on(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_queue=1), "test")
        async with held(engine, batcher):
            goes, second, third = await accepted(
                batcher.search(queries(1), SearchParams.uniform(1, 5, 5)),
                *(batcher.search(queries(i), SearchParams.uniform(1, 5, 5), patient=True) for i in (2, 3)),
            )
            goes.cancel()
            await asyncio.wait([goes])
            for _ in range(5):
                await asyncio.sleep(0)
            assert batcher.depth == 1  # the second has come in
        await asyncio.gather(second, third)
        assert [newest(engine, call) for call in (1, 2)] == [[2], [3]]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_streams_leave_room_for_a_burst_and_cause_no_overload(engine: FakeEngine) -> None:
    async def scenario() -> None:
        clock = [0.0]
        batcher = Batcher(engine, Limits(max_batch=1), "test", clock=lambda: clock[0])
        async with held(engine, batcher) as busy:
            clock[0] += 0.002
        await busy
        async with held(engine, batcher):
            streams = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5), patient=True) for i in range(1, 9)))
            assert batcher.depth == 1
            singles = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in range(20, 30)))
            assert batcher.depth == 11
        await asyncio.gather(*streams, *singles)
        await batcher.drain(10)

    asyncio.run(scenario())


def test_an_idle_batcher_holds_nothing_of_its_last_call(engine: FakeEngine) -> None:
    """A version is freed when nobody holds it; an expired request's traceback does."""

    class Caller:
        """Stands for what a request's frames hold."""

    async def request(batcher: Batcher, caller: Caller) -> None:
        assert caller is not None
        await batcher.search(queries(1), SearchParams.uniform(1, 5, 5), time.perf_counter() + 0.01)

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        engine.go.clear()
        caller = Caller()
        alive = weakref.ref(caller)
        with pytest.raises(DeadlinePassed):
            await request(batcher, caller)
        del caller
        engine.go.set()
        await batcher.search(queries(2), SearchParams.uniform(1, 5, 5))
        assert alive() is None
        await batcher.drain(10)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_each_request_is_told_of_its_own_queries_alone_whether_their_scores_are_finite() -> None:
    """Requests of one and of two queries in one call, and one of three queries in two calls."""

    class Vectors(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            return replace(super().search(queries, params), finite_B=queries.array[:, -1] % 2 == 0)

    told = Vectors(ITEMS)

    async def scenario() -> None:
        batcher = Batcher(told, Limits(max_batch=2), "test")
        async with held(told, batcher):
            tasks = await accepted(*(batcher.search(part, SearchParams.uniform(len(part), 5, 5)) for part in (queries(2), queries(3))))
            tasks += await accepted(batcher.search(queries(4, 6, 7), SearchParams.uniform(3, 5, 5)))
        answers = [(await task).result.finite_B for task in tasks]
        assert [flags.tolist() for flags in answers if flags is not None] == [[True], [False], [True, True, False]]
        await batcher.drain(10)

    asyncio.run(scenario())


@pytest.mark.usefixtures("switch_interval")
def test_threads_take_turns_faster_as_long_as_there_is_overload(engine: FakeEngine) -> None:
    now = [0.0]

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=1, max_queue=1), "test", clock=lambda: now[0])
        async with held(engine, batcher) as busy:
            [waiting] = await accepted(batcher.search(queries(1), SearchParams.uniform(1, 5, 5)))
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
            with pytest.raises(QueueFull):
                batcher.check_room(1)
            assert sys.getswitchinterval() == pytest.approx(OVERLOAD_SWITCH_S)
        await asyncio.gather(busy, waiting)
        now[0] += 2 * OVERLOAD_S
        batcher.check_room(1)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        assert await batcher.drain(10)

    asyncio.run(scenario())


def test_each_request_of_a_call_keeps_whether_it_is_frozen(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        plain = SearchParams.uniform(1, 5, 5)
        async with held(engine, batcher):
            frozen = replace(SearchParams.uniform(2, 5, 5), frozen_B=np.array([False, True]))
            asked = await accepted(batcher.search(queries(1), plain), batcher.search(queries(2, 3), frozen))
        await asyncio.gather(*asked)
        frozen_B = engine.calls[1][1].frozen_B
        assert frozen_B is not None
        assert frozen_B.tolist() == [False, False, True]
        await batcher.drain(5)

    asyncio.run(scenario())


def test_a_job_runs_on_the_engines_thread_and_gives_its_result_or_its_error(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")

        def job(given: Engine) -> str:
            assert given is engine
            return threading.current_thread().name

        def failing(given: Engine) -> None:
            raise ValueError("so")

        assert await asyncio.wrap_future(batcher.run(job)) == "engine-test"
        with pytest.raises(ValueError, match="so"):
            await asyncio.wrap_future(batcher.run(failing))
        await batcher.search(queries(1), SearchParams.uniform(1, 5, 5))
        await batcher.drain(5)
        with pytest.raises(NotReady):
            batcher.run(job)

    asyncio.run(scenario())


def test_a_search_as_jobs_is_short_calls_and_one_result(engine: FakeEngine) -> None:
    class Frontiers(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            nodes_BK = np.full((len(queries), len(queries)), -1, np.int64)
            nodes_BK[:, 0] = queries.array[:, -1]
            ranks_BK = np.where(nodes_BK >= 0, np.float32(0), np.float32(-np.inf))
            own = Frontier(nodes_BK, ranks_BK, queries.array[:, -1:].astype(np.float32))
            return replace(super().search(queries, params), frontiers=(own,))

    fake = Frontiers(ITEMS)

    async def scenario() -> None:
        batcher = Batcher(fake, Limits(), "test")
        await batcher.search(queries(1), SearchParams.uniform(1, 5, 5))
        asked = queries(*range(JOB_QUERIES + 2))
        found = await asyncio.to_thread(batcher.search_now, asked, SearchParams.uniform(len(asked), 5, 5))
        assert [len(called) for called, _ in fake.calls] == [1, JOB_QUERIES, 2]
        assert found.item_rows_BM.shape == (JOB_QUERIES + 2, 5)
        (frontier,) = found.frontiers
        assert frontier.nodes_BK[:, 0].tolist() == [*range(JOB_QUERIES + 2)]
        assert frontier.nodes_BK.shape == (JOB_QUERIES + 2, JOB_QUERIES)
        assert frontier.states_BS is not None
        assert frontier.states_BS[:, 0].tolist() == [*range(JOB_QUERIES + 2)]
        await batcher.drain(5)

    asyncio.run(scenario())


def test_jobs_are_larger_while_nobody_asks(engine: FakeEngine) -> None:
    now = [0.0]

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test", clock=lambda: now[0])
        await batcher.search(queries(1), SearchParams.uniform(1, 5, 5))
        for waited_s in (QUIET_S, QUIET_S / 2):  # after the second the limit has passed
            now[0] += waited_s
            asked = queries(*range(QUIET_JOB_QUERIES + 2))
            await asyncio.to_thread(batcher.search_now, asked, SearchParams.uniform(len(asked), 5, 5))
        small, large = [JOB_QUERIES] * 4 + [2], [QUIET_JOB_QUERIES, 2]
        assert [len(called) for called, _ in engine.calls] == [1, *small, *large]
        await batcher.drain(5)

    asyncio.run(scenario())


def test_while_queries_wait_jobs_pause_between_each_other(engine: FakeEngine) -> None:
    now = [0.0]
    order: list[str] = []

    class Timed(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
            order.append("call")
            now[0] += 1.0
            return super().search(queries, params)

    timed = Timed(ITEMS)

    def job(_: Engine) -> None:
        order.append("job")
        now[0] += 1.0

    async def scenario() -> None:
        batcher = Batcher(timed, Limits(max_batch=1, burst_s=1e9), "test", clock=lambda: now[0])
        async with held(timed, batcher):
            asked = await accepted(*(batcher.search(queries(1), SearchParams.uniform(1, 5, 5)) for _ in range(7)))
            jobs = [batcher.run(job) for _ in range(3)]
        await asyncio.gather(*asked, *map(asyncio.wrap_future, jobs))
        assert order == ["call", "job", "call", "call", "call", "job", "call", "call", "call", "job", "call"]
        await batcher.drain(5)

    asyncio.run(scenario())


class Meeting(FakeEngine):
    """Its searches end once as many as `parties` are under way."""

    def __init__(self, parties: int) -> None:
        super().__init__(ITEMS)
        self.barrier = threading.Barrier(parties, timeout=10)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        self.barrier.wait()
        return super().search(queries, params)


def test_several_calls_run_at_once_where_the_engine_takes_them() -> None:
    async def scenario() -> None:
        engine = Meeting(3)
        batcher = Batcher(engine, Limits(max_batch=1, calls=3), "test")
        tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in range(6)))
        answers = await asyncio.gather(*tasks)
        assert [answer.batch for answer in answers] == [1] * 6
        assert sorted(newest(engine, call)[0] for call in range(6)) == list(range(6))
        assert await batcher.drain(10)

    asyncio.run(scenario())


def test_one_call_runs_at_a_time_unless_the_limits_say_more() -> None:
    async def scenario() -> None:
        engine = Meeting(2)
        engine.barrier = threading.Barrier(2, timeout=0.2)
        batcher = Batcher(engine, Limits(max_batch=1), "test")
        tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in range(2)))
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in failed] == [EngineFailed] * 2
        assert await batcher.drain(10)

    asyncio.run(scenario())


def test_an_engine_of_several_calls_is_told_the_nearest_deadline_of_a_call() -> None:
    async def scenario() -> None:
        engine = FakeEngine(ITEMS)
        batcher = Batcher(engine, Limits(max_batch=16, calls=2), "test")
        now = time.perf_counter()
        engine.go.clear()
        busy = []
        for _ in range(2):
            engine.started.clear()
            busy += await accepted(batcher.search(queries(0), SearchParams.uniform(1, 5, 5)))
            assert await asyncio.to_thread(engine.started.wait, 10)
        tasks = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5), now + 50 + i) for i in range(2)))
        engine.go.set()
        await asyncio.gather(*busy, *tasks)
        assert [call[1].deadline for call in engine.calls[:2]] == [None, None]
        assert {call[1].deadline for call in engine.calls[2:]} <= {now + 50, now + 51}
        assert engine.calls[2][1].deadline == now + 50
        assert await batcher.drain(10)

    asyncio.run(scenario())
