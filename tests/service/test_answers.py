"""Large answers: how large they may be, how many there may be at a time, and that their memory comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from espalier.arrays import Int64
from service import lifecycle
from service.http import memory_budget
from service.http.connection import CONNECTION
from service.http.memory_budget import Budget, Reservation
from service.http.retrieve_route import FREE_BYTES, FREE_VALUES, send_body
from service.retrieval.retrieve import BLOCK_ROWS
from tests.service.listening import Listening, Wire, direct, listening, post, retrieval
from tests.service.running import Json, problem, run, small_model
from tests.waiting import until

__all__ = ["large"]

MANY = 2048


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with a `books` of many items, all of which a query may ask for."""
    folder = tmp_path_factory.mktemp("large")
    columns = {"title": [f"title {i} " + "x" * 100 for i in range(MANY)]}
    small_model(folder, items=MANY, columns=columns, max_beam_size=MANY, max_m=MANY)
    return folder


def many(queries: int, **rest: Any) -> dict[str, Any]:
    """However long that takes: a machine under load needs more than the default of a second."""
    return {"model": "books", "queries": [{"history": []}] * queries, "m": MANY, "beam_size": MANY, "timeout_ms": 60_000} | rest


def test_an_answer_over_the_limit_is_422_and_blocks_are_those_of_each_query_alone(large: Path) -> None:
    with run(large, max_answer_values=6 * MANY) as running:
        assert running.client.post("/retrieve", json=many(3)).status_code == 200
        assert running.client.post("/retrieve", json=many(2, fields=["title"])).status_code == 200
        answer = running.client.post("/retrieve", json=many(3, fields=["title"]))
        assert len(running.engines["books"].calls) == 2
    assert answer.status_code == problem(answer)["status"] == 422
    (error,) = problem(answer)["errors"]
    assert error["field"] == "m"
    for number in (3, MANY, 9 * MANY, 6 * MANY):
        assert str(number) in error["expected"]
    with run(large) as running:
        queries = [{"history": [], "exclude": [f"item-{i}"]} for i in range(5)]
        body = {"model": "books", "m": MANY, "beam_size": MANY, "fields": ["title"]}
        whole = running.client.post("/retrieve", json=body | {"queries": queries}).json()["results"]
        assert sum(len(result["items"]) for result in whole) > 2 * BLOCK_ROWS
        for query, result in zip(queries, whole, strict=True):
            assert result == running.client.post("/retrieve", json=body | {"queries": [query]}).json()["results"][0]


def test_large_answers_that_are_not_taken_keep_others_out_but_no_small_ones(large: Path) -> None:
    """The answers of a client that does not read count until it has taken them."""
    body = json.dumps(many(8, fields=["title"])).encode()
    with listening(large, max_answer_values=24 * MANY, write_timeout_s=600) as running:
        budget = direct(running, "/retrieve").answers
        unread = [running.connected(receive_buffer=4096) for _ in range(4)]
        wires = [one.__enter__() for one in unread]
        for wire in wires:
            wire.send(post("/retrieve", body))
        until(lambda: budget.available < 24 * MANY)
        refused = running.ask(post("/retrieve", body))
        assert refused.problem["status"] == 429
        assert refused.headers["retry-after"] == "1"
        assert running.ask(retrieval()).status == 200
        assert len(wires[0].reply().document["results"]) == 8
        until(lambda: budget.available >= 24 * MANY)
        assert running.ask(post("/retrieve", body)).status == 200
        for one in unread:
            one.__exit__(None, None, None)
        until(lambda: budget.available == budget.units)


def test_an_answer_that_is_taken_too_slowly_is_cut_off_and_its_room_comes_back(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.http.retrieve_route.MIN_BYTES_PER_S", 1 << 30)
    body = json.dumps(many(30, fields=["title"])).encode()
    with listening(large, write_timeout_s=0.3) as running, running.connected(receive_buffer=4096) as wire:
        budget = direct(running, "/retrieve").answers
        wire.send(post("/retrieve", body))
        assert wire.raw.recv(12) == b"HTTP/1.1 200"
        while budget.available < budget.units:  # it takes a little all the time
            wire.raw.recv(256)
            time.sleep(0.01)
        until(lambda: running.refused("not_read") == 1)
        counted = 'espalier_requests_total{model="books",status="499"} 1.0'  # after its room is back
        until(lambda: counted in running.app.state.service.metrics.render().decode(), "the request is counted")


def test_a_late_answer_is_504_however_it_became_late(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turning it into JSON is inside the deadline, too."""
    late_s, asked = [0.0], []
    monkeypatch.setattr("service.retrieval.retrieve.time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late_s[0]))
    with run(large) as running:
        items = running.app.state.service.registry.choose("books", None).bundle.items
        find = type(items).ids_of

        def slow(self: Any, rows: Int64) -> list[str]:
            asked.append(len(rows))
            late_s[0] += 2.5
            found: list[str] = find(self, rows)
            return found

        monkeypatch.setattr(type(items), "ids_of", slow)
        answer = running.client.post("/retrieve", json=many(40, timeout_ms=9000))
        assert answer.status_code == problem(answer)["status"] == 504
        assert 1 <= len(asked) < 40 * MANY / BLOCK_ROWS  # it was given up on the way
        late_s[0] = 0.0
        assert running.client.post("/retrieve", json=many(1, m=3, timeout_ms=9000)).status_code == 200
        late_s[0] = 0.0
        assert running.client.post("/retrieve", json=many(1, m=3, timeout_ms=2000)).status_code == 504


# -- streams ------------------------------------------------------------------------------------------------------------


def stream(lines: int, **rest: Any) -> bytes:
    body = (json.dumps(many(1, fields=["title"], **rest)).encode() + b"\n") * lines
    head = f"POST /retrieve/stream HTTP/1.1\r\nHost: test\r\nContent-Type: application/x-ndjson\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_stream_that_is_not_read_holds_one_answer_of_the_largest_size(large: Path) -> None:
    with listening(large, max_answer_values=6 * MANY, write_timeout_s=600) as running, running.connected(receive_buffer=4096) as wire:
        budget = direct(running, "/retrieve/stream").answers
        wire.send(stream(200))
        engine = running.engines["books"]
        until(lambda: budget.available <= budget.units - 3 * MANY and len(engine.calls) > 1)
        assert budget.units - budget.available <= 6 * MANY
        with running.connected() as other:  # another one goes on
            assert other.ask(stream(1)).status == 200
        assert len(engine.calls) < 20
    assert len(engine.calls) < 100  # nothing is searched for long for a client that has gone


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True])
def test_memory_that_has_grown_is_given_back(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """As long as it may come back; what stays although nothing large is under way is needed, until there is less."""
    looks_mb = [300, 310, 700, 690, 320, 310, *[600] * 5, *([600] if not busy else []), 620, 640, 250, 300]
    sizes, collected = [size << 20 for size in looks_mb], list[int]()

    def resident() -> int:
        return sizes.pop(0) if len(sizes) > 1 else sizes[0]

    async def looks() -> None:
        budget = Budget(10, 0)
        with Reservation(budget) as held:
            held.take(1 if busy else 0)
            task = asyncio.create_task(lifecycle.give_memory_back([budget]))
            while len(sizes) > 1 and not task.done():
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(lifecycle, "CHECK_S", 0)
    monkeypatch.setattr(lifecycle, "GROWN_BYTES", 32 << 20)
    monkeypatch.setattr(lifecycle, "resident_bytes", resident)
    monkeypatch.setattr(lifecycle, "collect", lambda: collected.append(looks_mb[len(looks_mb) - len(sizes) - 1]))
    asyncio.run(looks())
    assert collected[:7] == [700, 690, *[600] * 5]
    assert collected[7:9] == ([620, 640] if busy else [640])


# -- streams share memory: they wait for room, are refused where their bodies find none, and give up when their clients leave


HEAD = b"POST /retrieve/stream HTTP/1.1\r\nHost: test\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps(many(3)).encode() + b"\n"
"""Its answer takes more than the values that every request may have."""


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def left(caplog: pytest.LogCaptureFixture) -> bool:
    return any("the client hung up inside its stream" in record.getMessage() for record in caplog.records)


def streamed(wire: Wire, lines: bytes) -> list[Json]:
    """The answers to a stream that ends after these lines."""
    wire.send(HEAD + chunk(lines) + chunk(b""))
    return received(wire)


def received(wire: Wire) -> list[Json]:
    """The answers of a stream, once it has ended."""
    while not wire.rest.endswith(b"\r\n0\r\n\r\n"):
        wire.more()
    rest, body = wire.rest.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return [json.loads(line) for line in body.splitlines()]


@pytest.fixture
def service(large: Path) -> Iterator[Listening]:
    with listening(large, max_answer_values=6 * MANY) as running:
        yield running


def test_a_stream_that_waits_for_room_ends_when_its_client_leaves(
    service: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_budget, "RECHECK_S", 0.01)
    caplog.set_level(logging.DEBUG, "service.http.retrieve_route")
    answers = direct(service, "/retrieve/stream").answers
    with Reservation(answers) as others:
        assert others.take(answers.available + FREE_VALUES)
        with service.connected() as wire:
            wire.send(HEAD + chunk(BODY))
            until(lambda: answers.waiting, "the line waits for room")
        until(lambda: left(caplog), "the stream ends")
        assert not answers.waiting
    assert answers.available == answers.units
    assert service.engines["books"].calls == []


def test_lines_wait_for_room_go_on_and_count_until_they_are_answered(service: Listening) -> None:
    answers = direct(service, "/retrieve/stream").answers
    with service.connected() as wire:
        with Reservation(answers) as others:
            assert others.take(answers.available + FREE_VALUES)
            wire.send(HEAD + chunk(BODY))
            until(lambda: answers.waiting, "the line waits for room")
            assert service.engines["books"].calls == []
        wire.send(chunk(b""))
        [document] = received(wire)
    assert len(document["results"]) == 3
    until(lambda: answers.available == answers.units, "the room comes back")
    bodies = direct(service, "/retrieve/stream").bodies
    with Reservation(bodies) as others:
        assert others.take(bodies.available + FREE_BYTES)
        with service.connected() as wire:
            [document] = streamed(wire, json.dumps(many(1, m=3)).encode())
            assert "results" in document
        with service.connected() as wire:
            [document] = streamed(wire, json.dumps(many(1, m=3)).encode() + b" " * (2 * FREE_BYTES))
    assert document["status"] == 503
    assert "bodies" in str(document["detail"])
    until(lambda: bodies.available == bodies.units, "the room comes back")
    bodies, engine = direct(service, "/retrieve/stream").bodies, service.engines["books"]
    line = b"{" + b" " * 40_000 + json.dumps(many(1, m=3)).encode()[1:]
    with service.connected() as wire:
        engine.go.clear()
        wire.send(HEAD + b"".join(chunk(line + b"\n") for _ in range(3)))
        until(lambda: bodies.available == bodies.units - (3 * len(line) - FREE_BYTES), "all lines are counted")
        engine.go.set()
        until(lambda: bodies.available == bodies.units, "answered lines are counted no more")
        wire.send(chunk(b""))
        assert len(received(wire)) == 3


def test_nothing_is_sent_to_a_client_that_has_gone() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    left: list[bool] = []
    connection = SimpleNamespace(is_gone=True, abandon_answer=lambda: left.append(True))
    scope = {CONNECTION: connection}
    assert asyncio.run(send_body(send, scope, b"answer", 1.0)) is False
    assert sent == []
    assert left, "or the server logs an error about the answer"
    connection.is_gone = False
    assert asyncio.run(send_body(send, scope, b"answer", 1.0)) is True
    assert sent == [{"type": "http.response.body", "body": b"answer"}]
