"""Requests with Espalier-Priority: background wait behind all others, a few at a time, and customers' metrics do not count them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from service.batching.priority import RUNNING, WAITING, Priority, Turns
from service.errors import DeadlinePassed, QueueFull
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, counted
from tests.service.test_batching import NewBatcher, accepted, ask, calls, held, learnt, new_batcher
from tests.waiting import until

__all__ = ["new_batcher"]

BEHIND = {"Espalier-Priority": "background"}
BODY: Json = {"model": "books", "queries": [{"history": ["item-1"]}], "m": 3}


# -- in the queue ---------------------------------------------------------------------------------------------------------


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
