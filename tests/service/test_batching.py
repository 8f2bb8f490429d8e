"""Concurrent requests share engine calls, and none spoils another's. Time stands still unless a test lets it pass."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import NO_CONTEXT, NodeMask, SearchContext, SearchParams, SearchResult
from service.batching.admission import Admission, Limits
from service.batching.batcher import Batcher
from service.batching.priority import Priority
from service.batching.request_parts import Answer
from service.errors import DeadlinePassed, EngineFailed, NotReady, QueueFull, ShardsMissing
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import pass_time, settled, turns_until

ITEMS, KIND = 40, HistoryKind(length=3)
NewBatcher = Callable[..., Batcher]


@pytest.fixture
def new_batcher(engine: FakeEngine) -> Iterator[NewBatcher]:
    """Batchers with these limits, on the time of the running loop. At the end they have nothing left to do."""
    made: list[Batcher] = []

    def new(own: FakeEngine = engine, **limits: Any) -> Batcher:
        made.append(Batcher(own, Limits(**limits), "test", clock=asyncio.get_running_loop().time))
        return made[-1]

    yield new
    engine.go.set()
    for batcher in made:
        assert asyncio.run(batcher.drain(10))


def queries(*newest: int) -> QueryBatch:
    return pad_histories(KIND, [np.array([item]) for item in newest])


def ask(batcher: Batcher, *newest: int, beam_size: int = 5, m: int = 5, **rest: Any) -> Coroutine[Any, Any, Answer]:
    """A request with these newest items of its histories."""
    return batcher.search(queries(*newest), SearchParams.uniform(len(newest), beam_size, m), **rest)


@asynccontextmanager
async def held(engine: FakeEngine, batcher: Batcher, beam_size: int = 5) -> AsyncIterator[asyncio.Task[Answer]]:
    """The engine is busy with a request of one query until the block ends."""
    engine.go.clear()
    engine.started.clear()
    busy = asyncio.create_task(ask(batcher, 0, beam_size=beam_size))
    assert await asyncio.to_thread(engine.started.wait, 10)
    try:
        yield busy
    finally:
        engine.go.set()


async def accepted(*searches: Coroutine[Any, Any, Answer]) -> list[asyncio.Task[Answer]]:
    """Tasks whose queries are in the queue."""
    tasks = [asyncio.create_task(search) for search in searches]
    for _ in range(2):  # turns of the event loop: each task runs until it waits for the engine, after a look at who came with it
        await asyncio.sleep(0)
    return tasks


async def learnt(engine: FakeEngine, batcher: Batcher, query_s: float, beam_size: int = 5) -> None:
    """The batcher has seen how long a query takes: the first call of the engine."""
    async with held(engine, batcher, beam_size) as busy:
        await pass_time(query_s)
    await busy


async def idle(batcher: Batcher) -> None:
    """Its thread has seen that nothing is left to do: answers come a moment before."""
    await turns_until(lambda: batcher._wake_locks)


def newest(engine: FakeEngine, call: int) -> list[int]:
    return [int(item) for item in engine.calls[call][0].array[:, -1]]


def calls(engine: FakeEngine) -> list[list[int]]:
    """The newest items of each call."""
    return [newest(engine, call) for call in range(len(engine.calls))]


# -- calls ----------------------------------------------------------------------------------------------------------------


async def test_requests_that_come_while_the_engine_is_busy_share_the_next_call(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16)
    async with held(engine, batcher) as busy:
        tasks = await accepted(*(ask(batcher, i) for i in range(1, 6)))
        assert batcher.depth == 5
    answers = await asyncio.gather(busy, *tasks)
    assert calls(engine) == [[0], [1, 2, 3, 4, 5]]
    assert [answer.batch for answer in answers] == [1, 5, 5, 5, 5, 5]
    assert batcher.depth == 0


async def test_where_calls_end_at_deadlines_a_short_one_cuts_no_other_request_short(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16, calls=2, remote=True)
    async with held(engine, batcher) as first, held(engine, batcher) as second:
        now = asyncio.get_running_loop().time()
        tasks = await accepted(*(ask(batcher, i, deadline=now + ends) for i, ends in enumerate((30, 30.01, 2, 30), 1)))
    await asyncio.gather(first, second, *tasks)
    assert sorted(calls(engine)) == [[0], [0], [1, 2], [3], [4]]


async def test_each_request_of_a_call_keeps_its_own_beam_m_exclusions_and_mask(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher, mask = new_batcher(max_batch=16), NodeMask(np.arange(ITEMS) % 2 == 1, ITEMS // 2)
    excluding = SearchParams.uniform(2, beam_size=8, m=2, exclude_BE=np.array([[0, 2, 4], [1, -1, -1]]))
    async with held(engine, batcher):
        tasks = await accepted(
            ask(batcher, 1, beam_size=20, m=20),
            ask(batcher, 2, beam_size=3, m=7),
            batcher.search(queries(3, 4), excluding),
            batcher.search(queries(5, 6), SearchParams.uniform(2, 3, 3, mask=mask)),
            batcher.search(queries(7, 8), replace(SearchParams.uniform(2, 1, 1), mask_B=(None, mask))),
        )
    wide, narrow, excluded, masked, _ = [(await task).result for task in tasks]
    assert wide.item_rows_BM.tolist() == [list(range(20))]
    assert narrow.item_rows_BM.tolist() == [[0, 1, 2, -1, -1, -1, -1]]
    assert (narrow.count_B.tolist(), narrow.complete_B.tolist()) == ([3], [False])
    assert excluded.item_rows_BM.tolist() == [[1, 3], [0, 2]]
    assert masked.item_rows_BM.tolist() == [[1, 3, 5], [1, 3, 5]]
    _, (_, params) = engine.calls
    assert (params.beam_size_B.tolist(), params.m_B.tolist()) == ([20, 3, 8, 8, 3, 3, 1, 1], [20, 7, 2, 2, 3, 3, 1, 1])
    assert params.mask_B == (None,) * 4 + (mask, mask) + (None, mask)


async def test_a_request_larger_than_a_batch_takes_several_calls(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    params = SearchParams.uniform(10, 40, 40, np.arange(10).reshape(10, 1))
    answer = await new_batcher(max_batch=4).search(queries(*range(10)), params)
    assert [len(call) for call in calls(engine)] == [4, 4, 2]
    assert answer.batch == 10
    assert [set(range(ITEMS)) - set(rows.tolist()) for rows in answer.result.item_rows_BM] == [{i} for i in range(10)]


async def test_a_call_never_exceeds_the_batch_and_keeps_the_order(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=4)
    async with held(engine, batcher):
        tasks = await accepted(ask(batcher, 1, 2, 3), ask(batcher, 4, 5), ask(batcher, 6))
    await asyncio.gather(*tasks)
    assert calls(engine) == [[0], [1, 2, 3], [4, 5, 6]]


async def test_an_engine_failure_fails_only_the_requests_of_its_call(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16)
    async with held(engine, batcher) as busy:
        engine.failure = ValueError("out of memory")
        (behind,) = await accepted(ask(batcher, 1, m=2))
    with pytest.raises(EngineFailed, match="out of memory"):
        await busy
    assert (await behind).result.count_B.tolist() == [2]


async def test_an_error_that_the_engine_raises_on_purpose_is_that_of_the_requests(
    engine: FakeEngine, new_batcher: NewBatcher, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = new_batcher(max_batch=16)
    async with held(engine, batcher) as busy:
        engine.failure = ShardsMissing("no answer of shard 1")
    with pytest.raises(ShardsMissing, match="no answer of shard 1"):
        await busy
    assert not caplog.records


async def test_queries_that_take_long_one_after_the_other_do_not_share_a_call(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    """On a CPU nobody gets an answer before the end of a call, so that a call is only filled up to a millisecond."""
    batcher = new_batcher(max_batch=16)
    await learnt(engine, batcher, query_s=0.003)
    async with held(engine, batcher) as busy:
        tasks = await accepted(*(ask(batcher, i) for i in (1, 2, 3)))
    await asyncio.gather(busy, *tasks)
    assert calls(engine) == [[0], [0], [1], [2], [3]]


async def test_each_request_is_told_of_its_own_queries_alone_whether_their_scores_are_finite(new_batcher: NewBatcher) -> None:
    """Requests of one and of two queries in one call, and one of three queries in two calls."""

    class Vectors(FakeEngine):
        def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
            return replace(super().search(queries, params, context), finite_B=queries.array[:, -1] % 2 == 0)

    engine = Vectors(ITEMS)
    batcher = new_batcher(engine, max_batch=2)
    async with held(engine, batcher):
        tasks = await accepted(ask(batcher, 2), ask(batcher, 3), ask(batcher, 4, 6, 7))
    answers = [(await task).result.finite_B for task in tasks]
    assert [flags.tolist() for flags in answers if flags is not None] == [[True], [False], [True, True, False]]


# -- the way out ----------------------------------------------------------------------------------------------------------


async def test_draining_finishes_what_was_accepted_wakes_who_waits_and_gives_up_after_its_time(
    engine: FakeEngine, new_batcher: NewBatcher
) -> None:
    batcher = new_batcher(max_batch=1)
    async with held(engine, batcher) as busy:
        (waiting,) = await accepted(ask(batcher, 1, m=2))
        drained = asyncio.create_task(batcher.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await ask(batcher, 2)
    assert await drained
    assert [(await task).result.count_B.tolist() for task in (busy, waiting)] == [[5], [2]]
    batcher = new_batcher(max_queue=1)
    async with held(engine, batcher):
        first, patient = await accepted(ask(batcher, 1), ask(batcher, 2, priority=Priority.PATIENT))
        drained = asyncio.create_task(batcher.drain(10))
        with pytest.raises(NotReady):
            await patient
    await first
    assert await drained
    batcher = new_batcher(max_batch=1)
    async with held(engine, batcher) as busy:
        assert not await batcher.drain(0)
    await busy


# -- deadlines ------------------------------------------------------------------------------------------------------------


async def test_what_expires_in_the_queue_is_answered_at_its_deadline_and_never_reaches_the_engine(
    engine: FakeEngine, new_batcher: NewBatcher
) -> None:
    """A request that is cut into several parts, too, and all of it leaves the queue."""
    batcher = new_batcher(max_batch=2)
    async with held(engine, batcher):
        late, large, waits = await accepted(
            ask(batcher, 1, deadline=1), ask(batcher, 2, 3, 4, 5, 6, deadline=1), ask(batcher, 7, deadline=60)
        )
        await pass_time(0.9)
        assert (late.done(), large.done(), batcher.depth) == (False, False, 7)
        await pass_time(0.2)
        for task in (late, large):
            with pytest.raises(DeadlinePassed):
                await task
        assert batcher.depth == 1
    await waits
    assert calls(engine) == [[0], [7]]


async def test_a_deadline_that_has_passed_already_is_refused(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    with pytest.raises(DeadlinePassed, match="before the search began"):
        await ask(new_batcher(), 1, deadline=0)
    assert engine.calls == []


@pytest.mark.parametrize(("smallest", "fixed", "searched"), [(None, False, 32), (20, False, 20), (4, False, 4), (4, True, 32)])
async def test_near_the_deadline_the_beam_shrinks_as_far_as_allowed_unless_the_request_wants_all_or_nothing(
    engine: FakeEngine, new_batcher: NewBatcher, smallest: int | None, fixed: bool, searched: int
) -> None:
    batcher = new_batcher(smallest_beam_size=smallest)
    await learnt(engine, batcher, query_s=0.002, beam_size=32)
    async with held(engine, batcher, beam_size=1):
        hurried, relaxed = await accepted(
            ask(batcher, 1, beam_size=32, deadline=100, fixed_beam=fixed), ask(batcher, 2, beam_size=32, deadline=1e6)
        )
        await pass_time(100 - 0.002 - 1e-9)
    answer = await hurried
    assert (answer.beam_size, answer.degraded) == (searched, searched < 32)
    assert engine.calls[2][1].beam_size_B.tolist() == [searched]
    answer = await relaxed
    assert (answer.beam_size, answer.degraded) == (32, False)


# -- a queue with an end --------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_and_says_when_to_try_again_but_not_while_nothing_waits(
    engine: FakeEngine, new_batcher: NewBatcher
) -> None:
    batcher = new_batcher(max_queue=3)
    async with held(engine, batcher):
        tasks = await accepted(*(ask(batcher, i) for i in (1, 2, 3)))
        with pytest.raises(QueueFull, match="3 queries wait") as refused:
            await ask(batcher, 4)
        assert refused.value.headers == (("Retry-After", "1"),)
    await asyncio.gather(*tasks)
    assert (await ask(batcher, 5)).batch == 1
    assert len((await ask(new_batcher(max_queue=3), *range(9))).result.count_B) == 9


async def test_in_overload_one_large_request_behind_a_small_one_is_no_queue(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    """As after a stall, which is taken for the cost of a query: the call that runs was believed to be short, and what waits is not."""
    batcher = new_batcher(max_queue=16, burst_s=60)
    await learnt(engine, batcher, query_s=0.1)
    async with held(engine, batcher):
        (waiting,) = await accepted(ask(batcher, *range(16)))
        with pytest.raises(QueueFull):
            await ask(batcher, 1)
    await waiting
    async with held(engine, batcher):
        tasks = await accepted(ask(batcher, *range(15)))
        tasks += await accepted(ask(batcher, 1))
    await asyncio.gather(*tasks)
    assert batcher._admission.overloaded


async def test_accepted_work_counts_as_offered_unless_it_would_have_waited(
    engine: FakeEngine, new_batcher: NewBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overload lasts as long as more is offered than can be done; what waits for room offers no more than there is room for."""
    offered: list[tuple[int, bool]] = []
    monkeypatch.setattr(Admission, "accepted", lambda self, count, busy: offered.append((count, busy)))
    batcher = new_batcher()
    await learnt(engine, batcher, query_s=1e-3)
    await idle(batcher)
    await ask(batcher, 1, 2)
    await idle(batcher)
    await ask(batcher, 3, priority=Priority.PATIENT)
    await idle(batcher)
    async with held(engine, batcher) as first:
        (second,) = await accepted(ask(batcher, 4))
    await asyncio.gather(first, second)
    assert offered == [(1, False), (2, False), (1, False), (1, True)]


async def test_a_patient_request_that_finds_no_room_by_its_deadline_has_expired(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_queue=1)
    async with held(engine, batcher):
        first, late = await accepted(ask(batcher, 1), ask(batcher, 2, deadline=1, priority=Priority.PATIENT))
        await pass_time(0.9)
        assert not late.done()
        await pass_time(0.2)
        with pytest.raises(DeadlinePassed):
            await late
    await first
    assert calls(engine) == [[0], [1]]


async def test_room_is_given_when_the_engine_takes_what_waits_not_when_it_has_answered(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_queue=2, max_wait_s=0.1)  # the engine takes nothing before all have come
    engine.go.clear()
    tasks = await accepted(*(ask(batcher, i, priority=Priority.PATIENT) for i in range(6)))
    assert batcher.depth == 2
    assert await asyncio.to_thread(engine.started.wait, 10)
    await settled()
    assert batcher.depth == 2  # two more have come in while the engine is at the first two
    engine.go.set()
    await asyncio.gather(*tasks)
    assert [item for call in calls(engine) for item in call] == list(range(6))


async def test_a_traced_request_is_alone_in_its_call_and_whole(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=4)
    async with held(engine, batcher):
        tasks = await accepted(
            ask(batcher, 1),
            batcher.search(queries(2), SearchParams.uniform(1, 3, 3, trace=True)),
            ask(batcher, 3),
            batcher.search(queries(4, 5, 6, 7, 8, 9), SearchParams.uniform(6, 3, 3, trace=True)),
        )
    await asyncio.gather(*tasks)
    assert calls(engine) == [[0], [1], [2], [3], [4, 5, 6, 7, 8, 9]]
    assert [call[1].trace for call in engine.calls] == [False, False, True, False, True]


def test_an_idle_batcher_holds_nothing_of_its_last_call(engine: FakeEngine) -> None:
    """A version is freed when nobody holds it; an expired request's traceback does."""

    class Caller:
        """Stands for what a request's frames hold."""

    async def request(batcher: Batcher, caller: Caller) -> None:
        assert caller is not None
        await ask(batcher, 1, deadline=batcher._clock() + 0.01)

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(), "test")
        engine.go.clear()
        caller = Caller()
        alive = weakref.ref(caller)
        with pytest.raises(DeadlinePassed):
            await request(batcher, caller)
        del caller
        engine.go.set()
        await ask(batcher, 2)
        assert alive() is None
        await batcher.drain(10)

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


async def test_room_that_a_cancelled_request_leaves_is_given_on(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_queue=1)
    async with held(engine, batcher):
        goes, second, third = await accepted(ask(batcher, 1), *(ask(batcher, i, priority=Priority.PATIENT) for i in (2, 3)))
        goes.cancel()
        await settled()
        assert batcher.depth == 1  # the second has come in
    await asyncio.gather(second, third)
    assert calls(engine) == [[0], [2], [3]]


async def test_streams_leave_room_for_a_burst_and_cause_no_overload(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1)
    await learnt(engine, batcher, query_s=0.002)
    async with held(engine, batcher):
        streams = await accepted(*(ask(batcher, i, priority=Priority.PATIENT) for i in range(1, 9)))
        assert batcher.depth == 1
        singles = await accepted(*(ask(batcher, i) for i in range(20, 30)))
        assert batcher.depth == 11
    await asyncio.gather(*streams, *singles)
