"""Requests with Espalier-Priority: background wait behind all others, a few at a time, and customers' metrics do not count them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from espalier.search import SearchParams
from service.batching.admission import Limits
from service.batching.batcher import Batcher
from service.errors import DeadlinePassed, QueueFull
from service.http.background import RUNNING, WAITING, Turns
from tests.service.fake_engine import FakeEngine
from tests.service.running import Running, run
from tests.service.test_batching import accepted, held, newest, queries

BEHIND = {"Espalier-Priority": "background"}
BODY = {"model": "books", "queries": [{"history": ["item-1"]}], "m": 3}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(40)
    yield fake
    fake.go.set()


def counted(running: Running) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    lines = [line for line in running.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


# -- in the queue ---------------------------------------------------------------------------------------------------------


def test_background_queries_wait_for_all_others_even_later_ones(engine: FakeEngine) -> None:
    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=2), "test")
        async with held(engine, batcher) as busy:
            one = SearchParams.uniform(1, 5, 5)
            tasks = await accepted(batcher.search(queries(9), one, background=True), *(batcher.search(queries(i), one) for i in (1, 2, 3)))
        await asyncio.gather(busy, *tasks)
        assert [newest(engine, call) for call in (1, 2, 3)] == [[1, 2], [3], [9]]
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_large_background_request_is_searched_in_pieces_with_others_between(engine: FakeEngine) -> None:
    async def scenario() -> None:
        clock = [0.0]
        batcher = Batcher(engine, Limits(max_batch=16), "test", clock=lambda: clock[0])
        async with held(engine, batcher) as busy:
            clock[0] += 0.01  # what a query costs: more than a call is filled up to
        await busy
        async with held(engine, batcher) as busy:
            large = await accepted(batcher.search(queries(5, 6, 7), SearchParams.uniform(3, 5, 5), background=True))
            small = await accepted(batcher.search(queries(1), SearchParams.uniform(1, 5, 5)))
        answers = await asyncio.gather(busy, *large, *small)
        assert [newest(engine, call) for call in (2, 3, 4, 5)] == [[1], [5], [6], [7]]
        assert answers[1].result.item_rows_BM.shape == (3, 5)
        await batcher.drain(10)

    asyncio.run(scenario())


def test_background_queries_are_no_load_for_others(engine: FakeEngine) -> None:
    """However many there are, the queue counts as empty, so that no customer is refused for them."""

    async def scenario() -> None:
        batcher = Batcher(engine, Limits(max_batch=4, max_queue=4), "test")
        async with held(engine, batcher) as busy:
            behind = await accepted(batcher.search(queries(*range(30)), SearchParams.uniform(30, 5, 5), background=True))
            assert batcher.depth == 0
            customers = await accepted(*(batcher.search(queries(i), SearchParams.uniform(1, 5, 5)) for i in range(4)))
            assert batcher.depth == 4
            with pytest.raises(QueueFull):
                await batcher.search(queries(9), SearchParams.uniform(1, 5, 5))
        answers = await asyncio.gather(busy, *customers, *behind)
        assert answers[-1].result.count_B.tolist() == [5] * 30
        assert batcher.depth == 0
        await batcher.drain(10)

    asyncio.run(scenario())


def test_a_cancelled_or_late_background_request_never_reaches_the_engine(engine: FakeEngine) -> None:
    async def scenario() -> None:
        clock = [0.0]
        batcher = Batcher(engine, Limits(max_batch=4), "test", clock=lambda: clock[0])
        async with held(engine, batcher) as busy:
            one = SearchParams.uniform(1, 5, 5)
            goes, late = await accepted(
                batcher.search(queries(1), one, background=True), batcher.search(queries(2), one, deadline=0.001, background=True)
            )
            goes.cancel()
            await asyncio.wait([goes])
            with pytest.raises(DeadlinePassed):
                await late
            clock[0] = 1.0
            with pytest.raises(DeadlinePassed):
                await batcher.search(queries(3), one, deadline=0.5, background=True)
        await busy
        assert await batcher.drain(10)
        assert len(engine.calls) == 1

    asyncio.run(scenario())


def test_turns_are_few_in_order_and_bounded() -> None:
    async def scenario() -> None:
        clock, order = [0.0], list[int]()
        turns, end = Turns(running=1, waiting=2, clock=lambda: clock[0]), asyncio.Event()

        async def take(number: int, deadline: float = 1e9) -> None:
            async with turns.turn(deadline):
                order.append(number)
                await end.wait()

        tasks = [asyncio.create_task(take(number)) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 background requests wait already"):
            await take(3)
        assert order == [0]
        tasks[1].cancel()  # its client has gone: its place is free
        await asyncio.wait([tasks[1]])
        clock[0] = 5.0
        with pytest.raises(DeadlinePassed):
            await take(4, deadline=4.0)
        end.set()
        await asyncio.gather(tasks[0], tasks[2])
        assert order == [0, 2]

    asyncio.run(scenario())


# -- over HTTP ------------------------------------------------------------------------------------------------------------


def test_a_background_request_gets_the_same_answer(versions: Path) -> None:
    with run(versions) as running:
        usual, behind = (running.client.post("/retrieve", json=BODY, headers=headers) for headers in ({}, BEHIND))
        assert (usual.status_code, behind.status_code) == (200, 200)
        assert usual.json()["results"] == behind.json()["results"]
        assert "server-timing" in behind.headers


def test_customers_metrics_do_not_count_background_requests(versions: Path) -> None:
    with run(versions) as running:
        running.client.post("/retrieve", json=BODY)
        before = counted(running)
        assert running.client.post("/retrieve", json=BODY, headers=BEHIND).status_code == 200
        assert running.client.post("/retrieve", json=BODY | {"m": 999}, headers=BEHIND).status_code == 422
        after = counted(running)
        changed = {name for name in after if after[name] != before.get(name)}
        own = [f'espalier_background_requests_total{{model="books",status="{status}"}}' for status in (200, 422)]
        assert [after[name] for name in own] == [1, 1]
        others = sorted(name for name in changed - set(own) if not name.startswith(("espalier_worker_", "espalier_batch_queries")))
        assert others == ['espalier_engine_seconds_total{model="books"}']


def test_another_priority_is_422_and_named(versions: Path) -> None:
    with run(versions) as running:
        answer = running.client.post("/retrieve", json=BODY, headers={"Espalier-Priority": "urgent"})
        assert answer.status_code == 422
        wrong = {"field": "Espalier-Priority", "value": "'urgent'", "expected": "`background`, or no such header"}
        assert answer.json()["errors"] == [wrong]


def test_background_requests_over_the_limit_are_429_and_customers_are_answered(versions: Path) -> None:
    async def scenario(running: Running) -> None:
        engine = running.engines["books"]
        http = running.client.http
        engine.go.clear()
        behind = [asyncio.create_task(http.post("/retrieve", json=BODY, headers=BEHIND)) for _ in range(RUNNING + WAITING)]
        assert await asyncio.to_thread(engine.started.wait, 10)
        for _ in range(100):  # each has parsed its body and waits
            await asyncio.sleep(0)
        refused = await http.post("/retrieve", json=BODY, headers=BEHIND)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        customer = asyncio.create_task(http.post("/retrieve", json=BODY))
        await asyncio.sleep(0)
        engine.go.set()
        assert (await customer).status_code == 200
        answers = await asyncio.gather(*behind)
        assert {answer.status_code for answer in answers} == {200}

    with run(versions, timeout_ms=20_000) as running:
        running.client.runner.run(scenario(running))
        assert 'espalier_shed_total{model="books"} 0.0' in running.client.get("/metrics").text


def test_a_background_client_that_hangs_up_leaves_its_turn(versions: Path) -> None:
    async def scenario(running: Running) -> None:
        engine, http = running.engines["books"], running.client.http
        engine.go.clear()
        first = [asyncio.create_task(http.post("/retrieve", json=BODY, headers=BEHIND)) for _ in range(RUNNING)]
        assert await asyncio.to_thread(engine.started.wait, 10)
        waiting = [asyncio.create_task(http.post("/retrieve", json=BODY, headers=BEHIND)) for _ in range(WAITING)]
        for _ in range(100):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        engine.go.set()
        assert (await http.post("/retrieve", json=BODY, headers=BEHIND)).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*first)} == {200}
        assert sum(len(batch) for batch, _ in engine.calls) == RUNNING + 1

    with run(versions, timeout_ms=20_000) as running:
        running.client.runner.run(scenario(running))


def test_a_filter_and_an_explanation_work_in_the_background(versions: Path) -> None:
    with run(versions) as running:
        body = {"model": "books", "queries": [{"history": ["item-1"], "exclude": ["item-0"]}, {"history": []}], "m": 2, "fields": ["title"]}
        usual, behind = (running.client.post("/retrieve", json=body, headers=headers).json() for headers in ({}, BEHIND))
        assert usual["results"] == behind["results"]
        assert np.all([len(result["items"]) == 2 for result in behind["results"]])
