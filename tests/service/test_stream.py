"""POST /retrieve/stream: many requests in one, line by line, both ways. The first tests are of POST /models/{name}/items, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from service.batching.batcher import Batcher
from tests.service.conversation import LINES, Conversation, sent
from tests.service.fake_catalogue import WRITE
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import pass_time, settled
from tests.service.running import Running, bearer, problem

STREAM, BULK = "/retrieve/stream", "/models/books/items"
IDLE_S = 600.0


def line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"model": "books", "queries": [{"history": [item]}], "m": 2} | rest)


def write(item: str) -> bytes:
    return orjson.dumps({"id": item, "events": [["item-1"]]})


either = pytest.mark.parametrize(("path", "line_of"), [(STREAM, line), (BULK, write)])
LineOf = Callable[[str], bytes]
HEADERS = LINES | bearer(WRITE)


@either
@pytest.mark.settings(max_body_bytes=200)
def test_a_stream_is_larger_than_a_request_may_be(shelf: Running, path: str, line_of: LineOf) -> None:
    assert len(sent(shelf, path, b"\n".join([line_of("item-1")] * 50), **HEADERS)) == 50
    assert sent(shelf, path, b"", **HEADERS) == []


@either
async def test_a_line_is_answered_before_the_next_one_is_sent(shelf: Running, path: str, line_of: LineOf) -> None:
    talk = Conversation(shelf, path, HEADERS)
    answers = talk.answers()
    for i in range(3):
        talk.say(line_of(f"item-{i}"))
        assert {"results", "sequence"} & (await anext(answers)).keys()
    talk.say(more=False)
    assert [answer async for answer in answers] == []
    await talk.leave()
    await talk.task


@either
@pytest.mark.settings(stream_idle_s=IDLE_S)
async def test_a_stream_that_falls_silent_ends_with_408(shelf: Running, path: str, line_of: LineOf) -> None:
    talk = Conversation(shelf, path, HEADERS)
    answers = talk.answers()
    talk.say(line_of("item-1"))
    assert (await anext(answers)).get("status", 200) in (200, 201)
    await pass_time(IDLE_S - 1)
    assert not talk.task.done()
    await pass_time(2)
    assert [answer["status"] async for answer in answers] == [408]


# -- retrieval ------------------------------------------------------------------------------------------------------------


def test_each_line_gets_its_answer_in_order(running: Running) -> None:
    found = sent(running, STREAM, b"\n".join(line(f"item-{i % 30}", m=1 + i % 7) for i in range(200)))
    histories = [int(item) for queries, _ in running.engines["books"].calls for item in queries.array[:, -1]]
    assert [len(document["results"][0]["items"]) for document in found] == [1 + i % 7 for i in range(200)]
    assert sorted(histories) == sorted(i % 30 for i in range(200))
    assert 'espalier_requests_total{model="books",status="200"} 200.0' in running.client.get("/metrics").text


@pytest.mark.settings(max_body_bytes=2000)
def test_a_wrong_line_costs_one_line(running: Running) -> None:
    wrong = [b"{", b"[]", b'"x"', b'{"queries": []}', line("item-1", m=0), line("item-1", model="nobody"), b"\xff\xfe", line("x" * 3000)]
    body = b"\n".join(part for bad in wrong for part in (line("item-1"), bad)) + b"\n\n  \n" + line("item-2")
    found = sent(running, STREAM, body)
    assert [document.get("status", 200) for document in found[1::2]] == [422, 422, 422, 422, 422, 404, 422, 413]
    assert found[9]["errors"][0]["field"] == "m"
    assert all("results" in document for document in found[::2])
    assert len(found) == 2 * len(wrong) + 1
    text = running.client.get("/metrics").text
    assert 'espalier_requests_total{model="books",status="422"}' not in text  # no model was found for those
    assert 'espalier_requests_total{model="",status="422"} 6.0' in text


def test_a_failing_engine_costs_the_lines_of_that_call(running: Running) -> None:
    running.engines["books"].failure = RuntimeError("secret")
    (failed,) = sent(running, STREAM, line("item-1"))
    assert (failed["status"], "secret" in str(failed)) == (500, False)
    assert "results" in sent(running, STREAM, line("item-1"))[0]


@pytest.mark.settings(stream_window=8)
async def test_a_client_that_does_not_read_holds_its_own_sending_back(running: Running) -> None:
    talk = Conversation(running, STREAM)
    assert await talk.head() == 200  # only then it begins to read
    talk.take(False)
    talk.say(*(line(f"item-{i % 30}") for i in range(100)), more=False)
    await settled(300)
    calls = running.engines["books"].calls
    while sum(len(queries) for queries, _ in calls) < 8:  # what a thread has taken is not in the queue, and not yet a call
        await asyncio.sleep(0)
    await settled(300)
    assert 8 < talk.asked <= 12  # the window, those on their way in, and one more
    assert sum(len(queries) for queries, _ in calls) <= 12
    talk.take(True)
    assert len([answer async for answer in talk.answers()]) == 100
    await talk.task


def held(running: Running, lines: int, more: bool) -> tuple[Conversation, FakeEngine, Batcher]:
    """A stream of so many lines whose first call the engine holds, with the engine and what waits for it."""
    engine = running.engines["books"]
    engine.go.clear()
    talk = Conversation(running, STREAM)
    talk.say(*(line(f"item-{i}") for i in range(lines)), more=more)
    return talk, engine, running.app.state.service.registry.choose("books", None).batcher


@pytest.mark.settings(max_queue=2)
async def test_a_stream_waits_for_room_where_a_single_request_is_refused(running: Running) -> None:
    talk, engine, batcher = held(running, 20, more=False)
    while not engine.calls or batcher.depth < 2:  # before its first call the engine still makes room
        await asyncio.sleep(0)
    refused = await running.client.http.post("/retrieve", json={"model": "books", "queries": [{"history": []}]})
    assert refused.status_code == problem(refused)["status"] == 429
    assert refused.headers["retry-after"] == "1"
    engine.go.set()
    answers = [answer async for answer in talk.answers()]
    assert ["results" in answer for answer in answers] == [True] * 20
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_shed_total{model="books"} 1.0' in text
    assert 'espalier_requests_total{model="books",status="429"} 1.0' in text


@pytest.mark.settings(stream_window=6)
async def test_a_client_that_hangs_up_leaves_nothing_in_the_queue(running: Running) -> None:
    talk, engine, batcher = held(running, 10, more=True)
    while batcher.depth + sum(len(queries) for queries, _ in engine.calls) < 6:  # the first call may have taken several
        await asyncio.sleep(0)
    await talk.leave()
    await talk.task
    assert batcher.depth == 0
    engine.go.set()
    assert len(engine.calls) == 1
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_requests_total{model="books",status="200"}' not in text
    assert 'espalier_requests_total{model="books",status="499"}' in text


@pytest.mark.settings(stream_idle_s=IDLE_S)
async def test_a_client_that_never_reads_is_let_go(running: Running) -> None:
    talk = Conversation(running, STREAM)
    talk.say(line("item-1"))
    assert await talk.head() == 200
    talk.take(False)
    while not running.engines["books"].calls:
        await asyncio.sleep(0)
    await settled()
    await pass_time(IDLE_S - 1)
    assert not talk.task.done()
    await pass_time(2)
    await talk.task
