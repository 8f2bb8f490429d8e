"""POST /retrieve/stream: many requests in one, line by line, both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
from starlette.types import Message

from tests.service.running import Json, Running, problem, run

LINES = {"Content-Type": "application/x-ndjson"}


def line(item: str, **rest: Any) -> bytes:
    return orjson.dumps({"model": "books", "queries": [{"history": [item]}], "m": 2} | rest)


def stream(running: Running, body: bytes, **headers: str) -> httpx.Response:
    return running.client.post("/retrieve/stream", content=body, headers=LINES | headers)


def documents(answer: httpx.Response) -> list[Json]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(text) for text in answer.content.splitlines()]


def test_each_line_gets_its_answer_in_order(models: Path) -> None:
    with run(models) as running:
        body = b"\n".join(line(f"item-{i % 30}", m=1 + i % 7) for i in range(200))
        found = documents(stream(running, body))
        histories = [int(item) for queries, _ in running.engines["books"].calls for item in queries.array[:, -1]]
        text = running.client.get("/metrics").text
    assert [len(document["results"][0]["items"]) for document in found] == [1 + i % 7 for i in range(200)]
    assert sorted(histories) == sorted(i % 30 for i in range(200))
    assert 'espalier_requests_total{model="books",status="200"} 200.0' in text


def test_a_wrong_line_costs_one_line(models: Path) -> None:
    wrong = [b"{", b"[]", b'"x"', b'{"queries": []}', line("item-1", m=0), line("item-1", model="nobody"), b"\xff\xfe", line("x" * 3000)]
    body = b"\n".join(part for bad in wrong for part in (line("item-1"), bad)) + b"\n\n  \n" + line("item-2")
    with run(models, max_body_bytes=2000) as running:
        found = documents(stream(running, body))
        text = running.client.get("/metrics").text
    assert [document.get("status", 200) for document in found[1::2]] == [422, 422, 422, 422, 422, 404, 422, 413]
    assert found[9]["errors"][0]["field"] == "m"
    assert all("results" in document for document in found[::2])
    assert len(found) == 2 * len(wrong) + 1
    assert 'espalier_requests_total{model="books",status="422"}' not in text  # no model was found for those
    assert 'espalier_requests_total{model="",status="422"} 6.0' in text


def test_a_failing_engine_costs_the_lines_of_that_call(models: Path) -> None:
    with run(models) as running:
        running.engines["books"].failure = RuntimeError("secret")
        found = documents(stream(running, line("item-1")))
        assert found[0]["status"] == 500
        assert "secret" not in str(found)
        assert "results" in documents(stream(running, line("item-1")))[0]


def test_an_empty_stream_is_answered_with_nothing(models: Path) -> None:
    with run(models) as running:
        assert documents(stream(running, b"")) == []


def test_a_stream_is_larger_than_a_request_may_be(models: Path) -> None:
    with run(models, max_body_bytes=200) as running:
        assert len(documents(stream(running, b"\n".join([line("item-1")] * 50)))) == 50


def test_another_content_type_is_refused(models: Path) -> None:
    with run(models) as running:
        answer = stream(running, line("item-1"), **{"Content-Type": "application/json"})
    assert answer.status_code == problem(answer)["status"] == 415


class Conversation:
    """A client that decides when it sends a line and when it reads one."""

    def __init__(self, running: Running) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.got: asyncio.Queue[Message] = asyncio.Queue()
        self.taking = asyncio.Event()
        self.taking.set()
        self.asked = 0
        headers = [(b"content-type", b"application/x-ndjson")]
        scope = {"type": "http", "method": "POST", "path": "/retrieve/stream", "query_string": b"", "headers": headers, "state": {}}
        self.task = asyncio.create_task(running.app(scope, self.receive, self.send))

    async def receive(self) -> Message:
        self.asked += 1
        return await self.sent.get()

    async def send(self, message: Message) -> None:
        await self.taking.wait()
        await self.got.put(message)

    def say(self, body: bytes, more: bool = True) -> None:
        self.sent.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def answers(self) -> AsyncIterator[Json]:
        while (message := await asyncio.wait_for(self.got.get(), 10)).get("body") != b"":
            if message["type"] == "http.response.body":
                yield orjson.loads(message["body"])


async def test_a_line_is_answered_before_the_next_one_is_sent(running: Running) -> None:
    talk = Conversation(running)
    answers = talk.answers()
    for i in range(3):
        talk.say(line(f"item-{i}") + b"\n")
        assert (await anext(answers))["model"] == "books"
    talk.say(b"", more=False)
    assert [answer async for answer in answers] == []
    await talk.task


@pytest.mark.settings(stream_window=8)
async def test_a_client_that_does_not_read_holds_its_own_sending_back(running: Running) -> None:
    talk = Conversation(running)
    assert (await talk.got.get())["status"] == 200  # only then it begins to read
    talk.taking.clear()
    for i in range(100):
        talk.say(line(f"item-{i % 30}") + b"\n", more=i < 99)
    engine = running.engines["books"]
    for _ in range(300):
        await asyncio.sleep(0)
    while running.app.state.service.registry.choose("books", None).batcher.depth:
        await asyncio.sleep(0)
    assert 8 < talk.asked <= 12  # the window, those on their way in, and one more
    assert 8 <= sum(len(queries) for queries, _ in engine.calls) <= 12
    talk.taking.set()
    assert len([answer async for answer in talk.answers()]) == 100
    await talk.task


@pytest.mark.settings(max_queue=2)
async def test_a_stream_waits_for_room_where_a_single_request_is_refused(running: Running) -> None:
    engine = running.engines["books"]
    batcher = running.app.state.service.registry.choose("books", None).batcher
    engine.go.clear()
    talk = Conversation(running)
    talk.say(b"\n".join(line(f"item-{i}") for i in range(20)), more=False)
    while not engine.calls or batcher.depth < 2:  # before its first call the engine still makes room
        await asyncio.sleep(0)
    refused = await running.client.http.post("/retrieve", json={"model": "books", "queries": [{"history": []}]})
    assert refused.status_code == problem(refused)["status"] == 429
    assert refused.headers["retry-after"] == "1"
    engine.go.set()
    answers = [answer async for answer in talk.answers()]
    assert len(answers) == 20
    assert all("results" in answer for answer in answers)
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_shed_total{model="books"} 1.0' in text
    assert 'espalier_requests_total{model="books",status="429"} 1.0' in text


@pytest.mark.settings(stream_window=6)
async def test_a_client_that_hangs_up_leaves_nothing_in_the_queue(running: Running) -> None:
    engine = running.engines["books"]
    batcher = running.app.state.service.registry.choose("books", None).batcher
    engine.go.clear()
    talk = Conversation(running)
    talk.say(b"\n".join(line(f"item-{i}") for i in range(10)) + b"\n")
    while batcher.depth + sum(len(queries) for queries, _ in engine.calls) < 6:  # the first call may have taken several
        await asyncio.sleep(0)
    talk.sent.put_nowait({"type": "http.disconnect"})
    await talk.task
    assert batcher.depth == 0
    engine.go.set()
    assert len(running.engines["books"].calls) == 1
    text = (await running.client.http.get("/metrics")).text
    assert 'espalier_requests_total{model="books",status="200"}' not in text
    assert 'espalier_requests_total{model="books",status="499"}' in text


@pytest.mark.settings(stream_idle_s=0.05)
async def test_a_client_that_never_reads_is_let_go(running: Running) -> None:
    talk = Conversation(running)
    talk.say(line("item-1") + b"\n")
    assert (await talk.got.get())["status"] == 200
    talk.taking.clear()
    await asyncio.wait_for(talk.task, 10)


@pytest.mark.settings(stream_idle_s=0.05)
async def test_a_stream_that_falls_silent_ends_with_a_problem(running: Running) -> None:
    talk = Conversation(running)
    talk.say(line("item-1") + b"\n")
    answers = [answer async for answer in talk.answers()]
    assert [answer.get("status", 200) for answer in answers] == [200, 408]
    await talk.task
