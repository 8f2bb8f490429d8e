"""Who gets the engine: API keys as much of its time each, whatever the others send, and background requests what is left."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from espalier.search import NO_CONTEXT, SearchParams
from service.batching.admission import Limits
from service.batching.priority import RUNNING, WAITING, Priority, Turns
from service.batching.queues import RequestQueue, Room
from service.batching.request_parts import Answer, RequestPart
from service.errors import DeadlinePassed, QueueFull
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, counted
from tests.service.test_batching import NewBatcher, accepted, ask, calls, held, learnt, new_batcher, newest, queries
from tests.waiting import until

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


# -- requests with Espalier-Priority: background; customers' metrics do not count them -------------------------------------


BEHIND = {"Espalier-Priority": "background"}
BODY: Json = {"model": "books", "queries": [{"history": ["item-1"]}], "m": 3}


async def test_background_queries_wait_for_all_others_even_later_ones(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=2)
    async with held(engine, batcher) as busy:
        tasks = await accepted(ask(batcher, 9, priority=Priority.BACKGROUND), *(ask(batcher, i) for i in (1, 2, 3)))
    await asyncio.gather(busy, *tasks)
    assert calls(engine) == [[0], [1, 2], [3], [9]]


async def test_a_large_background_request_is_searched_in_pieces_with_others_between(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=16)
    await learnt(engine, batcher, query_s=0.01)  # more than a call is filled up to
    async with held(engine, batcher):
        large, small = await accepted(ask(batcher, 5, 6, 7, priority=Priority.BACKGROUND), ask(batcher, 1))
    assert (await large).result.item_rows_BM.shape == (3, 5)
    await small
    assert calls(engine) == [[0], [0], [1], [5], [6], [7]]


async def test_background_queries_are_no_load_for_others(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    """However many there are, the queue counts as empty, so that no customer is refused for them."""
    batcher = new_batcher(max_batch=4, max_queue=4)
    async with held(engine, batcher):
        (behind,) = await accepted(ask(batcher, *range(30), priority=Priority.BACKGROUND))
        assert batcher.depth == 0
        customers = await accepted(*(ask(batcher, i) for i in range(4)))
        assert batcher.depth == 4
        with pytest.raises(QueueFull):
            await ask(batcher, 9)
    assert (await behind).result.count_B.tolist() == [5] * 30
    await asyncio.gather(*customers)
    assert batcher.depth == 0


async def test_a_cancelled_or_late_background_request_never_reaches_the_engine(engine: FakeEngine, new_batcher: NewBatcher) -> None:
    batcher = new_batcher(max_batch=4)
    async with held(engine, batcher) as busy:
        goes, late = await accepted(*(ask(batcher, i, deadline=i / 2, priority=Priority.BACKGROUND) for i in (20, 2)))
        goes.cancel()
        await pass_time(1.1)
        for request in (late, ask(batcher, 3, deadline=1, priority=Priority.BACKGROUND)):
            with pytest.raises(DeadlinePassed):
                await request
    await busy
    assert await batcher.drain(10)
    assert calls(engine) == [[0]]


async def test_turns_are_few_in_order_and_bounded() -> None:
    turns, end, order = Turns("requests", 1, 2, asyncio.get_running_loop().time), asyncio.Event(), list[int]()

    async def take(number: int, deadline: float = 1e9) -> None:
        await turns.enter(deadline)
        order.append(number)
        await end.wait()
        turns.leave()

    first, goes, last = (asyncio.create_task(take(number)) for number in range(3))
    await settled()
    with pytest.raises(QueueFull, match="2 requests wait already"):
        await take(3)
    assert order == [0]
    goes.cancel()  # its client has gone: its place is free
    await settled()
    late = asyncio.create_task(take(4, deadline=4))
    await pass_time(4.1)
    with pytest.raises(DeadlinePassed):
        await late
    end.set()
    await asyncio.gather(first, last)
    assert order == [0, 2]


# -- over HTTP ------------------------------------------------------------------------------------------------------------


def test_a_background_request_gets_the_same_answer_and_another_priority_is_422(running: Running) -> None:
    body = BODY | {"queries": [{"history": ["item-1"], "exclude": ["item-0"]}, {"history": []}], "fields": ["title"]}
    usual, behind = (running.client.post("/retrieve", json=body, headers=headers) for headers in ({}, BEHIND))
    assert (usual.status_code, behind.status_code) == (200, 200)
    assert usual.json()["results"] == behind.json()["results"]
    assert "server-timing" in behind.headers
    answer = running.client.post("/retrieve", json=BODY, headers={"Espalier-Priority": "urgent"})
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": "Espalier-Priority", "value": '"urgent"', "expected": "`background`, or no such header"}]


def test_customers_metrics_do_not_count_background_requests(running: Running) -> None:
    running.client.post("/retrieve", json=BODY)
    versions = {f'espalier_model_default_version{{model="{name}"}}' for name in ("books", "points")}
    until(lambda: all(counted(running).get(name) == 1 for name in versions))  # the follower reports them when it looks next
    before = counted(running)
    assert running.client.post("/retrieve", json=BODY, headers=BEHIND).status_code == 200
    assert running.client.post("/retrieve", json=BODY | {"m": 999}, headers=BEHIND).status_code == 422
    after = counted(running)
    own = [f'espalier_background_requests_total{{model="books",status="{status}"}}' for status in (200, 422)]
    assert [after[name] for name in own] == [1, 1]
    changed = {name for name in after if after[name] != before.get(name)} - set(own)
    # what a worker and its disk say of themselves changes whoever asks: other programs write to the same disk
    machine = ("espalier_worker_", "espalier_batch_queries", "espalier_models_disk")
    others = sorted(name for name in changed if not name.startswith(machine))
    assert others == ['espalier_engine_seconds_total{model="books"}']


async def flooded(running: Running) -> tuple[list[asyncio.Task[httpx.Response]], list[asyncio.Task[httpx.Response]]]:
    """The engine is held, and as many background requests as may run, and as may wait."""
    engine, http = running.engines["books"], running.client.http
    engine.go.clear()
    run = [asyncio.create_task(http.post("/retrieve", json=BODY, headers=BEHIND)) for _ in range(RUNNING)]
    assert await asyncio.to_thread(engine.started.wait, 10)
    wait = [asyncio.create_task(http.post("/retrieve", json=BODY, headers=BEHIND)) for _ in range(WAITING)]
    await settled(100)  # each has parsed its body
    return run, wait


@pytest.mark.settings(timeout_ms=20_000)
async def test_background_requests_over_the_limit_are_429_and_customers_are_answered(running: Running) -> None:
    http = running.client.http
    run, wait = await flooded(running)
    refused = await http.post("/retrieve", json=BODY, headers=BEHIND)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    customer = asyncio.create_task(http.post("/retrieve", json=BODY))
    await settled()
    running.engines["books"].go.set()
    assert {answer.status_code for answer in await asyncio.gather(customer, *run, *wait)} == {200}
    assert 'espalier_shed_total{model="books"} 0.0' in (await http.get("/metrics")).text
