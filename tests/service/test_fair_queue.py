"""While several API keys want the engine each gets as much of its time, whatever the others send. Time stands still here."""

from __future__ import annotations

import asyncio

import pytest

from espalier.search import NO_CONTEXT, SearchParams
from service.batching.admission import Limits
from service.batching.priority import Priority
from service.batching.queues import RequestQueue, Room
from service.batching.request_parts import Answer, RequestPart
from service.errors import QueueFull
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import settled
from tests.service.test_batching import NewBatcher, accepted, ask, calls, held, learnt, new_batcher, newest, queries

__all__ = ["new_batcher"]


async def test_a_key_whose_queries_cost_more_gets_fewer_of_them_answered(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1)
    await learnt(engine, batcher, 0.001, beam_size=4)  # a beam of 16 is taken to cost four times as much
    async with held(engine, batcher) as busy:
        dear = await accepted(*(ask(batcher, i, beam_size=16, key="dear") for i in range(1, 4)))
        cheap = await accepted(*(ask(batcher, i, beam_size=4, key="cheap") for i in range(20, 28)))
    await asyncio.gather(busy, *dear, *cheap)
    order = [newest(engine, call)[0] for call in range(2, len(engine.calls))]
    assert order == [1, 20, 21, 22, 23, 2, 24, 25, 26, 27, 3]


async def test_in_overload_a_request_is_refused_for_what_it_would_wait_for(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=4)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        flood = await accepted(*(ask(batcher, i, key="flood") for i in range(1, 5)))
        for _ in range(3):
            with pytest.raises(QueueFull) as alone:
                await ask(batcher, 5, key="flood")
            assert not alone.value.crowds  # nobody else wants the engine
        assert batcher._admission.overloaded
        with pytest.raises(QueueFull):
            batcher.check_overload(1, "flood")
        batcher.check_overload(1, "shop")
        shop = await accepted(ask(batcher, 11, key="shop"), ask(batcher, 12, key="shop"))
        assert batcher.depth == 6  # behind two of the flood's
        for key in ("flood", "shop"):
            with pytest.raises(QueueFull) as crowding:
                await ask(batcher, 13, key=key)
            assert crowding.value.crowds
        (third,) = await accepted(ask(batcher, 31, key="third"))
        assert batcher.depth == 7
    await asyncio.gather(busy, *flood, *shop, third)
    assert [newest(engine, call)[0] for call in range(2, len(engine.calls))] == [1, 11, 31, 2, 12, 3, 4]


async def test_a_refusal_takes_nothing_from_others_and_counts_once(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=4)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        flood = await accepted(*(ask(batcher, i, key="flood") for i in range(1, 5)))
        with pytest.raises(QueueFull):
            await ask(batcher, 5, key="flood")
        counted = batcher._admission._busy_queries
        batcher.check_overload(6, "shop")
        (shop,) = await accepted(ask(batcher, *range(20, 26), key="shop"))  # nothing is before it, as in an empty queue
        assert batcher._admission._busy_queries == counted + 6
        with pytest.raises(QueueFull):
            await ask(batcher, 27, key="shop")
        assert batcher._admission._busy_queries == counted + 7
        assert not any(task.done() for task in flood)
    await asyncio.gather(busy, *flood, shop)


async def test_a_few_large_requests_get_as_much_as_a_flood_of_small_ones(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=8)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        small = await accepted(*(ask(batcher, i, key="small") for i in range(1, 9)))
        (large,) = await accepted(ask(batcher, *range(20, 28), key="large"))
        for _ in range(20):  # no number of refused ones takes its place
            with pytest.raises(QueueFull):
                await ask(batcher, 9, key="small")
    await asyncio.gather(busy, *small, large)
    first = [newest(engine, call)[0] for call in range(2, len(engine.calls))][:8]
    assert sum(item >= 20 for item in first) == 4


async def test_large_lines_of_a_stream_do_not_shut_others_out(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=8)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        line = await accepted(ask(batcher, *range(1, 9), key="stream", priority=Priority.PATIENT))
        (shop,) = await accepted(ask(batcher, 21, key="shop"))
        next_line = await accepted(ask(batcher, 9, key="stream", priority=Priority.PATIENT))
        other = await accepted(ask(batcher, 31, key="other", priority=Priority.PATIENT))
        assert batcher.depth == 10  # the next line waits for room, and no other key's behind it
    await asyncio.gather(busy, *line, shop, *next_line, *other)
    order = [newest(engine, call)[0] for call in range(2, len(engine.calls))]
    assert order[:3] == [1, 21, 31]
    assert order[-1] == 9


async def test_who_hangs_up_pays_nothing(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        others = await accepted(*(ask(batcher, i, key="others") for i in range(1, 6)))
        gone = await accepted(*(ask(batcher, 7, key="hasty") for _ in range(50)))
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        (back,) = await accepted(ask(batcher, 11, key="hasty"))
        assert batcher.depth == 6
    await asyncio.gather(busy, *others, back)
    assert [newest(engine, call)[0] for call in range(2, len(engine.calls))] == [1, 11, 2, 3, 4, 5]


async def test_where_calls_cost_the_same_however_full_keys_take_turns_by_queries(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=4, serial=False)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        bulk = await accepted(*(ask(batcher, *range(20, 24), key="bulk") for _ in range(3)))
        small = await accepted(*(ask(batcher, i, key="small") for i in range(1, 9)))
    await asyncio.gather(busy, *bulk, *small)
    taken = [int(item >= 20) for call in calls(engine)[2:] for item in call]
    assert sum(taken[:8]) == 4  # of the first eight queries as many of each


async def test_what_was_taken_back_leaves_the_queue(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1)
    async with held(engine, batcher) as busy:
        waiting = await accepted(*(ask(batcher, i, key="stays") for i in (1, 2, 3)))
        for turn in range(50):
            (gone,) = await accepted(ask(batcher, 7, key=f"gone-{turn % 7}"))
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        assert (batcher.depth, batcher._queue.seconds) == (3, 0.0)
        assert sum(len(flow.waiting_parts) for flow in batcher._queue._flows.values()) == 3
    await asyncio.gather(busy, *waiting)
    assert [newest(engine, call)[0] for call in range(1, len(engine.calls))] == [1, 2, 3]
    assert not batcher._queue._flows


async def test_a_key_that_is_alone_beside_the_probe_is_refused_at_once(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=1, max_queue=2)
    await learnt(engine, batcher, 0.001)
    async with held(engine, batcher) as busy:
        waiting = await accepted(*(ask(batcher, i, key="shop") for i in (1, 2)), ask(batcher, 3))
        with pytest.raises(QueueFull) as full:
            await ask(batcher, 4, key="shop")
        assert not full.value.crowds
    await asyncio.gather(busy, *waiting)


def test_who_comes_late_gets_no_more_for_it() -> None:
    queue, limits = RequestQueue(), Limits(max_batch=1)

    def part(key: str, item: int) -> RequestPart:
        params, answer = SearchParams.uniform(1, 5, 5), asyncio.Future[Answer](loop=loop)
        return RequestPart(queries(item), params, answer, float("inf"), 5, 0.001, 0.001, NO_CONTEXT, key=key)

    def taken(count: int) -> list[int]:
        return [int(queue.take(limits, 0.0)[0].queries.array[0, -1]) for _ in range(count)]

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        queue.add([part("early", item) for item in range(1, 7)])
        assert taken(3) == [1, 2, 3]
        queue.add([part("late", item) for item in range(11, 14)])
        assert taken(6) == [11, 4, 12, 5, 13, 6]


async def test_room_is_offered_to_the_first_request_of_each_key() -> None:
    room, admitted, free = Room(), list[str](), {"few"}

    async def enter(key: str) -> None:
        await room.enter(key, lambda: key in free, float("inf"))
        admitted.append(key)

    free.clear()
    waiting = [asyncio.create_task(enter(key)) for key in ("many", "many", "few")]
    await settled()
    free.add("few")
    room.open()
    await settled()
    assert admitted == ["few"]
    free.add("many")
    room.open()
    await asyncio.gather(*waiting)
    assert admitted == ["few", "many", "many"]
    assert not room._waiting
