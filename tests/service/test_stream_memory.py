"""Streams share memory: they wait for room, are refused where their bodies find none, and give up when their clients leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.types import Message

from service.http import memory_budget
from service.http.connection import CONNECTION
from service.http.memory_budget import Held
from service.http.retrieve_route import FREE_BYTES, FREE_VALUES, send_body
from tests.service.listening import Listening, Wire, direct, listening
from tests.service.running import Json
from tests.service.test_answers import MANY, large, many
from tests.waiting import until

__all__ = ["large"]

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
    with Held(answers) as others:
        assert others.take(answers.left + FREE_VALUES)
        with service.connected() as wire:
            wire.send(HEAD + chunk(BODY))
            until(lambda: answers.waiting, "the line waits for room")
        until(lambda: left(caplog), "the stream ends")
        assert not answers.waiting
    assert answers.left == answers.units
    assert service.engines["books"].calls == []


def test_a_stream_that_waits_for_room_goes_on_when_there_is_some(service: Listening) -> None:
    answers = direct(service, "/retrieve/stream").answers
    with service.connected() as wire:
        with Held(answers) as others:
            assert others.take(answers.left + FREE_VALUES)
            wire.send(HEAD + chunk(BODY))
            until(lambda: answers.waiting, "the line waits for room")
            assert service.engines["books"].calls == []
        wire.send(chunk(b""))
        [document] = received(wire)
    assert len(document["results"]) == 3
    until(lambda: answers.left == answers.units, "the room comes back")


def test_a_long_line_that_finds_no_room_is_refused_and_a_short_one_is_answered(service: Listening) -> None:
    bodies = direct(service, "/retrieve/stream").bodies
    with Held(bodies) as others:
        assert others.take(bodies.left + FREE_BYTES)
        with service.connected() as wire:
            [document] = streamed(wire, json.dumps(many(1, m=3)).encode())
            assert "results" in document
        with service.connected() as wire:
            [document] = streamed(wire, json.dumps(many(1, m=3)).encode() + b" " * (2 * FREE_BYTES))
    assert document["status"] == 503
    assert "bodies" in str(document["detail"])
    until(lambda: bodies.left == bodies.units, "the room comes back")


def test_lines_count_until_they_are_answered(service: Listening) -> None:
    bodies, engine = direct(service, "/retrieve/stream").bodies, service.engines["books"]
    line = b"{" + b" " * 40_000 + json.dumps(many(1, m=3)).encode()[1:]
    with service.connected() as wire:
        engine.go.clear()
        wire.send(HEAD + b"".join(chunk(line + b"\n") for _ in range(3)))
        until(lambda: bodies.left == bodies.units - (3 * len(line) - FREE_BYTES), "all lines are counted")
        engine.go.set()
        until(lambda: bodies.left == bodies.units, "answered lines are counted no more")
        wire.send(chunk(b""))
        assert len(received(wire)) == 3


def test_nothing_is_sent_to_a_client_that_has_gone() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    left: list[bool] = []
    connection = SimpleNamespace(gone=True, leave_answer=lambda: left.append(True))
    scope = {CONNECTION: connection}
    assert asyncio.run(send_body(send, scope, b"answer", 1.0)) is False
    assert sent == []
    assert left, "or the server logs an error about the answer"
    connection.gone = False
    assert asyncio.run(send_body(send, scope, b"answer", 1.0)) is True
    assert sent == [{"type": "http.response.body", "body": b"answer"}]
